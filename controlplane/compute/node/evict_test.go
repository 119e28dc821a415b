package node

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// joined is a host that joined with a token, with its key, the token and its certificate (own).
type joined struct {
	id    cloud.NodeID
	key   ed25519.PrivateKey
	token string
	own   mtls.Source
}

// join lets a new host join at member 2 with a new token.
func (w *world) join(ctx context.Context, key ed25519.PrivateKey, name string) (*joined, error) {
	return w.joinWith(ctx, key, name, w.token("", 0))
}

func (w *world) joinWith(ctx context.Context, key ed25519.PrivateKey, name, token string) (*joined, error) {
	c, err := w.dial(2, mtls.ClientPinned(token[strings.LastIndex(token, ".")+1:])).Join(ctx,
		&agentv1.JoinRequest{Protocol: Protocol, Token: token, Csr: request(w.t, key), Name: name})
	if err != nil {
		return nil, err
	}
	leaf, err := x509.ParseCertificate(c.GetCertificate())
	require.NoError(w.t, err)
	own := &tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}
	return &joined{cloud.NodeID(c.GetNodeId()), key, token, func() (*tls.Certificate, error) { return own, nil }}, nil
}

// at returns a new connection to a member with the host's certificate.
func (w *world) at(member uint64, h *joined) agent {
	a := w.with(member, h.own)
	a.id = h.id
	return a
}

// reason returns the reason in the ErrorInfo detail of a gRPC error, or "" if it has none.
func reason(err error) string {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// open opens a Watch, a Report and a SyncNetworks stream of the host h to member 1, the leader, and a SendConsole stream to member 2.
// For each stream it returns a function that waits until the stream ends and returns its error.
func (w *world) open(ctx context.Context, h *joined) map[string]func() error {
	watch, err := w.at(1, h).AgentServiceClient.Watch(ctx, &agentv1.WatchRequest{Protocol: Protocol})
	require.NoError(w.t, err)
	_, err = watch.Recv()
	require.NoError(w.t, err)
	report, err := w.at(1, h).Report(ctx)
	require.NoError(w.t, err)
	require.NoError(w.t, report.Send(&agentv1.ReportRequest{Facts: &agentv1.NodeFacts{BootId: "b"}}))
	networks := w.at(1, h).sync(w.t, ctx)
	_, err = networks.Recv()
	require.NoError(w.t, err)
	console, err := w.at(2, h).SendConsole(ctx)
	require.NoError(w.t, err)
	require.Eventually(w.t, func() bool {
		return len(w.members[2].guard.filter(anyConn)) > 0 && len(w.members[1].guard.filter(anyConn)) > 2
	},
		10*time.Second, time.Millisecond)
	return map[string]func() error{
		"watch": func() error {
			for {
				if _, err := watch.Recv(); err != nil {
					return err
				}
			}
		},
		"report":   func() error { return report.RecvMsg(&agentv1.ReportResponse{}) },
		"networks": func() error { return networks.RecvMsg(&agentv1.SyncNetworksResponse{}) },
		"console":  func() error { return console.RecvMsg(&agentv1.SendConsoleResponse{}) },
	}
}

// TestEvict evicts a host without VMs. All its streams must end on every member, all its calls must be refused, also
// Renew, and its records must be deleted. With a new token the host must get a new ID, although it has the same key.
// Another host's streams must stay open.
func TestEvict(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	ctx := limited(t)
	h, err := w.join(ctx, newKey(t), "rack-1")
	require.NoError(t, err)
	other, err := w.join(ctx, newKey(t), "rack-2")
	require.NoError(t, err)
	_, err = w.at(1, h).HeartbeatNode(ctx, sendHeartbeat(w.at(1, h)))
	require.NoError(t, err)
	w.place(h.id, testVM(1), &Placed{Generation: 2, Gone: true, Held: cloud.Capacity{StorageGiB: 3}})
	w.update(func(tx *store.Tx) error {
		return network.SetHostNetwork(tx, h.id, cloud.HostNetwork{UnderlayMTU: 1500})
	})
	soon, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	ends := w.open(soon, h)
	w.open(ctx, other)

	vms, err := w.members[2].Evict(ctx, h.id, false)
	require.NoError(t, err)
	require.Zero(t, vms)
	for what, end := range ends {
		assert.Equal(t, codes.Unavailable, status.Code(end()), "the %s of an evicted host stays open", what)
	}
	for member := uint64(1); member <= 2; member++ {
		for method, err := range callAll(ctx, w.at(member, h)) {
			if method != "Join" {
				refused(t, err, codes.PermissionDenied, "no longer in the cluster")
				require.Equal(t, ReasonEvicted, reason(err), method)
			}
		}
	}
	require.NoError(t, w.records.Local(func(v *store.View) error {
		left, _, err := PlacedVMs.List(v, 0, string(h.id))
		require.Empty(t, left)
		offer, errOffer := network.HostNetworkOf(v, h.id)
		require.Nil(t, offer, "what the host offered to VPCs")
		keys, _, errKeys := hostKeys.List(v, 0)
		require.Len(t, keys, 1)
		return errors.Join(err, errOffer, errKeys)
	}))
	s := w.members[1]
	s.mu.Lock()
	require.Zero(t, s.lastHeartbeat[h.id])
	s.mu.Unlock()
	_, err = w.joinWith(ctx, h.key, "rack-1", h.token)
	refused(t, err, codes.Unauthenticated, "make a new one")
	again, err := w.join(ctx, h.key, "rack-1")
	require.NoError(t, err)
	require.NotEqual(t, h.id, again.id)
	_, err = w.at(1, again).HeartbeatNode(ctx, sendHeartbeat(w.at(1, again)))
	require.NoError(t, err)
	_, err = w.at(1, h).HeartbeatNode(ctx, sendHeartbeat(w.at(1, h)))
	refused(t, err, codes.PermissionDenied, "no longer in the cluster")

	// The streams of the host other must stay open: three connections to member 1 and one to member 2.
	open := func() (n int) {
		for member := uint64(1); member <= 2; member++ {
			n += len(w.members[member].guard.filter(func(g *guardedConn) bool { return g.node == other.id }))
		}
		return n
	}
	require.Equal(t, 4, open())

	_, err = w.members[1].Evict(ctx, h.id, true)
	require.True(t, fault.Is(err, fault.NotFound), err)
	_, err = w.members[1].Evict(ctx, "rack-1", true)
	require.True(t, fault.Is(err, fault.InvalidArgument), err)
}

// evictWithVMs evicts a host on which VMs are placed, first without force, which must fail, and then with force. It
// returns an error if the forced eviction removed the host's record or placements, or did not cordon the host.
func (w *world) evictWithVMs(ctx context.Context) (h *joined, problem error) {
	h, err := w.join(ctx, newKey(w.t), "rack-1")
	require.NoError(w.t, err)
	w.place(h.id, testVM(1), &Placed{Project: "web", Generation: 4})
	w.place(h.id, testVM(2), &Placed{Project: "web", Generation: 2, Gone: true, Held: cloud.Capacity{StorageGiB: 3}})
	before := w.node(h.id)

	_, err = w.members[1].Evict(ctx, h.id, false)
	f, ok := fault.From(err)
	require.True(w.t, ok, err)
	require.Equal(w.t, fault.FailedPrecondition, f.Kind)
	require.Equal(w.t, ReasonHasVMs, f.Reason)
	require.Contains(w.t, f.Message, "1 VMs are placed on node "+string(h.id)+" (rack-1): web/"+string(testVM(1))+". Move them")
	require.Equal(w.t, before, w.node(h.id))

	vms, err := w.members[1].Evict(ctx, h.id, true)
	require.NoError(w.t, err)
	require.Equal(w.t, 1, vms)
	var left int
	require.NoError(w.t, w.records.Local(func(v *store.View) error {
		placed, _, err := PlacedVMs.List(v, 0, string(h.id))
		left = len(placed)
		return err
	}))
	if n := w.node(h.id); n == nil || !n.Cordoned || left != 2 {
		return h, fmt.Errorf("record %+v, %d placements: capacity of VMs that may still run was freed", n, left)
	}
	return h, nil
}

// TestEvictWithVMs checks that a host with VMs can be evicted only with force, and that its VMs then stay placed on it,
// so that none starts elsewhere. With the same key and a new token the host must join under its old ID, and its old
// certificate must stay invalid.
func TestEvictWithVMs(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	h, err := w.evictWithVMs(ctx)
	require.NoError(t, err)
	ends := w.with(1, h.own)
	_, err = ends.HeartbeatNode(ctx, sendHeartbeat(w.at(1, h)))
	refused(t, err, codes.PermissionDenied, "no longer in the cluster")
	_, err = w.at(2, h).Renew(ctx, &agentv1.RenewRequest{Csr: request(t, h.key)})
	refused(t, err, codes.PermissionDenied, "no longer in the cluster")
	_, err = w.joinWith(ctx, h.key, "rack-1", h.token)
	refused(t, err, codes.Unauthenticated, "make a new one")

	givenUp := func() (is bool) {
		require.NoError(t, w.records.Local(func(v *store.View) (err error) { is, err = GivenUp(v, h.id); return err }))
		return is
	}
	require.True(t, givenUp())
	back, err := w.join(ctx, h.key, "rack-1")
	require.NoError(t, err)
	require.Equal(t, h.id, back.id)
	require.False(t, givenUp(), "the host has joined again")
	s, err := w.at(1, back).AgentServiceClient.Watch(ctx, &agentv1.WatchRequest{Protocol: Protocol, PresentVms: []string{string(testVM(1))}})
	require.NoError(t, err)
	first, err := s.Recv()
	require.NoError(t, err)
	require.Len(t, first.GetVms(), 2)
	require.Equal(t, agentv1.Power_POWER_ON, first.GetVms()[0].GetPower())
	require.Equal(t, agentv1.Power_POWER_DESTROYED, first.GetVms()[1].GetPower())
	_, err = w.at(1, h).HeartbeatNode(ctx, sendHeartbeat(w.at(1, h)))
	refused(t, err, codes.PermissionDenied, "no longer in the cluster")
	_, err = w.at(2, back).Renew(ctx, &agentv1.RenewRequest{Csr: request(t, h.key)})
	require.NoError(t, err)

	// A copy of the host's disk that uses another key and another name joins as a new host.
	other, err := w.join(ctx, newKey(t), "rack-2")
	require.NoError(t, err)
	require.NotEqual(t, h.id, other.id)

	w.place(h.id, testVM(1), nil)
	vms, err := w.members[1].Evict(ctx, h.id, false)
	require.NoError(t, err)
	require.Zero(t, vms)
	require.Nil(t, w.node(h.id))
}

// TestCertificateAfterEviction issues a certificate right after an eviction, on a member whose clock is up to 5 s
// behind. The eviction must not invalidate that certificate.
func TestCertificateAfterEviction(t *testing.T) {
	w := newWorld(t)
	at := time.Now()
	for _, ahead := range []time.Duration{0, time.Millisecond, 999 * time.Millisecond, 5 * time.Second} {
		e := &eviction{At: at.Add(ahead).UnixMilli()}
		before, err := w.authority.IssueFor(mtls.Node, "n", at, time.Hour)
		require.NoError(t, err)
		require.Equal(t, before.Leaf.NotBefore.Add(10*time.Minute).UnixMilli() < e.At, e.invalidates(before.Leaf))
		after, err := w.authority.IssueFor(mtls.Node, "n", e.issueTime(at), time.Hour)
		require.NoError(t, err)
		require.False(t, e.invalidates(after.Leaf), ahead)
		require.True(t, after.Leaf.NotBefore.Before(at), "a new certificate must be valid at once")
	}
}

// bannedCalls makes calls with the key of the banned host h: a heartbeat, a renewal, a renewal with an expired
// certificate, and a join. It returns an error unless each one fails with ReasonBanned.
func (w *world) bannedCalls(ctx context.Context, h *joined) error {
	late := &joined{h.id, h.key, h.token, w.certificateFor(h.id, h.key, time.Now().Add(-48*time.Hour), 24*time.Hour)}
	// A connection of the host, which the ban closes, can fail once more with UNAVAILABLE.
	refused := func(call func() error) (err error) {
		for err = call(); status.Code(err) == codes.Unavailable && ctx.Err() == nil; err = call() {
			time.Sleep(10 * time.Millisecond)
		}
		return err
	}
	call := refused(func() error { _, err := w.at(1, h).HeartbeatNode(ctx, sendHeartbeat(w.at(1, h))); return err })
	renew := refused(func() error {
		_, err := w.at(2, h).Renew(ctx, &agentv1.RenewRequest{Csr: request(w.t, h.key)})
		return err
	})
	grace := refused(func() error {
		_, err := w.at(2, late).Renew(ctx, &agentv1.RenewRequest{Csr: request(w.t, h.key)})
		return err
	})
	join := refused(func() error { _, err := w.join(ctx, h.key, "rack-1"); return err })
	for what, err := range map[string]error{"call": call, "renew": renew, "renew within the grace period": grace, "join": join} {
		if reason(err) != ReasonBanned {
			return fmt.Errorf("%s: %w", what, errors.Join(errors.New("the banned host was let in"), err))
		}
	}
	return nil
}

// TestBan checks that every call of a banned host is refused, that its streams end, and that the placements on it stay.
// After Unban its calls must succeed again.
func TestBan(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	h, err := w.join(ctx, newKey(t), "rack-1")
	require.NoError(t, err)
	w.place(h.id, testVM(1), &Placed{Generation: 4})
	ends := w.open(ctx, h)
	made, err := w.members[2].Ban(ctx, h.id, "", "stolen")
	require.NoError(t, err)
	require.Len(t, made, 1)
	require.Equal(t, "rack-1", made[0].Name)
	require.Equal(t, "stolen", made[0].Reason)
	require.NotZero(t, made[0].At)
	for what, end := range ends {
		require.Error(t, end(), what)
	}
	require.NoError(t, w.bannedCalls(ctx, h))
	require.True(t, w.node(h.id).Cordoned)
	require.NoError(t, w.records.Local(func(v *store.View) error {
		have, err := PlacedVMs.Get(v, string(h.id), string(testVM(1)))
		require.Equal(t, &Placed{Generation: 4}, have)
		return err
	}))

	// A second ban must change nothing. Below, the ban must remain after the host's record is deleted.
	again, err := w.members[1].Ban(ctx, "", made[0].Key, "other words")
	require.NoError(t, err)
	require.Equal(t, made, again)
	require.True(t, fault.Is(w.members[1].Unban(ctx, "", strings.Repeat("0", 64)), fault.NotFound))
	page, next, err := w.members[2].Bans(ctx, 0, "")
	require.NoError(t, err)
	require.Empty(t, next)
	require.Equal(t, []*Ban{&made[0]}, page)

	require.NoError(t, w.members[2].Unban(ctx, h.id, ""))
	_, err = w.at(1, h).HeartbeatNode(ctx, sendHeartbeat(w.at(1, h)))
	require.NoError(t, err)
	require.True(t, fault.Is(w.members[2].Unban(ctx, h.id, ""), fault.NotFound))

	made, err = w.members[1].Ban(ctx, h.id, "", "")
	require.NoError(t, err)
	w.place(h.id, testVM(1), nil)
	_, err = w.members[1].Evict(ctx, h.id, false)
	require.NoError(t, err)
	require.NoError(t, w.bannedCalls(ctx, h))
	require.NoError(t, w.members[1].Unban(ctx, "", made[0].Key))
	back, err := w.join(ctx, h.key, "rack-1")
	require.NoError(t, err)
	require.NotEqual(t, h.id, back.id)
}

// TestBanAKey checks that a key can be banned before a host joins with it, that a host whose key is not stored cannot
// be banned, and that invalid arguments of Ban are refused.
func TestBanAKey(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	key := newKey(t)
	sum, err := mtls.KeyOf(key.Public())
	require.NoError(t, err)
	made, err := w.members[1].Ban(ctx, "", keyText(sum), "")
	require.NoError(t, err)
	require.Empty(t, made[0].Node)
	token := w.token("", 0)
	_, err = w.joinWith(ctx, key, "rack-1", token)
	refused(t, err, codes.PermissionDenied, "banned")
	_, err = w.joinWith(ctx, newKey(t), "rack-2", token)
	require.NoError(t, err, "the refused call must not use up the token")

	for says, q := range map[string]banRequest{
		"give a node or a key":  {},
		"a node or a key":       {Node: cloud.NodeID(testVM(1)), Key: keyText(sum)},
		"64 digits":             {Key: "abc"},
		"SHA-256":               {Key: strings.ToUpper(keyText(sum))},
		"node_id":               {Node: "rack-1"},
		"no node":               {Node: cloud.NodeID(testVM(7))},
		"is not recorded":       {Node: w.host(1, 3).id},
		"at most 256 printable": {Key: keyText(sum), Reason: strings.Repeat("x", 257)},
		"printable bytes":       {Key: keyText(sum), Reason: "a\nb"},
	} {
		_, err := w.members[1].Ban(ctx, q.Node, q.Key, q.Reason)
		require.ErrorContains(t, err, says)
	}
}

// TestStaleMemberClosesConnections checks that a member that cannot confirm in time that its records are current closes
// the connections of all hosts. Other members must keep theirs.
func TestStaleMemberClosesConnections(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	h, err := w.join(ctx, newKey(t), "rack-1")
	require.NoError(t, err)
	ends := w.open(ctx, h)
	s := w.members[2]
	s.closeIfStale(ctx, freshTimeout)
	require.NotEmpty(t, s.guard.filter(anyConn))
	w.pass(time.Hour)
	over, cancel := context.WithCancel(ctx)
	cancel()
	s.closeIfStale(over, freshTimeout) // the end of the context is no reason to close connections
	require.NotEmpty(t, s.guard.filter(anyConn))
	// Guard also checks the connections once a second, and may have renewed the confirmation just before this call. So
	// try again.
	require.Eventually(t, func() bool {
		w.pass(time.Hour)
		s.closeIfStale(ctx, 0)
		return len(s.guard.filter(anyConn)) == 0
	}, 10*time.Second, time.Millisecond)
	require.Error(t, ends["console"]())
	require.NotEmpty(t, w.members[1].guard.filter(anyConn))
}
