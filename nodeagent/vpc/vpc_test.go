package vpc

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

// fakePlane is a plane in memory.
type fakePlane struct {
	mu       sync.Mutex             // guards the fields below
	existing map[cloud.VPCID]string // what is applied, as text
	calls    []string
	fail     map[cloud.VPCID]error
	hold     map[cloud.VPCID]chan struct{} // apply waits until the channel is closed
	verified map[cloud.VPCID][]bool        // whether each call of apply had to read the kernel's state

	counted      uint64 // calls of counters
	failCounters error
	failWithdraw error
}

func (p *fakePlane) path(id cloud.VPCID) string { return string(id) }

func (p *fakePlane) list() ([]cloud.VPCID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ids []cloud.VPCID
	for id := range p.existing {
		ids = append(ids, id)
	}
	return ids, nil
}

func (p *fakePlane) apply(_ context.Context, w, last *wanted) ([]string, error) {
	p.mu.Lock()
	hold := p.hold[w.ID]
	p.verified[w.ID] = append(p.verified[w.ID], last == nil)
	p.calls = append(p.calls, "apply "+string(w.ID))
	p.mu.Unlock()
	if hold != nil {
		<-hold
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.fail[w.ID]; err != nil {
		return nil, err
	}
	text := show(w)
	if p.existing[w.ID] == text {
		return nil, nil
	}
	p.existing[w.ID] = text
	return []string{"write"}, nil
}

func (*fakePlane) serve(context.Context, *wanted) error { return nil }

func (p *fakePlane) remove(_ context.Context, id cloud.VPCID) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, "remove "+string(id))
	if err := p.fail[id]; err != nil {
		return err
	}
	delete(p.existing, id)
	return nil
}

func (*fakePlane) openTap(context.Context, *wanted, cloud.PortID) (*os.File, error) {
	return nil, errors.New("the fake has no taps")
}
func (*fakePlane) attachVeth(context.Context, *wanted, cloud.PortID, netdev.Endpoint) error {
	return nil
}
func (*fakePlane) activatePort(context.Context, *wanted, cloud.PortID) error { return nil }
func (*fakePlane) detach(context.Context, cloud.VPCID, cloud.PortID) error   { return nil }
func (*fakePlane) portCounters(context.Context, cloud.VPCID) (map[cloud.PortID]cloud.PortCounters, error) {
	return nil, nil
}
func (p *fakePlane) counters(context.Context, cloud.VPCID) (firewall.Counters, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.counted++
	return firewall.Counters{Connections: p.counted}, p.failCounters
}
func (p *fakePlane) withdraw(context.Context) ([]netip.Addr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, "withdraw")
	return nil, p.failWithdraw
}
func (p *fakePlane) restore() { p.set(func() { p.calls = append(p.calls, "restore") }) }
func (*fakePlane) close()     {}

func (p *fakePlane) set(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
}

// fixture is Networks with a fakePlane.
type fixture struct {
	*testing.T
	*Networks
	plane *fakePlane

	mu   sync.Mutex // guards acks
	acks []cloud.NetworkAck
}

func newFixture(t *testing.T, existing ...cloud.VPCID) *fixture {
	f := &fixture{T: t, plane: &fakePlane{
		existing: map[cloud.VPCID]string{}, fail: map[cloud.VPCID]error{}, hold: map[cloud.VPCID]chan struct{}{},
		verified: map[cloud.VPCID][]bool{},
	}}
	for _, id := range existing {
		f.plane.existing[id] = "of an earlier process"
	}
	f.Networks = newNetworks(Options{
		VTEP: selfVTEP, Log: slog.New(slog.DiscardHandler), resync: 20 * time.Millisecond, Upstreams: func() []netip.AddrPort { return nil },
		Acknowledge: func(a cloud.NetworkAck) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.acks = append(f.acks, a)
		},
	}, f.plane)
	t.Cleanup(f.Networks.Close)
	return f
}

func (f *fixture) update(stream uint64, revision int64, snapshot bool, lines string) {
	u := parseUpdate(f.T, lines)
	u.Stream, u.Revision, u.Snapshot = stream, revision, snapshot
	f.Networks.Apply(u)
}

// until waits for an acknowledgment of the revision with exactly the failed VPCs, and returns all so far.
func (f *fixture) until(revision int64, failed ...cloud.VPCID) []cloud.NetworkAck {
	f.T.Helper()
	var all []cloud.NetworkAck
	require.Eventually(f.T, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		all = slices.Clone(f.acks)
		return len(all) > 0 && all[len(all)-1].Revision == revision && slices.EqualFunc(all[len(all)-1].Failures, failed,
			func(v cloud.VPCFailure, id cloud.VPCID) bool { return v.VPC == id })
	}, wait, time.Millisecond, "no acknowledgment of revision %d", revision)
	return all
}

// TestNothingBeforeTheSnapshot requires that the VPCs of an earlier process are left alone until the first snapshot,
// which removes those that it does not name.
func TestNothingBeforeTheSnapshot(t *testing.T) {
	f := newFixture(t, "a", "old")
	f.update(1, 1, false, "vpc b\ndelete a")
	f.plane.set(func() { require.Empty(t, f.plane.calls) })
	require.Empty(t, f.acks)
	f.update(1, 2, true, "vpc a")
	f.until(2)
	f.plane.set(func() {
		require.Len(t, f.plane.existing, 1)
		require.Contains(t, f.plane.calls, "remove old")
		require.NotContains(t, f.plane.calls, "remove a")
	})
}

// TestInvalidVPCIsLeftAlone requires that a VPC of an earlier process whose record is invalid is reported as failed and
// not removed before the control plane deletes it.
func TestInvalidVPCIsLeftAlone(t *testing.T) {
	f := newFixture(t, "a", "old")
	f.update(1, 1, true, "invalid a vpc=a\nsubnet s1 vpc=a net=1")
	all := f.until(1, "a")
	require.Contains(t, all[len(all)-1].Failures[0].Error, "is invalid")
	f.plane.set(func() {
		require.Contains(t, f.plane.calls, "remove old")
		require.NotContains(t, f.plane.calls, "remove a")
	})
	f.update(1, 2, false, "delete a")
	f.until(2)
	f.plane.set(func() { require.Empty(t, f.plane.existing) })
}

// TestFailuresAreAcknowledged requires that a VPC that fails delays no other, is reported, and is repeated until it
// succeeds.
func TestFailuresAreAcknowledged(t *testing.T) {
	f := newFixture(t)
	f.plane.set(func() { f.plane.fail["a"] = errors.New("no memory") })
	f.update(1, 5, true, "vpc a\nvpc b")
	all := f.until(5, "a")
	require.Equal(t, "no memory", all[len(all)-1].Failures[0].Error)
	f.plane.set(func() { delete(f.plane.fail, "a") })
	f.until(5)
	require.NotZero(t, f.Counts().Failures)

	f.plane.set(func() { f.plane.fail["b"] = errors.New("busy") })
	f.update(1, 6, false, "delete b")
	f.until(6, "b")
	f.plane.set(func() { delete(f.plane.fail, "b") })
	f.until(6)
	require.Len(t, f.Status(), 1)
}

// TestAcknowledgeAfterApply requires that a revision is not acknowledged before all its VPCs are applied, and that
// changes during that time are applied together.
func TestAcknowledgeAfterApply(t *testing.T) {
	f := newFixture(t)
	f.update(1, 1, true, "vpc a\nsubnet s1 vpc=a net=1\nvpc b")
	f.until(1)
	hold := make(chan struct{})
	f.plane.set(func() { f.plane.hold["a"], f.plane.calls = hold, nil })
	for revision := int64(2); revision < 50; revision++ {
		f.update(1, revision, false, "port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g")
	}
	f.update(1, 50, false, "vpc b")
	require.Eventually(t, func() bool {
		f.plane.mu.Lock()
		defer f.plane.mu.Unlock()
		return slices.Contains(f.plane.calls, "apply a") && slices.Contains(f.plane.calls, "apply b")
	}, wait, time.Millisecond)
	f.mu.Lock()
	for _, a := range f.acks {
		require.Less(t, a.Revision, int64(50), "acknowledged before VPC a was applied")
	}
	f.mu.Unlock()
	f.plane.set(func() { delete(f.plane.hold, "a") })
	close(hold)
	f.until(50, "a") // the port's group is unknown
	f.update(1, 51, false, "group g any->")
	f.until(51)
	f.plane.set(func() { require.Contains(t, f.plane.existing["a"], "port p5") })
}

// TestNewStream requires that the acknowledgment of a snapshot has the number of its stream, also if the revision is
// that of an earlier stream and nothing has changed.
func TestNewStream(t *testing.T) {
	f := newFixture(t)
	f.update(1, 7, true, "vpc a")
	f.until(7)
	writes := f.Counts().Writes
	f.update(2, 7, true, "vpc a")
	require.Eventually(t, func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.acks[len(f.acks)-1].Stream == 2
	}, wait, time.Millisecond)
	require.Equal(t, writes, f.Counts().Writes)
}

// TestRepair requires that a change of the host's state by somebody else is repaired and counted.
func TestRepair(t *testing.T) {
	f := newFixture(t)
	f.update(1, 1, true, "vpc a")
	f.until(1)
	f.plane.set(func() { f.plane.existing["a"] = "changed by hand" })
	require.Eventually(t, func() bool { return f.Counts().Repairs == 1 }, wait, time.Millisecond)
	f.plane.set(func() { require.Equal(t, "", f.plane.existing["a"]) })
}

// TestGuestIsRenderedOnce requires that the metadata server's lookups, which guests cause at any rate, render the files
// of a guest again only after a change.
func TestGuestIsRenderedOnce(t *testing.T) {
	f := newFixture(t)
	var mu sync.Mutex
	key := "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGGAhpBNaCaHZ5ku7QPN9A0/iwuPsKyfvmEpxFHVKMoJ"
	data := GuestData{SSHKeys: []string{key}, UserData: []byte("#!/bin/sh\n")}
	known := false
	f.Networks.o.Guest = func(string) (GuestData, bool) {
		mu.Lock()
		defer mu.Unlock()
		return data, known
	}
	f.Networks.o.resync = time.Hour // the fixture's resync may replace the state at any time
	f.update(1, 1, true, "vpc a\nsubnet s1 vpc=a net=1\nport p5 vpc=a subnet=s1 at=10.0.1.5 node=n1")
	f.until(1)
	at := netip.MustParseAddr("10.0.1.5")
	_, ok := f.lookup("a", at)
	require.False(t, ok, "the VMs are not known yet")
	mu.Lock()
	known = true
	mu.Unlock()
	first, ok := f.lookup("a", at)
	require.True(t, ok)
	require.Equal(t, "p5", first.ID)
	require.Contains(t, string(first.NoCloud.MetaData), key)
	again, _ := f.lookup("a", at)
	require.Same(t, first, again)
	require.True(t, first.TokensRequired, "tokens are required by default")

	mu.Lock()
	data.SSHKeys = nil
	mu.Unlock()
	changed, _ := f.lookup("a", at)
	require.NotContains(t, string(changed.NoCloud.MetaData), key)
	require.True(t, changed.TokensRequired)
	mu.Lock()
	data.TokensOptional = true
	mu.Unlock()
	changed, _ = f.lookup("a", at)
	require.False(t, changed.TokensRequired)
	_, ok = f.lookup("a", netip.MustParseAddr("10.0.1.6"))
	require.False(t, ok)
}

// TestNetworkConfigOfMetadata requires that the metadata service gives the guest of a subnet without DHCP its
// addresses. Other guests get a configuration with DHCP for each IP version of which their port has an address.
func TestNetworkConfigOfMetadata(t *testing.T) {
	w := &wanted{HostVPC: cloud.HostVPC{MTU: 1450}, Domain: "web.internal"}
	s := &cloud.HostSubnet{
		CIDR: netip.MustParsePrefix("10.0.1.0/24"), Gateway: netip.MustParseAddr("10.0.1.1"), CIDR6: netip.MustParsePrefix("fd12::/64"),
	}
	p := &cloud.HostPort{MAC: cloud.MAC{2, 0, 0, 0, 0, 1}, IP: netip.MustParseAddr("10.0.1.5"), IP6: netip.MustParseAddr("fd12::5")}
	config := func() string {
		files, err := cloudinit.Render(&cloudinit.Instance{ID: "v", NICs: cloudinit.NICs([]cloudinit.Port{w.cloudinitPort(s, p)})})
		require.NoError(t, err)
		return string(files.NetworkConfig)
	}
	for _, line := range []string{"dhcp4: false", "- 10.0.1.5/24", "- fd12::5/64", "gateway4: 10.0.1.1", "gateway6: fd12::1", "- web.internal", "mtu: 1450"} {
		require.Contains(t, config(), line)
	}
	s.DHCP = true
	require.Contains(t, config(), "dhcp6: true")
	require.NotContains(t, config(), "10.0.1.5")
	p.IP6 = netip.Addr{}
	require.Contains(t, config(), "dhcp6: false")
}

// TestForeignNamespacesAreLeftAlone requires that only namespaces with the ID of a VPC in their name count as VPCs of
// an earlier process, and not for example trivet-test-1 of another program.
func TestForeignNamespacesAreLeftAlone(t *testing.T) {
	const id = "0190a6b2-0000-7000-8000-000000000001"
	require.Equal(t, []cloud.VPCID{id}, removable([]cloud.VPCID{"test-1", id, "lab"}))
}
