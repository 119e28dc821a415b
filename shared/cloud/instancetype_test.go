package cloud

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestInstanceTypeCheck checks that the sizes of instance types have the limits of VMs.
func TestInstanceTypeCheck(t *testing.T) {
	valid := InstanceType{Name: "small", VCPUs: 2, MemoryMiB: 4096}
	largest := InstanceType{
		Name: "largest", VCPUs: MaxVCPUs, MemoryMiB: MaxMemoryMiB, RootDiskGiB: MaxDiskGiB, Description: strings.Repeat("x", MaxDescription),
	}
	require.NoError(t, valid.Check())
	require.NoError(t, largest.Check())
	smallest := Spec{CPU: &CPU{VCPUs: 1}, Memory: &Memory{SizeMiB: MinMemoryMiB}}
	require.NoError(t, smallest.Check())
	biggest := Spec{CPU: &CPU{VCPUs: largest.VCPUs}, Memory: &Memory{SizeMiB: largest.MemoryMiB}}
	require.NoError(t, biggest.Check(), "a VM can have the largest type")
	for _, c := range []struct {
		field string
		edit  func(*InstanceType)
	}{
		{"name", func(t *InstanceType) { t.Name = "" }},
		{"name", func(t *InstanceType) { t.Name = "m1.small" }},
		{"name", func(t *InstanceType) { t.Name = strings.Repeat("a", 64) }},
		{"vcpus", func(t *InstanceType) { t.VCPUs = 0 }},
		{"vcpus", func(t *InstanceType) { t.VCPUs = MaxVCPUs + 1 }},
		{"memory_mib", func(t *InstanceType) { t.MemoryMiB = 0 }},
		{"memory_mib", func(t *InstanceType) { t.MemoryMiB = MinMemoryMiB - 1 }},
		{"memory_mib", func(t *InstanceType) { t.MemoryMiB = MaxMemoryMiB + 1 }},
		{"root_disk_gib", func(t *InstanceType) { t.RootDiskGiB = MaxDiskGiB + 1 }},
		{"description", func(t *InstanceType) { t.Description = strings.Repeat("x", MaxDescription+1) }},
	} {
		have := valid
		c.edit(&have)
		err := have.Check()
		require.True(t, fault.Is(err, fault.InvalidArgument), "%+v", have)
		require.ErrorContains(t, err, c.field)
	}
}

// TestInstanceTypeUpdate changes the fields of an instance type that can change.
func TestInstanceTypeUpdate(t *testing.T) {
	text, no := "for tests", false
	have := InstanceType{Name: "small", VCPUs: 2, MemoryMiB: 4096, Available: true}
	changed, err := have.Update(InstanceTypeUpdate{})
	require.NoError(t, err)
	require.False(t, changed)
	changed, err = have.Update(InstanceTypeUpdate{Description: &text, Available: &no})
	require.NoError(t, err)
	require.True(t, changed)
	require.Equal(t, InstanceType{Name: "small", Description: text, VCPUs: 2, MemoryMiB: 4096}, have)
	changed, err = have.Update(InstanceTypeUpdate{Description: &text, Available: &no})
	require.NoError(t, err)
	require.False(t, changed, "a repeat changes nothing")
	long := strings.Repeat("x", MaxDescription+1)
	_, err = have.Update(InstanceTypeUpdate{Description: &long})
	require.ErrorContains(t, err, "description")
}

// TestInstanceTypeKey checks the metadata that names the instance type of a VM: the values, and that a resize removes
// the metadata.
func TestInstanceTypeKey(t *testing.T) {
	require.NoError(t, CheckInstanceTypeKey(nil))
	require.NoError(t, CheckInstanceTypeKey(map[string]string{InstanceTypeKey: "small"}))
	require.ErrorContains(t, CheckInstanceTypeKey(map[string]string{InstanceTypeKey: "not a name"}), "metadata")

	spec := func(vcpus uint32, mib uint64) *Spec {
		return &Spec{CPU: &CPU{VCPUs: vcpus}, Memory: &Memory{SizeMiB: mib}}
	}
	for _, c := range []struct {
		name   string
		to     *Spec
		change map[string]string
		want   string
	}{
		{"the same size", spec(2, 1024), nil, "small"},
		{"more processors", spec(4, 1024), nil, ""},
		{"more memory", spec(2, 2048), map[string]string{"a": "b"}, ""},
		{"another type", spec(4, 2048), map[string]string{InstanceTypeKey: "large"}, "large"},
	} {
		vm := &VM{Metadata: Merge(map[string]string{InstanceTypeKey: "small", "other": "x"}, c.change)}
		vm.ForgetInstanceType(spec(2, 1024), c.to, c.change)
		require.Equal(t, c.want, vm.Metadata[InstanceTypeKey], c.name)
		require.Equal(t, "x", vm.Metadata["other"], c.name)
	}
}
