package vm

import (
	"testing"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestNextSize checks that a pending resize counts, so that `trivet apply` does not request it again.
func TestNextSize(t *testing.T) {
	for pending, want := range map[string]struct {
		vcpus, sockets, cores uint32
		memoryMiB             uint64
	}{
		"":                            {2, 1, 2, 1024},
		"vcpus=4":                     {4, 1, 2, 1024},
		"memory_mib=96":               {2, 1, 2, 96},
		"cpu_model=EPYC,hugepages=on": {2, 1, 2, 1024},
		"vcpus=8,sockets=2,cores_per_socket=4,memory_mib=2048": {8, 2, 4, 2048},
	} {
		vm := &vmv1.VirtualMachine{
			Metadata: map[string]string{cloud.PendingResize: pending},
			Spec: &vmv1.VmSpec{
				Cpu: &vmv1.CpuSpec{Vcpus: 2, Sockets: 1, CoresPerSocket: 2}, Memory: &vmv1.MemorySpec{SizeMib: 1024},
			},
		}
		cpu, memory := nextSize(vm)
		require.Equal(t, want.vcpus, cpu.GetVcpus(), pending)
		require.Equal(t, want.sockets, cpu.GetSockets(), pending)
		require.Equal(t, want.cores, cpu.GetCoresPerSocket(), pending)
		require.Equal(t, want.memoryMiB, memory, pending)
	}
}
