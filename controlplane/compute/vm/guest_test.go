package vm

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const goodKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ ada@desk"

// TestExecNeedsPermission checks that a program runs only in the guest of a VM whose metadata allows it.
func TestExecNeedsPermission(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty(), func(n *cloud.Node) { n.Features = map[string]string{cloud.FeatureGuestCalls: ""} })
	vm := w.createInState(cloud.Running, "web")
	run := func() *fault.Fault {
		_, err := w.vms.RunInGuest(w.as(acme, ""), acme, vm.ID, guestProgram{command: []string{"true"}})
		f, ok := fault.From(err)
		require.True(t, ok, "%v", err)
		return f
	}
	require.Equal(t, "GUEST_EXEC_NOT_ALLOWED", run().Reason, "a program may run in this guest")
	for _, value := range []string{"refused", "allowed"} {
		_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Metadata: map[string]string{cloud.GuestExec: value}})
		require.NoError(t, err)
		if value == "refused" {
			require.Equal(t, "GUEST_EXEC_NOT_ALLOWED", run().Reason, "a program may run in this guest")
		}
	}
	// The host of this test has no agent.
	require.Equal(t, fault.Unavailable, run().Kind)
	_, err := w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Metadata: map[string]string{cloud.GuestExec: "yes"}})
	require.ErrorContains(t, err, "must be allowed or refused")
}

// TestGuestCallStates checks that the guest agent is called only in VMs that are RUNNING, and of the caller's project.
func TestGuestCallStates(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	for _, state := range []cloud.State{cloud.Creating, cloud.Stopped, cloud.Starting, cloud.Stopping, cloud.Error, cloud.Failed} {
		vm := w.createInState(state, "in-"+strings.ToLower(state.String()))
		err := w.vms.SetGuestPassword(w.as(acme, ""), acme, vm.ID, "root", "secret")
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%s: %v", state, err)
		require.ErrorContains(t, err, state.String())
	}
	vm := w.createInState(cloud.Running, "web")
	err := w.vms.SetGuestPassword(w.as(other, ""), other, vm.ID, "root", "secret")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	require.ErrorContains(t, errNotRunning(&cloud.VM{Name: "web", State: cloud.Migrating}), "repeat the call")
}

// TestGuestCallArguments makes calls with invalid arguments. The errors must name the field and not repeat a password.
func TestGuestCallArguments(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	ctx, r := w.as(acme, ""), &guestServer{s: w.vms}
	password := func(user, password string) error {
		_, err := r.SetGuestPassword(ctx, &guestv1.SetGuestPasswordRequest{VmId: string(vm.ID), Username: user, Password: password})
		return err
	}
	keys := func(user string, keys ...string) error {
		_, err := r.AddGuestSshKeys(ctx, &guestv1.AddGuestSshKeysRequest{VmId: string(vm.ID), Username: user, Keys: keys})
		return err
	}
	run := func(in *guestv1.RunGuestCommandRequest) error {
		in.VmId = string(vm.ID)
		_, err := r.RunGuestCommand(ctx, in)
		return err
	}
	long := strings.Repeat("secret", 30)
	for _, c := range []struct {
		name  string
		err   error
		field string
	}{
		{"no user", password("", "secret"), "username"},
		{"a user with a colon", password("root:x", "secret"), "username"},
		{"a user that begins with a hyphen", password("-x", "secret"), "username"},
		{"no password", password("root", ""), "password"},
		{"a password with a line break", password("root", "secret\nroot:x"), "password"},
		{"a long password", password("root", long), "password"},
		{"a password that is not UTF-8", password("root", "secret\xff"), "password"},
		{"no keys", keys("root"), "keys"},
		{"a private key", keys("root", "-----BEGIN OPENSSH PRIVATE KEY-----"), "keys"},
		{"two lines in a key", keys("root", goodKey+"\n"+goodKey), "keys"},
		{"33 keys", keys("root", strings.Split(strings.Repeat(goodKey+"|", 33), "|")[:33]...), "keys"},
		{"a user of keys with a slash", keys("../root", goodKey), "username"},
		{"no command", run(&guestv1.RunGuestCommandRequest{}), "command"},
		{"an empty program", run(&guestv1.RunGuestCommandRequest{Command: []string{"", "x"}}), "command"},
		{"65 arguments", run(&guestv1.RunGuestCommandRequest{Command: strings.Split(strings.Repeat("x ", 65), " ")}), "command"},
		{"a long command", run(&guestv1.RunGuestCommandRequest{Command: []string{"x", strings.Repeat("x", 16<<10)}}), "command"},
		{"a zero byte", run(&guestv1.RunGuestCommandRequest{Command: []string{"x\x00y"}}), "command"},
		{"much input", run(&guestv1.RunGuestCommandRequest{Command: []string{"x"}, Stdin: make([]byte, 64<<10+1)}), "stdin"},
		{"a long timeout", run(&guestv1.RunGuestCommandRequest{Command: []string{"x"}, TimeoutSeconds: 301}), "timeout_seconds"},
	} {
		f, ok := fault.From(c.err)
		require.True(t, ok, "%s: %v", c.name, c.err)
		require.Equal(t, []any{fault.InvalidArgument, c.field}, []any{f.Kind, f.Field}, "%s: %v", c.name, c.err)
		require.NotContains(t, f.Message, "secret", c.name)
	}
	require.Equal(t, vm, w.get(vm.ID))
}

// TestGuestAddresses checks that addresses which a guest reports are checked and shown after those of the NICs, and that
// they change no record.
func TestGuestAddresses(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	flood := []string{"172.17.0.1", "172.17.0.1", "fe80::1%eth0", "127.0.0.1", "::1", "224.0.0.1", "not an address", strings.Repeat("1", 1<<16), "::ffff:172.18.0.1"}
	for range 200 {
		flood = append(flood, "2001:db8::"+strings.Repeat("1", 1+len(flood)%4)+":"+strings.Repeat("2", 1+len(flood)%3))
	}
	before := w.store.Revision()
	w.report(vm.ID, cloud.ObservedRunning, func(o *cloud.Observation) { o.Usage = &cloud.Usage{GuestAddresses: flood} })
	require.Equal(t, before, w.store.Revision(), "addresses of a guest must change no record")
	r := &viewServer{server: server{s: w.vms}}
	got := r.toProto(w.as(acme, ""), w.get(vm.ID)).GetStatus().GetIpAddresses()
	require.Equal(t, []string{"172.17.0.1", "172.18.0.1"}, got[:2])
	require.LessOrEqual(t, len(got), 64)
}

// TestProcessIDIsForOperators checks that only a system:admin gets the ID of a VM's process on its host, in each response
// with a VM, and that no event of WatchVm has it.
func TestProcessIDIsForOperators(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Running, "web")
	w.report(vm.ID, cloud.ObservedRunning, func(o *cloud.Observation) { o.PID = 4711 })
	tenant := w.as(acme, "")
	operator := w.as(acme, "")
	auth.CallerOf(operator).Bindings = []cloud.Binding{{Role: cloud.SystemAdmin}}
	r := &viewServer{server: server{s: w.vms}}
	for ctx, want := range map[context.Context]uint32{tenant: 0, operator: 4711} {
		d, err := r.GetVmDetails(ctx, &operatorv1.GetVmDetailsRequest{OrgId: string(acme.Org), ProjectId: string(acme.Project), VmId: string(vm.ID)})
		require.NoError(t, err)
		require.Equal(t, want, d.GetVm().GetStatus().GetHostPid())
		one, err := r.GetVm(ctx, &vmv1.GetVmRequest{OrgId: string(acme.Org), ProjectId: string(acme.Project), VmId: string(vm.ID)})
		require.NoError(t, err)
		require.Equal(t, want, one.GetStatus().GetHostPid())
		list, err := r.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: string(acme.Org), ProjectId: string(acme.Project)})
		require.NoError(t, err)
		require.Equal(t, want, list.GetVms()[0].GetStatus().GetHostPid())
		change := listChange(ctx, ListChange{ID: vm.ID, VM: w.get(vm.ID)})
		require.Equal(t, want, change.GetVm().GetStatus().GetHostPid())
		require.Zero(t, w.watchedPID(ctx, vm.ID))
	}
}

// watchedPID returns status.host_pid of the first event of a watch of a VM.
func (w *world) watchedPID(ctx context.Context, id cloud.VMID) uint32 {
	w.t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e := &vmv1.VmEvent{}
	_ = w.vms.Watch(ctx, acme, id, func(m rpc.Lazy) error {
		defer cancel()
		data, err := m()
		if err != nil {
			return err
		}
		return proto.Unmarshal(data.Data(), e)
	})
	require.Equal(w.t, string(id), e.GetVm().GetId())
	return e.GetVm().GetStatus().GetHostPid()
}
