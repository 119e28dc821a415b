package vpc

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// verifications returns the argument verify of each call of apply for a VPC, without repetitions.
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

// TestUpdatesDoNotDelayTheResync sends updates without pause. The kernel's state is read nevertheless.
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
