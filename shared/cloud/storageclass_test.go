package cloud

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestClassUpdate changes the fields of storage classes that can change.
func TestClassUpdate(t *testing.T) {
	num := func(n uint64) *uint64 { return &n }
	text := func(s string) *string { return &s }
	pool := func() *RBDPool {
		return &RBDPool{FSID: "0190a000-0000-4000-8000-000000000001", Monitors: []string{"192.0.2.1:3300"}, Pool: "vms", User: "trivet", SealedKey: []byte("old")}
	}
	class := func() *StorageClass {
		return &StorageClass{Name: "ceph", Driver: DriverRBD, RBD: pool(), Limits: Limits{IOPS: 10}}
	}
	yes := true
	for _, c := range []struct {
		name    string
		update  ClassUpdate
		changed bool
		counted uint64 // Changes
	}{
		{"nothing", ClassUpdate{}, false, 0},
		{"the same limit", ClassUpdate{IOPS: num(10)}, false, 0},
		{"another limit", ClassUpdate{IOPS: num(20)}, true, 1},
		{"no limit", ClassUpdate{IOPS: num(0)}, true, 1},
		{"bytes", ClassUpdate{BytesPerSecond: num(5)}, true, 1},
		{"description", ClassUpdate{Description: text("fast")}, true, 0},
		{"default", ClassUpdate{Default: &yes}, true, 0},
		{"the same monitors", ClassUpdate{Monitors: []string{"192.0.2.1"}}, false, 0},
		{"other monitors", ClassUpdate{Monitors: []string{"192.0.2.2"}}, true, 1},
		{"a key", ClassUpdate{SealedKey: []byte("new")}, true, 1},
		{"a user", ClassUpdate{User: "other", SealedKey: []byte("new")}, true, 1},
	} {
		have := class()
		changed, err := have.Update(c.update)
		require.NoError(t, err, c.name)
		require.Equal(t, []any{c.changed, c.counted}, []any{changed, have.Changes}, c.name)
	}
	have := class()
	_, err := have.Update(ClassUpdate{Monitors: []string{"192.0.2.2", "[2001:db8::1]:6789"}, User: "other", SealedKey: []byte("new"), BytesPerSecond: num(7)})
	require.NoError(t, err)
	require.Equal(t, &RBDPool{
		FSID: pool().FSID, Monitors: []string{"192.0.2.2:3300", "[2001:db8::1]:6789"}, Pool: "vms", User: "other", SealedKey: []byte("new"),
	}, have.RBD)
	require.Equal(t, Limits{IOPS: 10, BytesPerSecond: 7}, have.Limits)
	for field, u := range map[string]ClassUpdate{
		"rbd.key": {User: "other"}, "rbd.monitors": {Monitors: []string{"ceph.example.org"}}, "rbd.user": {User: "a b", SealedKey: []byte("new")},
		"max_iops": {IOPS: num(MaxLimit + 1)}, "description": {Description: text(strings.Repeat("x", 256))},
	} {
		_, err := class().Update(u)
		require.True(t, fault.Is(err, fault.InvalidArgument), field)
		require.ErrorContains(t, err, field)
	}
	managed := &StorageClass{Name: "fast", Driver: DriverManaged, Pool: "nvme"}
	_, err = managed.Update(ClassUpdate{SealedKey: []byte("new")})
	require.ErrorContains(t, err, "has the driver managed")
	changed, err := managed.Update(ClassUpdate{IOPS: num(1)})
	require.NoError(t, err)
	require.True(t, changed)
}

// TestClassLimitsOfVolume changes the limits of the class of a volume whose metadata lowers one of them.
func TestClassLimitsOfVolume(t *testing.T) {
	v := Volume{Generation: 1, ClassLimits: Limits{IOPS: 100}, Metadata: map[string]string{MaxIOPS: "50"}}
	require.False(t, v.SetClassLimits(Limits{IOPS: 100}))
	require.True(t, v.SetClassLimits(Limits{IOPS: 200}))
	require.EqualValues(t, 1, v.Generation, "the limit of the volume is still 50")
	require.True(t, v.SetClassLimits(Limits{IOPS: 40, BytesPerSecond: 9}))
	require.Equal(t, Limits{IOPS: 40, BytesPerSecond: 9}, v.Limits())
	require.EqualValues(t, 2, v.Generation)
}
