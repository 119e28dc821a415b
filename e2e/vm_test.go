package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	banner = "TRIVET GUEST READY"
	// guestCmdline is the kernel command line of the small guest; images/guest/build has the reasons.
	guestCmdline = "console=ttyS0 quiet panic=-1 cryptomgr.notests tsc=unstable no_timer_check"
)

// body returns the body of a REST request that creates a small VM with one disk, backed by an image.
func body(name, image string) map[string]any {
	return map[string]any{"name": name, "memory_mib": 192, "disks": []any{
		map[string]any{"id": "root", "source": map[string]any{"type": "image", "image_id": image}, "size_gib": 1},
	}}
}

// cloud starts three members and a node agent, imports the small guest's images, and creates the tenant ada. The client
// that it returns calls member 2 with ada's token.
func cloud(t *testing.T) (w *world, images lab.GuestImages, tenant *lab.REST) {
	w = newWorld(t)
	w.startAgent()
	images, err := lab.ImportGuest(w.context(time.Minute), w.trio, w.admin, guest(t))
	require.NoError(t, err)
	return w, images, w.rest(2, w.tenant("ada", "default", "default", "project:member"))
}

// eventually reads a VM of the project default repeatedly until the function ok returns true for it, and returns the
// VM.
func eventually(ctx context.Context, t *testing.T, g *lab.GRPC, id, what string, ok func(*vmv1.VirtualMachine) bool) *vmv1.VirtualMachine {
	t.Helper()
	var vm *vmv1.VirtualMachine
	require.NoError(t, lab.Until(ctx, what, func(ctx context.Context) (err error) {
		vm, err = g.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: "default", ProjectId: "default", VmId: id})
		if err == nil && !ok(vm) {
			err = fmt.Errorf("the VM is %s: %s", vm.GetState(), vm.GetStatus().GetLastError())
		}
		return err
	}))
	return vm
}

// TestVMOverREST creates, starts, reads, lists, stops and deletes a VM over REST. It checks the responses, that the
// guest boots and is shut down cleanly, and that the host's files are removed.
func TestVMOverREST(t *testing.T) {
	w, images, ada := cloud(t)
	ada.Check = documented(t)
	ctx := w.context(3 * time.Minute)

	made, err := ada.Do(ctx, 8084, http.MethodPost, "/api/v1/vms", body("web", images.Disk))
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, made.Status, made.Raw)
	var vm lab.VM
	require.NoError(t, json.Unmarshal(made.Data, &vm))
	var fields map[string]any
	require.NoError(t, json.Unmarshal(made.Data, &fields))
	require.Equal(t, "Creating", fields["state"])
	require.Equal(t, "kvm", fields["hypervisor"])
	require.EqualValues(t, 1, fields["cpus"], "a VM must have one CPU by default")
	require.EqualValues(t, 192, fields["memory_mb"])
	require.Equal(t, []any{}, fields["network"])
	require.Equal(t, "default", fields["org_id"])

	path := "/api/v1/vms/" + vm.ID
	answer, err := ada.Do(ctx, 8084, http.MethodPost, path+"/start", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.Status, answer.Raw)
	require.JSONEq(t, fmt.Sprintf(`{"id":%q,"action":"started"}`, vm.ID), string(answer.Data))
	require.NoError(t, ada.Call(ctx, "GET", path, nil, &vm))
	require.Equal(t, "Running", vm.State)
	_, err = w.admin.Console(ctx, vm.ID, banner, 1)
	require.NoError(t, err)

	var list struct{ VMs []lab.VM }
	require.NoError(t, ada.Call(ctx, "GET", "/api/v1/vms", nil, &list))
	require.Len(t, list.VMs, 1)
	require.Equal(t, vm, list.VMs[0])

	answer, err = ada.Do(ctx, 8084, http.MethodDelete, path, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnprocessableEntity, answer.Status, "a running VM must not be deleted: %s", answer.Raw)

	answer, err = ada.Do(ctx, 8084, http.MethodPost, path+"/stop", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.Status, answer.Raw)
	require.JSONEq(t, fmt.Sprintf(`{"id":%q,"action":"stopped"}`, vm.ID), string(answer.Data))
	_, err = w.admin.Console(ctx, vm.ID, "TRIVET GUEST POWERBUTTON", 1)
	require.NoError(t, err, "the guest must be shut down by its power button")

	answer, err = ada.Do(ctx, 8084, http.MethodDelete, path, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.Status, answer.Raw)
	require.JSONEq(t, fmt.Sprintf(`{"id":%q,"deleted":true}`, vm.ID), string(answer.Data))
	answer, err = ada.Do(ctx, 8084, http.MethodGet, path, nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusNotFound, answer.Status)
	require.NoError(t, lab.Until(ctx, "the host has no files of the VM", func(context.Context) error {
		if _, err := os.Stat(w.agent.DataDir() + "/vms/" + vm.ID); err == nil {
			return errors.New("the VM's directory exists")
		}
		return nil
	}))
}

// TestPowerAndEvents starts, resets, reboots, stops, changes and deletes a VM over gRPC. It checks the effect of each
// call on the guest, and the order of the events that WatchVm sends.
func TestPowerAndEvents(t *testing.T) {
	w, images, _ := cloud(t)
	ctx := w.context(4 * time.Minute)
	g := w.dial(3, w.adminToken)
	of := func(id string) (string, string, string) { return "default", "default", id }
	vm, err := g.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
		Name: "direct", OrgId: "default", ProjectId: "default", Labels: map[string]string{"env": "test"},
		Spec: &vmv1.VmSpec{
			Memory: &vmv1.MemorySpec{SizeMib: 192}, Boot: &vmv1.BootSpec{Kernel: images.Kernel, Initrd: images.Initrd, Cmdline: guestCmdline},
			Disks: []*vmv1.DiskSpec{
				{Id: "a", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1},
				{Id: "b", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1, Bus: vmv1.DiskBus_DISK_BUS_SCSI, Cache: vmv1.DiskCache_DISK_CACHE_NONE},
				{Id: "c", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1, Bus: vmv1.DiskBus_DISK_BUS_IDE, Cache: vmv1.DiskCache_DISK_CACHE_WRITETHROUGH},
				{Id: "d", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}, SizeGib: 1, Bus: vmv1.DiskBus_DISK_BUS_SATA},
			},
		},
	})
	require.NoError(t, err)
	org, project, id := of(vm.GetId())
	events := make(chan *vmv1.VmEvent, 100)
	watch, err := g.VMs.WatchVm(ctx, &vmv1.WatchVmRequest{OrgId: org, ProjectId: project, VmId: id})
	require.NoError(t, err)
	go func() {
		defer close(events)
		for {
			e, err := watch.Recv()
			if err != nil {
				return
			}
			events <- e
		}
	}()

	vm, err = g.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: org, ProjectId: project, VmId: id})
	require.NoError(t, err)
	require.Equal(t, vmv1.VmState_VM_STATE_RUNNING, vm.GetState())
	line, err := w.admin.Console(ctx, id, banner, 1)
	require.NoError(t, err)
	for _, disk := range []string{"vda:", "sda:"} {
		require.Contains(t, line, disk, "the guest must have a virtio disk and a SCSI or IDE disk")
	}
	pid := vm.GetStatus().GetHostPid()
	require.NotZero(t, pid)

	_, err = g.VMs.ResetVm(ctx, &vmv1.ResetVmRequest{OrgId: org, ProjectId: project, VmId: id})
	require.NoError(t, err)
	require.NoError(t, consoleSays(ctx, w, id, banner, 2))
	_, err = g.VMs.RebootVm(ctx, &vmv1.RebootVmRequest{OrgId: org, ProjectId: project, VmId: id})
	require.NoError(t, err)
	require.NoError(t, consoleSays(ctx, w, id, banner, 3))
	require.NoError(t, consoleSays(ctx, w, id, "TRIVET GUEST POWERBUTTON", 1))

	// The VM's status must contain the memory usage that the host reports.
	eventually(ctx, t, g, id, "the VM's status contains its memory usage", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetStatus().GetResourceUsage().GetMemoryUsedMib() > 0
	})
	page, err := g.VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: org, ProjectId: project, Filter: `state = RUNNING AND labels.env = "test"`})
	require.NoError(t, err)
	require.Len(t, page.GetVms(), 1)

	vm, err = g.VMs.UpdateVm(ctx, &vmv1.UpdateVmRequest{OrgId: org, ProjectId: project, VmId: id, Labels: map[string]string{"env": "", "tier": "1"}})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"tier": "1"}, vm.GetLabels())

	vm, err = g.VMs.UpdateVm(ctx, &vmv1.UpdateVmRequest{OrgId: org, ProjectId: project, VmId: id, Spec: &vmv1.VmSpec{Cpu: &vmv1.CpuSpec{Vcpus: 2}}})
	require.NoError(t, err)
	require.Equal(t, []any{uint32(1), "vcpus=2"}, []any{vm.GetSpec().GetCpu().GetVcpus(), vm.GetMetadata()["trivet/pending-resize"]},
		"a VM that runs gets its new size at the next start")
	vm, err = g.VMs.StopVm(ctx, &vmv1.StopVmRequest{OrgId: org, ProjectId: project, VmId: id, Force: true})
	require.NoError(t, err)
	require.Equal(t, vmv1.VmState_VM_STATE_STOPPED, vm.GetState())
	require.EqualValues(t, 2, vm.GetSpec().GetCpu().GetVcpus())
	require.NotContains(t, vm.GetMetadata(), "trivet/pending-resize")
	_, err = g.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: org, ProjectId: project, VmId: id})
	require.NoError(t, err)
	require.NoError(t, lab.Until(ctx, "the guest has two processors", func(ctx context.Context) error {
		text, err := w.admin.ReadConsole(ctx, id)
		if err == nil && !strings.Contains(text, "cpus=2") {
			err = errors.New("not yet")
		}
		return err
	}))
	_, err = g.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: org, ProjectId: project, VmId: id, Force: true})
	require.NoError(t, err)

	var states []string
	var last *vmv1.VmEvent
	for e := range events {
		if last == nil {
			require.Equal(t, vmv1.VmEventType_VM_EVENT_TYPE_UPDATED, e.GetEventType(), "the first event must contain the current VM")
		} else {
			require.GreaterOrEqual(t, e.GetTimestamp(), last.GetTimestamp())
			if e.GetEventType() == vmv1.VmEventType_VM_EVENT_TYPE_UPDATED {
				require.Equal(t, last.GetVm().GetState(), e.GetVm().GetState(), "a change of state has its own type")
			}
		}
		if s := strings.TrimPrefix(e.GetVm().GetState().String(), "VM_STATE_"); last == nil || last.GetVm().GetState() != e.GetVm().GetState() {
			states = append(states, s)
		}
		last = e
	}
	require.Equal(t, vmv1.VmEventType_VM_EVENT_TYPE_DELETED, last.GetEventType())
	text := strings.Join(states, " ")
	require.Contains(t, text, "STARTING RUNNING STOPPING STOPPED STARTING RUNNING DELETED")
}

// consoleSays waits until the text in the parameter line is in the given number of lines of a VM's console log.
func consoleSays(ctx context.Context, w *world, id, line string, times int) error {
	_, err := w.admin.Console(ctx, id, line, times)
	return err
}

// runningVMs creates and starts n VMs at once, waits until each guest prints that it is ready, and returns the VMs'
// IDs.
func runningVMs(ctx context.Context, t *testing.T, w *world, ada *lab.REST, image string, n int) []string {
	ids := make([]string, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			var vm lab.VM
			if err := ada.Call(ctx, "POST", "/api/v1/vms", body(fmt.Sprintf("vm-%d", i), image), &vm); err != nil {
				t.Error(err)
				return
			}
			ids[i] = vm.ID
			if err := ada.Call(ctx, "POST", "/api/v1/vms/"+vm.ID+"/start", nil, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	require.False(t, t.Failed())
	for _, id := range ids {
		_, err := w.admin.Console(ctx, id, banner, 1)
		require.NoError(t, err)
	}
	return ids
}

// TestLeaderIsKilledUnderCreates kills the leader while a client creates 20 VMs and repeats failed calls with the same
// idempotency keys. It checks that every acknowledged VM exists exactly once, and that a running guest is not
// interrupted.
func TestLeaderIsKilledUnderCreates(t *testing.T) {
	w, images, ada := cloud(t)
	ctx := w.context(5 * time.Minute)
	before := runningVMs(ctx, t, w, ada, images.Disk, 1)[0]
	boot := eventually(ctx, t, w.admin, before, "the VM runs", func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING })

	leader := w.leader(1)
	token := w.tenantToken
	const n = 20
	acked := make([]string, n)
	var once sync.Once
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			key, member := fmt.Sprintf("key-%d", i), i%3+1
			for ctx.Err() == nil {
				if i == n/2 {
					once.Do(func() { w.dir.Kill(w.trio.Name(leader)) })
				}
				try, cancel := context.WithTimeout(ctx, 10*time.Second)
				var vm lab.VM
				err := w.rest(member, token).Call(try, "POST", "/api/v1/vms", body(fmt.Sprintf("burst-%d", i), images.Disk), &vm, "Idempotency-Key", key)
				cancel()
				if err == nil {
					acked[i] = vm.ID
					return
				}
				member = member%3 + 1
				time.Sleep(20 * time.Millisecond)
			}
		})
	}
	wg.Wait()
	var list struct{ VMs []lab.VM }
	alive := leader%3 + 1
	require.NoError(t, w.rest(alive, token).Call(ctx, "GET", "/api/v1/vms", nil, &list))
	byName := map[string][]string{}
	for _, vm := range list.VMs {
		byName[vm.Name] = append(byName[vm.Name], vm.ID)
	}
	require.Len(t, list.VMs, n+1)
	for i, id := range acked {
		require.Equal(t, []string{id}, byName[fmt.Sprintf("burst-%d", i)])
	}
	g := w.dial(alive, w.adminToken)
	now := eventually(ctx, t, g, before, "the VM runs", func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING })
	require.Equal(t, boot.GetStatus().GetHostPid(), now.GetStatus().GetHostPid())

	// The killed member must start again and have all VMs.
	require.NoError(t, w.trio.Start(leader))
	w.ready()
	require.NoError(t, w.rest(leader, token).Call(ctx, "GET", "/api/v1/vms", nil, &list))
	require.Len(t, list.VMs, n+1)
	for _, id := range acked {
		eventually(ctx, t, w.dial(leader, w.adminToken), id, "the VM is built", func(vm *vmv1.VirtualMachine) bool {
			return vm.GetState() == vmv1.VmState_VM_STATE_STOPPED
		})
	}
}

// TestAgentIsKilled kills the agent while ten VMs run, and starts it again. It checks that the guests continue in the
// same processes, and that the agent reports a QEMU that was killed while no agent ran, and one that is killed later.
func TestAgentIsKilled(t *testing.T) {
	w, images, ada := cloud(t)
	ctx := w.context(5 * time.Minute)
	ids := runningVMs(ctx, t, w, ada, images.Disk, 10)
	pids := map[string]uint32{}
	for _, id := range ids {
		vm := eventually(ctx, t, w.admin, id, "the VM runs", func(vm *vmv1.VirtualMachine) bool {
			return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING && vm.GetStatus().GetHostPid() != 0
		})
		pids[id] = vm.GetStatus().GetHostPid()
	}
	opened := openConsoles(ctx, t, w, ids[2])
	require.NoError(t, w.dir.Kill(w.agent.Name))
	victim := ids[0]
	require.NoError(t, syscall.Kill(int(pids[victim]), syscall.SIGKILL))
	require.NoError(t, w.agent.Start(""))
	began := time.Now()
	vm := eventually(ctx, t, w.admin, victim, "the end of QEMU is reported", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetState() == vmv1.VmState_VM_STATE_ERROR
	})
	require.NotEmpty(t, vm.GetStatus().GetLastError())
	t.Logf("ten VMs adopted and reported %.1f s after the start", time.Since(began).Seconds())
	for _, id := range ids[1:] {
		vm := eventually(ctx, t, w.admin, id, "the VM runs", func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_RUNNING })
		require.Equal(t, pids[id], vm.GetStatus().GetHostPid())
		text, err := w.admin.ReadConsole(ctx, id)
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(text, banner), "the guest must not boot again")
		require.Equal(t, w.agent.Cgroup, cgroupRoot(t, pids[id]))
	}

	opened.continueAfterRestart(ctx, t)
	second := ids[1]
	require.NoError(t, syscall.Kill(int(pids[second]), syscall.SIGKILL))
	began = time.Now()
	vm = eventually(ctx, t, w.admin, second, "the end of QEMU is reported", func(vm *vmv1.VirtualMachine) bool {
		return vm.GetState() == vmv1.VmState_VM_STATE_ERROR
	})
	t.Logf("reported %.2f s after the kill: %s", time.Since(began).Seconds(), vm.GetStatus().GetLastError())
	require.NotEmpty(t, vm.GetStatus().GetLastError())
	// The VM whose QEMU was killed must start again.
	vm, err := w.admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: "default", ProjectId: "default", VmId: second})
	require.NoError(t, err)
	require.Equal(t, vmv1.VmState_VM_STATE_RUNNING, vm.GetState())
	require.Empty(t, vm.GetStatus().GetLastError())
}

// cgroupRoot returns the name of the top cgroup that contains a process, in the hierarchy of cgroup v2 or of the memory
// controller.
func cgroupRoot(t *testing.T, pid uint32) string {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/cgroup")
	require.NoError(t, err)
	for _, line := range strings.Split(string(text), "\n") {
		if _, path, ok := strings.Cut(line, ":memory:/"); ok {
			root, _, _ := strings.Cut(path, "/")
			return root
		}
		if path, ok := strings.CutPrefix(line, "0::/"); ok && strings.Contains(path, "/") {
			root, _, _ := strings.Cut(path, "/")
			if root != "" && root != "init.scope" {
				return root
			}
		}
	}
	return ""
}
