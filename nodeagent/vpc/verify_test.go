package vpc

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// verifications returns for each call of apply for a VPC whether the call had to read the kernel's state, without
// repetitions.
func (f *fixture) verifications(id cloud.VPCID) (all []bool) {
	f.plane.set(func() { all = slices.Compact(slices.Clone(f.plane.verified[id])) })
	return all
}

// TestUpdatesDoNotReadTheKernel requires that the kernel's state is read when a VPC is applied first, after a failure
// and after a peer has made devices, and not for other updates.
func TestUpdatesDoNotReadTheKernel(t *testing.T) {
	f := newFixture(t)
	f.Networks.o.resync = time.Hour
	f.update(1, 1, true, "vpc a")
	f.until(1)
	require.Equal(t, []bool{true}, f.verifications("a"))
	f.update(1, 2, false, "subnet s1 vpc=a net=1")
	f.until(2)
	require.Equal(t, []bool{true, false}, f.verifications("a"))

	f.plane.set(func() { f.plane.fail["a"] = errors.New("busy") })
	f.update(1, 3, false, "vpc a")
	f.until(3, "a")
	f.plane.set(func() { delete(f.plane.fail, "a") })
	f.until(3)
	require.Equal(t, []bool{true, false, true}, f.verifications("a"))
	f.update(1, 4, false, "vpc a")
	f.until(4)
	require.Equal(t, []bool{true, false, true, false}, f.verifications("a"))

	f.connected([]cloud.VPCID{"a"})
	require.Eventually(t, func() bool { return len(f.verifications("a")) == 5 }, wait, time.Millisecond)
}

// TestUpdatesDoNotDelayTheResync sends updates without pause, and requires that the kernel's state is read
// nevertheless.
func TestUpdatesDoNotDelayTheResync(t *testing.T) {
	f := newFixture(t)
	f.update(1, 1, true, "vpc a")
	f.until(1)
	revision := int64(1)
	require.Eventually(t, func() bool {
		revision++
		f.update(1, revision, false, "vpc a")
		return len(f.verifications("a")) >= 5
	}, wait, time.Millisecond)
}

// TestDifference lists which parts of the host's state depend on which records.
func TestDifference(t *testing.T) {
	const records = "vpc a\nsubnet s1 vpc=a net=1\ngroup g any->\n" +
		"port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g\nport p6 vpc=a subnet=s1 at=10.0.1.6 node=n2 groups=g\n" +
		"service web vpc=a at=10.0.1.50 ports=80:8080 to=p5"
	var all tables
	u := parseUpdate(t, records)
	u.Snapshot = true
	all.apply(&u)
	for _, c := range []struct {
		change string
		want   difference
	}{
		{"group g any-> tcp/80<-g", difference{}},
		{"protected 192.0.2.1", difference{}},
		{"port p7 vpc=a subnet=s1 at=10.0.1.7 node=n2 groups=g", difference{remotes: true}},
		{"port p6 vpc=a subnet=s1 at=10.0.1.6 node=n2 groups=g name=web", difference{remotes: true}},
		{"service web vpc=a at=10.0.1.50 ports=80:8081 to=p5", difference{services: true}},
		{"port p5 vpc=a subnet=s1 at=10.0.1.5 node=n1 groups=g name=web", difference{rest: true}},
		{"port p8 vpc=a subnet=s1 at=10.0.1.8 node=n1 groups=g", difference{rest: true}},
		{"subnet s2 vpc=a net=2", difference{remotes: true, rest: true}},
	} {
		last, ok := all.hostVPC("a", netip.Addr{})
		require.True(t, ok)
		change := parseUpdate(t, c.change)
		all.apply(&change)
		w, _ := all.hostVPC("a", netip.Addr{})
		require.Equal(t, c.want, differenceOf(&last, &w), c.change)
		require.Equal(t, difference{}, differenceOf(&w, &w))
		require.Equal(t, difference{true, true, true}, differenceOf(nil, &w))
	}
}
