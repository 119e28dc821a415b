package vm

import (
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/filter"
)

// matcher reports whether a VM matches a filter.
type matcher = filter.Match[*cloud.VM]

// parseFilter compiles a filter of lists of VMs. An empty filter accepts every VM.
func parseFilter(text string) (matcher, error) { return filter.Compile(text, filterFields) }

// filterFields are the fields that a filter of lists of VMs can compare (docs/api.md, "Lists").
var filterFields = map[string]filter.Field[*cloud.VM]{
	"name":       filter.Text(func(vm *cloud.VM) string { return vm.Name }),
	"id":         filter.Text(func(vm *cloud.VM) string { return string(vm.ID) }),
	"org_id":     filter.Text(func(vm *cloud.VM) string { return string(vm.Org) }),
	"project_id": filter.Text(func(vm *cloud.VM) string { return string(vm.Project) }),
	"node_id":    filter.Text(func(vm *cloud.VM) string { return string(vm.Node) }),
	"created_by": filter.Text(func(vm *cloud.VM) string { return vm.CreatedBy }),
	"last_error": filter.Text(func(vm *cloud.VM) string { return vm.Status.LastError }),
	"state":      filter.Word("VM_STATE_", states(), func(vm *cloud.VM) string { return vm.State.String() }),
	"vcpus":      filter.Number(nil, vcpus),
	// In MiB and GiB, as size_mib and size_gib in the API.
	"memory": filter.Number(map[string]float64{"MiB": 1, "GiB": 1 << 10, "TiB": 1 << 20}, memoryMiB),
	"disk":   filter.Number(map[string]float64{"GiB": 1, "TiB": 1 << 10}, diskGiB),

	"created_at": filter.Time(func(vm *cloud.VM) int64 { return vm.CreatedAt }),
	"updated_at": filter.Time(func(vm *cloud.VM) int64 { return vm.UpdatedAt }),
	"started_at": filter.Time(func(vm *cloud.VM) int64 { return vm.Status.StartedAt }),

	"ip_addresses": filter.Texts((*cloud.VM).Addresses),
	"image_id":     filter.Texts(imageIDs),
	"volume_id":    filter.Texts(volumeIDs),
	// These are the columns of `trivet vm list`.
	"tenant":    filter.Text(func(vm *cloud.VM) string { return string(vm.Org) + "/" + string(vm.Project) }),
	"address":   filter.Texts((*cloud.VM).Addresses),
	"addresses": filter.Texts((*cloud.VM).Addresses),
	"host_id":   filter.Text(func(vm *cloud.VM) string { return string(vm.Node) }),
	"creator":   filter.Text(func(vm *cloud.VM) string { return vm.CreatedBy }),
	"error":     filter.Text(func(vm *cloud.VM) string { return vm.Status.LastError }),
	"age":       filter.Time(func(vm *cloud.VM) int64 { return vm.CreatedAt }),
	"created":   filter.Time(func(vm *cloud.VM) int64 { return vm.CreatedAt }),
	"changed":   filter.Time(func(vm *cloud.VM) int64 { return vm.UpdatedAt }),

	"labels":   filter.Pairs(func(vm *cloud.VM) map[string]string { return vm.Labels }),
	"metadata": filter.Pairs(func(vm *cloud.VM) map[string]string { return vm.Metadata }),
}

func states() (all []string) {
	for s := cloud.Unspecified; s <= cloud.Deleted; s++ {
		all = append(all, s.String())
	}
	return all
}

func vcpus(vm *cloud.VM) float64 {
	if vm.Spec.CPU == nil {
		return 0
	}
	return float64(vm.Spec.CPU.VCPUs)
}

func memoryMiB(vm *cloud.VM) float64 {
	if vm.Spec.Memory == nil {
		return 0
	}
	return float64(vm.Spec.Memory.SizeMiB)
}

// diskGiB returns the size of a VM's disks that are not volumes.
func diskGiB(vm *cloud.VM) (sum float64) {
	for i := range vm.Spec.Disks {
		sum += float64(vm.Spec.Disks[i].SizeGiB)
	}
	return sum
}

func imageIDs(vm *cloud.VM) (ids []string) {
	for i := range vm.Spec.Disks {
		if id := vm.Spec.Disks[i].Image; id != "" {
			ids = append(ids, string(id))
		}
	}
	return ids
}

func volumeIDs(vm *cloud.VM) (ids []string) {
	for i := range vm.Spec.Disks {
		if id := vm.Spec.Disks[i].Volume; id != "" {
			ids = append(ids, string(id))
		}
	}
	return ids
}
