package e2e

import (
	"fmt"
	"sync"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// attachRounds is the number of rounds of attachStoppedAtOnce.
const attachRounds = 100

// attachStoppedAtOnce attaches a volume to two stopped VMs on different hosts at once, in many rounds. The two calls go
// to different members. In each round one call must succeed, and the error of the other one must name the VM that got
// the volume. In the end the volume is detached and the VMs are deleted.
func (f *rbdFaults) attachStoppedAtOnce() {
	t := f.t
	var members [3]*lab.GRPC
	for i := range members {
		member, err := lab.Dial(fmt.Sprintf("127.0.0.%d", i+1), f.adminToken)
		require.NoError(t, err)
		defer member.Close()
		members[i] = member
	}
	var vms [2]string
	for i := range vms {
		vm, err := f.admin.VMs.CreateVm(f.ctx, &vmv1.CreateVmRequest{
			Name: fmt.Sprint("idle-", i), OrgId: "default", ProjectId: "default",
			Labels: map[string]string{"trivet/node-selector": fmt.Sprintf("host=host-%d", i+1)},
			Spec: &vmv1.VmSpec{Memory: &vmv1.MemorySpec{SizeMib: 192}, Disks: []*vmv1.DiskSpec{
				{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1},
			}},
		})
		require.NoError(t, err)
		vms[i] = vm.GetId()
		eventually(f.ctx, t, f.admin, vms[i], "the VM is built", func(vm *vmv1.VirtualMachine) bool {
			return vm.GetState() == vmv1.VmState_VM_STATE_STOPPED
		})
	}
	wins := [2]int{}
	for round := range attachRounds {
		var errs [2]error
		var calls sync.WaitGroup
		for i, vm := range vms {
			calls.Go(func() {
				_, errs[i] = members[(round+i)%3].VMs.AttachDisk(f.ctx, &vmv1.AttachDiskRequest{
					OrgId: "default", ProjectId: "default", VmId: vm, Disk: &vmv1.DiskSpec{
						Id: "more", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: f.more}},
					},
				})
			})
		}
		calls.Wait()
		winner := 0
		if errs[0] != nil {
			winner = 1
		}
		require.NoError(t, errs[winner])
		require.Equal(t, codes.FailedPrecondition, status.Code(errs[1-winner]))
		require.ErrorContains(t, errs[1-winner], "is attached to VM "+vms[winner])
		wins[winner]++
		f.detach(vms[winner], f.more, "more")
	}
	t.Logf("the VMs won %v of %d rounds", wins, attachRounds)
	for _, vm := range vms {
		_, err := f.admin.VMs.DeleteVm(f.ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: vm})
		require.NoError(t, err)
	}
}
