package vm

import (
	"net/http"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// updateBody is the body of PATCH. Absent fields stay unchanged.
type updateBody struct {
	// 1 to 288. Absent: unchanged. A VM that runs gets the new number at its next start or reboot.
	VCPUs *uint32 `json:"vcpus"`
	// In MiB, 64 to 12582912. Absent: unchanged. A VM that runs gets the new size at its next start or reboot.
	MemoryMiB *uint64 `json:"memory_mib"`
	// Disks to make larger. The others stay unchanged. A running guest gets the new size at once.
	Disks []diskSizeBody `json:"disks"`
	// Pairs to add or to change. An empty value removes the pair.
	Metadata map[string]string `json:"metadata"`
	// Labels to add or to change. An empty value removes the label.
	Labels map[string]string `json:"labels"`
}

// diskSizeBody is a new size of a disk.
type diskSizeBody struct {
	// The ID of the disk in the VM. The disk must not be a volume.
	ID string `json:"id"`
	// In GiB, at least the present size and at most 65536.
	SizeGiB uint64 `json:"size_gib"`
}

// diskSizes returns the sizes by the ID of the disk. It returns InvalidArgument if two bodies have the same ID.
func diskSizes(all []diskSizeBody) (map[string]uint64, error) {
	sizes := map[string]uint64{}
	for _, d := range all {
		if _, twice := sizes[d.ID]; twice {
			return nil, fault.Invalid("disks", "disk %s occurs twice", d.ID)
		}
		sizes[d.ID] = d.SizeGiB
	}
	return sizes, nil
}

// patchVM changes the size, the disks, the metadata and the labels of a VM.
func (s *Service) patchVM(_ *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "UpdateVm")
	if err != nil {
		return nil, err
	}
	var in updateBody
	if _, err := rest.Decode(r, &in); err != nil {
		return nil, err
	}
	switch {
	case in.VCPUs == nil && in.MemoryMiB == nil && len(in.Disks) == 0 && len(in.Metadata) == 0 && len(in.Labels) == 0:
		return nil, fault.New(fault.InvalidArgument, "nothing to change: give vcpus, memory_mib, disks, metadata or labels")
	case in.VCPUs != nil && *in.VCPUs == 0:
		return nil, fault.Invalid("vcpus", "must be 1 to %d, got 0", cloud.MaxVCPUs)
	case in.MemoryMiB != nil && *in.MemoryMiB == 0:
		return nil, fault.Invalid("memory_mib", "must be %d to %d, got 0", cloud.MinMemoryMiB, cloud.MaxMemoryMiB)
	}
	sizes, err := diskSizes(in.Disks)
	if err != nil {
		return nil, err
	}
	vm, err := s.Update(r.Context(), t, id, Change{
		VCPUs: in.VCPUs, MemoryMiB: in.MemoryMiB, DiskSizes: sizes, Metadata: in.Metadata, Labels: in.Labels,
	})
	if err != nil {
		return nil, withBodyField(err)
	}
	return toREST(&vm), nil
}

// eventNames has the name of each type of event in REST.
var eventNames = map[EventType]string{
	CreatedEvent: "created", UpdatedEvent: "updated", DeletedEvent: "deleted", StateChangedEvent: "state_changed",
}

type eventResponse struct {
	// The ID of the VM.
	VMID cloud.VMID `json:"vm_id"`
	// created, updated, deleted or state_changed.
	EventType string `json:"event_type"`
	// The VM after the change.
	VM vmResponse `json:"vm"`
	// The time of the change, as in RFC 3339.
	Timestamp string `json:"timestamp"`
}

// watchVM sends the current VM and then one event per change, like WatchVm.
func (s *Service) watchVM(r *http.Request, send func(rest.Event) error) error {
	t, id, err := admitVM(r, "WatchVm")
	if err != nil {
		return err
	}
	return s.WatchRecords(r.Context(), t, id, func(e Event) error {
		name := eventNames[e.Type]
		return send(rest.Event{Name: name, Data: eventResponse{
			VMID: e.VM.ID, EventType: name, VM: toREST(e.VM), Timestamp: time.UnixMilli(e.At).UTC().Format(time.RFC3339Nano),
		}})
	})
}
