package node

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

func codeOf(err error) codes.Code { return status.Code(err) }

// callAll calls every method for agents and returns the errors by method. From a stream it receives at most one
// message.
func callAll(ctx context.Context, a agent) map[string]error {
	out := map[string]error{}
	_, out["Join"] = a.Join(ctx, &agentv1.JoinRequest{Protocol: Protocol})
	_, out["Renew"] = a.Renew(ctx, &agentv1.RenewRequest{})
	watch, err := a.AgentServiceClient.Watch(ctx, &agentv1.WatchRequest{Protocol: Protocol})
	if err == nil {
		_, err = watch.Recv()
	}
	out["Watch"] = err
	report, err := a.Report(ctx)
	if err == nil {
		_, err = report.CloseAndRecv()
	}
	out["Report"] = err
	image, err := a.ReadImage(ctx, &agentv1.ReadImageRequest{Sha256: "sum"})
	if err == nil {
		_, err = image.Recv()
	}
	out["ReadImage"] = err
	console, err := a.SendConsole(ctx)
	if err == nil {
		console.Send(&agentv1.SendConsoleRequest{RequestId: "x"})
		_, err = console.CloseAndRecv()
	}
	out["SendConsole"] = err
	networks, err := a.SyncNetworks(ctx)
	if err == nil {
		networks.Send(&agentv1.SyncNetworksRequest{Protocol: Protocol})
		_, err = networks.Recv()
	}
	out["SyncNetworks"] = err
	_, out["HeartbeatNode"] = a.HeartbeatNode(ctx, &vmv1.HeartbeatNodeRequest{})
	return out
}

// TestEveryCertificate calls every method for agents with each kind of certificate. Only a host's valid certificate may
// be accepted; Join requires none.
func TestEveryCertificate(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	other := newWorld(t)
	now := time.Now()
	for name, c := range map[string]struct {
		own    mtls.Source
		code   codes.Code
		joins  codes.Code
		renews codes.Code
	}{
		"no certificate":                      {nil, codes.Unauthenticated, codes.Unauthenticated, codes.Unauthenticated},
		"a member's certificate":              {w.certificate(mtls.Member, "2", now, time.Hour), codes.Unavailable, codes.Unavailable, codes.Unavailable},
		"a certificate of another cluster":    {other.certificate(mtls.Node, "n", now, time.Hour), codes.Unavailable, codes.Unavailable, codes.Unavailable},
		"a certificate that is not yet valid": {w.certificate(mtls.Node, "n", now.Add(2*time.Hour), time.Hour), codes.Unavailable, codes.Unavailable, codes.Unavailable},
		"a host without a record":             {w.certificate(mtls.Node, string(testVM(1)), now, time.Hour), codes.PermissionDenied, codes.Unauthenticated, codes.PermissionDenied},
	} {
		for method, err := range callAll(ctx, w.with(1, c.own)) {
			want := c.code
			switch method {
			case "Join":
				want = c.joins // Join requires a token, not a certificate
			case "Renew":
				want = c.renews
			}
			require.Equal(t, want, codeOf(err), "%s: %s: %v", name, method, err)
		}
	}
	for method, err := range callAll(ctx, w.host(1, 1)) {
		require.NotContains(t, []codes.Code{codes.Unavailable, codes.Internal, codes.Unimplemented}, codeOf(err), "%s: %v", method, err)
	}
	host := w.host(1, 1)
	_, err := host.ListNodes(ctx, &vmv1.ListNodesRequest{})
	require.Equal(t, codes.Unimplemented, codeOf(err), "this port must serve no method of nodes except heartbeats")
}

func sendHeartbeat(a agent, change ...func(*vmv1.HeartbeatNodeRequest)) *vmv1.HeartbeatNodeRequest {
	r := &vmv1.HeartbeatNodeRequest{
		NodeId: string(a.id), Name: "rack-1", State: vmv1.NodeState(cloud.NodeReady), AgentVersion: "1.0",
		Capacity:    &vmv1.NodeCapacity{Vcpus: 8, MemoryMib: 16384, StorageGib: 100},
		Allocatable: &vmv1.NodeCapacity{Vcpus: 16, MemoryMib: 8192, StorageGib: 100},
		Hypervisors: []vmv1.HypervisorType{vmv1.HypervisorType_HYPERVISOR_TYPE_KVM}, Labels: map[string]string{"trivet/accel": "kvm", "rack": "1"},
	}
	for _, f := range change {
		f(r)
	}
	return r
}

// TestHeartbeat checks that a heartbeat is written to the host's record only if it changes the record. Heartbeats for
// another host and invalid ones must be refused, and heartbeats to a follower redirected to the leader.
func TestHeartbeat(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	ctx := limited(t)
	a := w.host(1, 1)
	n, err := a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	require.Equal(t, vmv1.NodeState(cloud.NodeReady), n.GetState())
	require.EqualValues(t, 16, w.node(a.id).Allocatable.VCPUs)
	require.Equal(t, map[string]string{"trivet/accel": "kvm", "rack": "1", cloud.HostLabel: "rack-1"}, w.node(a.id).Labels)
	at := w.records.Revision()
	for range 3 {
		_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
		require.NoError(t, err)
	}
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a, func(r *vmv1.HeartbeatNodeRequest) { r.Labels[cloud.HostLabel] = "another" }))
	require.NoError(t, err)
	require.Equal(t, at, w.records.Revision(), "neither an unchanged heartbeat nor another name in the label must change the record")
	_, err = cordonCommand.Call(ctx, w.members[1].opts.Commands, cordonRequest{a.id, true})
	require.NoError(t, err)
	w.pass(time.Duration(minUpdateInterval) * time.Millisecond)
	n, err = a.HeartbeatNode(ctx, sendHeartbeat(a, func(r *vmv1.HeartbeatNodeRequest) { r.Labels["rack"] = "2" }))
	require.NoError(t, err)
	require.Equal(t, vmv1.NodeState(cloud.NodeCordoned), n.GetState())
	require.True(t, w.node(a.id).Cordoned, "a heartbeat must not remove the cordon that an operator set")
	require.Equal(t, "2", w.node(a.id).Labels["rack"])

	another := w.host(1, 2)
	_, err = another.HeartbeatNode(ctx, sendHeartbeat(another))
	require.NoError(t, err)
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a, func(r *vmv1.HeartbeatNodeRequest) { r.NodeId = string(another.id) }))
	require.Error(t, err, "a host sent a heartbeat for another")
	refused(t, err, codes.PermissionDenied, "only for itself")

	before := w.records.Revision()
	for name, c := range map[string]struct {
		change func(*vmv1.HeartbeatNodeRequest)
		code   codes.Code
		says   string
	}{
		"without a node ID":                    {func(r *vmv1.HeartbeatNodeRequest) { r.NodeId = "" }, codes.PermissionDenied, "only for itself"},
		"no name":                              {func(r *vmv1.HeartbeatNodeRequest) { r.Name = "" }, codes.InvalidArgument, "name"},
		"a name with a control character":      {func(r *vmv1.HeartbeatNodeRequest) { r.Name = "a\x1b[2J" }, codes.InvalidArgument, "name"},
		"a host that declares itself cordoned": {func(r *vmv1.HeartbeatNodeRequest) { r.State = vmv1.NodeState(cloud.NodeCordoned) }, codes.InvalidArgument, "READY or NOT_READY"},
		"no state":                             {func(r *vmv1.HeartbeatNodeRequest) { r.State = 0 }, codes.InvalidArgument, "READY or NOT_READY"},
		"too many labels": {func(r *vmv1.HeartbeatNodeRequest) {
			for i := range 65 {
				r.Labels[fmt.Sprint(i)] = "x"
			}
		}, codes.InvalidArgument, "labels"},
		"labels that are too large together": {func(r *vmv1.HeartbeatNodeRequest) {
			for i := range 5 {
				r.Labels[fmt.Sprint(i)] = strings.Repeat("x", 1024)
			}
		}, codes.InvalidArgument, "labels: at most 4096 bytes together"},
		"a long label":                         {func(r *vmv1.HeartbeatNodeRequest) { r.Labels["x"] = strings.Repeat("x", 1025) }, codes.InvalidArgument, "labels"},
		"a long version":                       {func(r *vmv1.HeartbeatNodeRequest) { r.AgentVersion = strings.Repeat("x", 129) }, codes.InvalidArgument, "agent_version"},
		"too many storage classes":             {func(r *vmv1.HeartbeatNodeRequest) { r.SupportedStorageClasses = make([]string, 65) }, codes.InvalidArgument, "too many values"},
		"a long storage class":                 {func(r *vmv1.HeartbeatNodeRequest) { r.SupportedStorageClasses = []string{strings.Repeat("x", 129)} }, codes.InvalidArgument, "storage"},
		"an overflow of the allocatable vCPUs": {func(r *vmv1.HeartbeatNodeRequest) { r.Allocatable.Vcpus = 1<<32 - 1 }, codes.InvalidArgument, "allocatable"},
		"memory of 2^63":                       {func(r *vmv1.HeartbeatNodeRequest) { r.Capacity.MemoryMib = 1 << 63 }, codes.InvalidArgument, "capacity"},
	} {
		_, err := a.HeartbeatNode(ctx, sendHeartbeat(a, c.change))
		require.Error(t, err, name)
		refused(t, err, c.code, c.says)
	}
	require.Equal(t, before, w.records.Revision())

	_, err = w.host(2, 1).HeartbeatNode(ctx, sendHeartbeat(a))
	refused(t, err, codes.FailedPrecondition, "member 1 leads")
	require.Equal(t, w.addresses[1], rpc.FaultOf(err).Details["leader"])
	w.leadership.Elect(0)
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
	refused(t, err, codes.Unavailable, "no leader")
}

// TestHeartbeatAfterLosingLeadership lets a member lose the leadership while it processes a heartbeat. The member must
// not acknowledge the heartbeat, because that would renew the host's lease without the next leader's knowledge.
func TestHeartbeatAfterLosingLeadership(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	a := w.host(1, 1)
	deposed := false
	w.mu.Lock()
	w.tick = func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !deposed {
			deposed = true
			w.leadership.Elect(2)
		}
	}
	w.mu.Unlock()
	_, err := w.members[1].heartbeat(limited(t), cloud.Node{ID: a.id, Name: "rack-1", Declared: cloud.NodeReady})
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	require.Zero(t, w.members[1].lastHeartbeat[a.id])

	// The same must hold if the member leads again, in a later term.
	w.leadership.Elect(1)
	deposed = false
	w.mu.Lock()
	w.tick = func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if !deposed {
			deposed = true
			w.leadership.Elect(2)
			w.leadership.Elect(1)
		}
	}
	w.mu.Unlock()
	_, err = w.members[1].heartbeat(limited(t), cloud.Node{ID: a.id, Name: "rack-1", Declared: cloud.NodeReady})
	require.Error(t, err)
	require.Zero(t, w.members[1].lastHeartbeat[a.id])
}

// TestNewLeaderLearnsLiveness checks that a new leader reports no host as unresponsive before HeartbeatTimeout has
// passed, and reports a host as READY from its first heartbeat on.
func TestNewLeaderLearnsLiveness(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	a, b := w.host(1, 1), w.host(1, 2)
	w.update(func(tx *store.Tx) error {
		n, err := Nodes.Get(tx, string(b.id))
		if err == nil {
			n.Declared = cloud.NodeReady
			Nodes.Put(tx, n, string(b.id))
		}
		return err
	})
	s := w.members[1]
	require.False(t, s.Unresponsive(a.id), "no heartbeat has arrived yet")
	require.Empty(t, s.Fleet())
	// A heartbeat that arrives before the new leader has read its records must also make the host READY.
	_, err := a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	stop := w.follow(1)
	states := func() map[cloud.NodeID]cloud.NodeState {
		out := map[cloud.NodeID]cloud.NodeState{}
		for _, c := range s.Fleet() {
			out[c.Node.ID] = c.State
		}
		return out
	}
	require.Equal(t, map[cloud.NodeID]cloud.NodeState{a.id: cloud.NodeReady, b.id: cloud.NodeNotReady}, states())
	require.False(t, s.Unresponsive(b.id))
	w.pass((cloud.HeartbeatTimeout + 1) * time.Millisecond)
	require.True(t, s.Unresponsive(a.id))
	require.True(t, s.Unresponsive(b.id))
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	require.False(t, s.Unresponsive(a.id))
	require.Equal(t, cloud.NodeReady, states()[a.id])

	// Setting the member's wall clock must change neither the responsiveness nor the state of a host.
	for _, d := range []time.Duration{10 * time.Minute, -10 * time.Minute, 0} {
		w.setClock(d)
		require.False(t, s.Unresponsive(a.id), d)
		require.True(t, s.Unresponsive(b.id), d)
		require.Equal(t, cloud.NodeReady, states()[a.id], d)
	}

	// A member that leads again must keep its old heartbeat times, and wait HeartbeatTimeout again before it reports a
	// host as unresponsive.
	stop()
	require.Empty(t, s.Fleet())
	require.False(t, s.Unresponsive(b.id))
	w.pass((cloud.HeartbeatTimeout + 1) * time.Millisecond)
	w.follow(1)
	require.Equal(t, cloud.NodeNotReady, states()[a.id])
	require.False(t, s.Unresponsive(a.id))
	w.update(func(tx *store.Tx) error { Nodes.Delete(tx, string(a.id)); return nil })
	require.Eventually(t, func() bool { return len(s.Fleet()) == 1 }, 10*time.Second, time.Millisecond)
	s.mu.Lock()
	defer s.mu.Unlock()
	require.NotContains(t, s.lastHeartbeat, a.id)
}

// TestReport checks that reports are passed on for the host that the certificate names, and that facts are written to
// its record. Invalid facts must be refused.
func TestReport(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	a := w.host(1, 1)
	s, err := a.Report(ctx)
	require.NoError(t, err)
	require.NoError(t, s.Send(&agentv1.ReportRequest{Facts: &agentv1.NodeFacts{
		QemuVersion: "7.2.0", CpuModels: []string{"EPYC"}, Architecture: vmv1.Architecture(cloud.X8664),
		MachineFeatures: []*agentv1.MachineFeature{{Name: "uefi"}, {Name: "tpm", Problem: "swtpm is not installed"}},
	}}))
	message := &agentv1.ReportRequest{}
	for n := range 40 {
		message.Vms = append(message.Vms, &agentv1.VmObservation{VmId: string(testVM(n)), Generation: uint64(n), Observed: agentv1.Observed_OBSERVED_RUNNING})
	}
	require.NoError(t, s.Send(message))
	_, err = s.CloseAndRecv()
	require.NoError(t, err)
	require.Equal(t, "7.2.0", w.node(a.id).QEMUVersion)
	require.Equal(t, cloud.X8664, w.node(a.id).Architecture)
	require.Equal(t, map[string]string{"uefi": "", "tpm": "swtpm is not installed"}, w.node(a.id).Features)
	require.Len(t, w.vms.reports, 1)
	require.Len(t, w.vms.reports[a.id], 40)
	require.Equal(t, testVM(39), w.vms.reports[a.id][39].VM)

	for says, facts := range map[string]*agentv1.NodeFacts{
		"cpu_models":   {CpuModels: make([]string, maxModels+1)},
		"together":     {CpuModels: slices.Repeat([]string{strings.Repeat("x", maxWordBytes)}, maxModelBytes/maxWordBytes+1)},
		"printable":    {CpuModels: []string{strings.Repeat("x", maxWordBytes+1)}},
		"qemu_version": {QemuVersion: "7.2\n"},
		"architecture": {Architecture: 257},
		"at most 32":   {MachineFeatures: make([]*agentv1.MachineFeature, maxFeatures+1)},
		"occurs twice": {MachineFeatures: []*agentv1.MachineFeature{{Name: "uefi"}, {Name: "uefi"}}},
		"is invalid":   {MachineFeatures: []*agentv1.MachineFeature{{Name: "UEFI"}}},
		"one line":     {MachineFeatures: []*agentv1.MachineFeature{{Name: "uefi", Problem: "a\nb"}}},
	} {
		s, err := a.Report(ctx)
		require.NoError(t, err)
		require.NoError(t, s.Send(&agentv1.ReportRequest{Facts: facts}))
		_, err = s.CloseAndRecv()
		refused(t, err, codes.InvalidArgument, says)
	}
	require.Equal(t, []string{"EPYC"}, w.node(a.id).CPUModels)

	// A Report stream must end when the host's record is deleted, and when the leadership ends.
	s, err = a.Report(ctx)
	require.NoError(t, err)
	w.update(func(tx *store.Tx) error { Nodes.Delete(tx, string(a.id)); return nil })
	s.Send(message) // an error of Send does not matter: CloseAndRecv returns the result
	_, err = s.CloseAndRecv()
	require.Error(t, err) // the call was refused or the connection was closed
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.Error(t, err)
	require.Eventually(t, func() bool {
		_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
		return codeOf(err) == codes.PermissionDenied
	},
		10*time.Second, time.Millisecond)
	refused(t, err, codes.PermissionDenied, "join again")
	b := w.host(1, 2)
	s, err = b.Report(ctx)
	require.NoError(t, err)
	w.leadership.Elect(2)
	s.Send(message) // an error of Send does not matter: CloseAndRecv returns the result
	_, err = s.CloseAndRecv()
	refused(t, err, codes.FailedPrecondition, "member 2 leads")
	require.NotContains(t, w.vms.reports, b.id)
}

// TestReadImage checks that an agent can read the images of its VMs from any member that has them, up to maxImageReads
// at a time. For an image that no VM of its host uses, the error must be the same as for an unknown one.
func TestReadImage(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	a, other := w.host(2, 1), w.host(2, 2)
	w.vms.uses[a.id] = []string{"sum", "not held here"}
	for at, want := range map[uint64]string{0: "0123456789", 7: "789", 10: "", 99: ""} {
		s, err := a.ReadImage(ctx, &agentv1.ReadImageRequest{Sha256: "sum", Offset: at})
		require.NoError(t, err)
		got := ""
		for {
			piece, err := s.Recv()
			if err == io.EOF {
				break
			}
			require.NoError(t, err)
			got += string(piece.GetData())
		}
		require.Equal(t, want, got)
	}
	for _, c := range []struct {
		by   agent
		ask  *agentv1.ReadImageRequest
		code codes.Code
		says string
	}{
		{other, &agentv1.ReadImageRequest{Sha256: "sum"}, codes.NotFound, errNoImage().Error()},
		{other, &agentv1.ReadImageRequest{Sha256: "other"}, codes.NotFound, errNoImage().Error()},
		{other, &agentv1.ReadImageRequest{}, codes.NotFound, errNoImage().Error()},
		{a, &agentv1.ReadImageRequest{Sha256: "other"}, codes.NotFound, errNoImage().Error()},
		{a, &agentv1.ReadImageRequest{Sha256: "not held here"}, codes.NotFound, errNoImage().Error()},
		{a, &agentv1.ReadImageRequest{Sha256: "sum", Offset: 1 << 63}, codes.InvalidArgument, "offset"},
	} {
		s, err := c.by.ReadImage(ctx, c.ask)
		require.NoError(t, err)
		_, err = s.Recv()
		refused(t, err, c.code, c.says)
	}
	s := w.members[2]
	require.Eventually(t, func() bool { s.mu.Lock(); defer s.mu.Unlock(); return len(s.imageReads) == 0 }, 10*time.Second, time.Millisecond)
	for range maxImageReads {
		require.True(t, s.beginReading(a.id))
	}
	stream, err := a.ReadImage(ctx, &agentv1.ReadImageRequest{Sha256: "sum"})
	require.NoError(t, err)
	_, err = stream.Recv()
	refused(t, err, codes.Unavailable, "reads 8 images already")
	require.True(t, s.beginReading("another host"))
}

func as(t *testing.T, role cloud.Role) context.Context {
	c := &cloud.Caller{User: "ada", Proof: cloud.ProofPassword}
	if role != "" {
		c.Bindings = []cloud.Binding{{Role: role}}
	}
	return auth.With(t.Context(), c, auth.RPC)
}

// TestListNodes checks which fields of hosts administrators and tenants see, and that only administrators may cordon.
// The response to a cordon or uncordon through a follower must already show the new state.
func TestListNodes(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	a := w.host(1, 1)
	_, err := a.HeartbeatNode(limited(t), sendHeartbeat(a))
	require.NoError(t, err)
	server := &server{s: w.members[2]}
	root, tenant := as(t, cloud.SystemAdmin), as(t, "")

	n, err := server.GetNode(root, &vmv1.GetNodeRequest{NodeId: string(a.id)})
	require.NoError(t, err)
	require.EqualValues(t, 8, n.GetCapacity().GetVcpus())
	require.Equal(t, "1", n.GetLabels()["rack"])
	require.Equal(t, "1.0", n.GetAgentVersion())
	require.NotZero(t, n.GetLastHeartbeat())
	for _, ctx := range []context.Context{tenant, as(t, cloud.ProjectAdmin)} {
		list, err := server.ListNodes(ctx, &vmv1.ListNodesRequest{})
		require.NoError(t, err)
		require.Len(t, list.GetNodes(), 1)
		n, err := server.GetNode(ctx, &vmv1.GetNodeRequest{NodeId: string(a.id)})
		require.NoError(t, err)
		for _, n := range []*vmv1.Node{n, list.GetNodes()[0]} {
			want := &vmv1.Node{
				Id: string(a.id), Name: "rack-1", State: vmv1.NodeState(cloud.NodeReady), Hypervisors: n.GetHypervisors(),
				Labels: map[string]string{"trivet/accel": "kvm", cloud.HostLabel: "rack-1"},
			}
			require.Equal(t, want.String(), n.String(), "a tenant must see only the host's name, ID and state")
		}
		for name, call := range map[string]func() error{
			"CordonNode": func() error {
				_, err := server.CordonNode(ctx, &vmv1.CordonNodeRequest{NodeId: string(a.id)})
				return err
			},
			"UncordonNode": func() error {
				_, err := server.UncordonNode(ctx, &vmv1.UncordonNodeRequest{NodeId: string(a.id)})
				return err
			},
			"DrainNode": func() error {
				_, err := server.DrainNode(ctx, &vmv1.DrainNodeRequest{NodeId: string(a.id)})
				return err
			},
		} {
			require.True(t, fault.Is(call(), fault.PermissionDenied), name)
		}
	}
	_, err = server.ListNodes(t.Context(), &vmv1.ListNodesRequest{})
	require.True(t, fault.Is(err, fault.Unauthenticated))

	for range 20 {
		n, err = server.CordonNode(root, &vmv1.CordonNodeRequest{NodeId: string(a.id)})
		require.NoError(t, err)
		require.Equal(t, vmv1.NodeState(cloud.NodeCordoned), n.GetState())
		n, err = server.UncordonNode(root, &vmv1.UncordonNodeRequest{NodeId: string(a.id)})
		require.NoError(t, err)
		require.Equal(t, vmv1.NodeState(cloud.NodeReady), n.GetState())
	}
	at := w.records.Revision()
	_, err = server.UncordonNode(root, &vmv1.UncordonNodeRequest{NodeId: string(a.id)})
	require.NoError(t, err)
	require.Equal(t, at, w.records.Revision())
	for id, kind := range map[string]fault.Kind{"": fault.InvalidArgument, "x": fault.InvalidArgument, string(testVM(1)): fault.NotFound} {
		_, err = server.CordonNode(root, &vmv1.CordonNodeRequest{NodeId: id})
		require.True(t, fault.Is(err, kind), "%q: %v", id, err)
		_, err = server.GetNode(root, &vmv1.GetNodeRequest{NodeId: id})
		require.True(t, fault.Is(err, kind), "%q: %v", id, err)
	}
	n, err = server.DrainNode(root, &vmv1.DrainNodeRequest{NodeId: string(a.id)})
	require.NoError(t, err)
	require.Equal(t, vmv1.NodeState(cloud.NodeDraining), n.GetState())
	w.pass((cloud.HeartbeatTimeout + 1) * time.Millisecond)
	n, err = server.GetNode(tenant, &vmv1.GetNodeRequest{NodeId: string(a.id)})
	require.NoError(t, err)
	require.Equal(t, vmv1.NodeState(cloud.NodeNotReady), n.GetState())
}

// TestLastHeartbeats checks that LastHeartbeats returns wall-clock times of the heartbeats of hosts that this member
// received as the leader, also after the wall clock was set.
func TestLastHeartbeats(t *testing.T) {
	w := newWorld(t)
	stop := w.follow(1)
	a := w.host(1, 1)
	w.host(1, 2) // sends no heartbeat
	require.Empty(t, w.members[1].LastHeartbeats())
	_, err := a.HeartbeatNode(limited(t), sendHeartbeat(a))
	require.NoError(t, err)
	w.pass(40 * time.Second)
	w.setClock(time.Hour)
	all := w.members[1].LastHeartbeats()
	require.Len(t, all, 1)
	require.WithinDuration(t, w.now().Add(-40*time.Second), all[a.id], 20*time.Second)
	require.Empty(t, w.members[2].LastHeartbeats(), "a member that does not lead has heartbeats")
	stop()
	require.Empty(t, w.members[1].LastHeartbeats(), "a former leader has heartbeats")
}
