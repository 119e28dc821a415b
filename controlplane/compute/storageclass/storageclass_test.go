package storageclass

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func newService(t *testing.T) (*Service, *store.Store, context.Context) {
	records, _ := storetest.Open(t, storetest.NewClock(time.UnixMilli(1_800_000_000_000)).Now)
	s := New(records, leader.NewCommands(1, leadertest.NewLeadership(1), nil), clusterkey.Generate())
	caller := &cloud.Caller{User: "admin", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	return s, records, auth.With(t.Context(), caller, auth.RPC)
}

// TestBootstrap checks the storage class of a new cluster, and that Bootstrap does not create it again after an
// operator has deleted it.
func TestBootstrap(t *testing.T) {
	s, _, ctx := newService(t)
	require.NoError(t, s.Bootstrap(ctx))
	c, err := s.Get(ctx, "local")
	require.NoError(t, err)
	require.Equal(t, []any{cloud.DriverManaged, "local", true}, []any{c.Driver, c.Pool, c.Default})
	_, err = s.Delete(ctx, "local", [32]byte{})
	require.NoError(t, err)
	require.NoError(t, s.Bootstrap(ctx))
	_, err = s.Get(ctx, "local")
	require.True(t, fault.Is(err, fault.NotFound))
}

// TestClasses creates classes, changes the default class and deletes classes.
func TestClasses(t *testing.T) {
	s, records, ctx := newService(t)
	require.NoError(t, s.Bootstrap(ctx))
	fast := cloud.StorageClass{Name: "fast", Driver: cloud.DriverManaged, Pool: "nvme", Default: true, Limits: cloud.Limits{IOPS: 1000}}
	_, err := s.Create(ctx, fast, "", [32]byte{})
	require.NoError(t, err)
	_, err = s.Create(ctx, fast, "", [32]byte{})
	require.True(t, fault.Is(err, fault.AlreadyExists))

	defaults := func() (names []string) {
		all, _, err := s.List(ctx, 0, "")
		require.NoError(t, err)
		for _, c := range all {
			if c.Default {
				names = append(names, c.Name)
			}
		}
		return names
	}
	require.Equal(t, []string{"fast"}, defaults(), "only one class is the default")
	setDefault := func(class string, isDefault bool) error {
		_, err := s.Update(ctx, class, cloud.ClassUpdate{Default: &isDefault}, "", [32]byte{})
		return err
	}
	err = setDefault("local", true)
	require.NoError(t, err)
	require.Equal(t, []string{"local"}, defaults())
	err = setDefault("local", false)
	require.NoError(t, err)
	err = setDefault("none", true)
	require.True(t, fault.Is(err, fault.NotFound))

	in := func(f func(tx *store.Tx)) {
		_, err := records.Update(ctx, func(tx *store.Tx) error { f(tx); return nil })
		require.NoError(t, err)
	}
	in(func(tx *store.Tx) {
		_, err := Resolve(tx, "", cloud.DriverUnspecified)
		require.ErrorContains(t, err, "no default storage class")
		_, err = Resolve(tx, "fast", cloud.DriverRBD)
		require.ErrorContains(t, err, "has the driver managed, not rbd")
		served, err := Served(tx, &cloud.Node{StoragePools: []cloud.StoragePool{{Name: "nvme"}, {Name: "other"}}})
		require.NoError(t, err)
		require.Equal(t, []string{"fast"}, served)
		Use(tx, "fast", "web", "v")
	})
	_, err = s.Delete(ctx, "fast", [32]byte{})
	require.ErrorContains(t, err, "has volumes")
	in(func(tx *store.Tx) { Release(tx, "fast", "v") })
	_, err = s.Delete(ctx, "fast", [32]byte{})
	require.NoError(t, err)
}

// TestRBDClass creates a class of the driver RBD. The key of the Ceph user must be in no response and not readable in
// the store. Hosts get it with the address of the cluster.
func TestRBDClass(t *testing.T) {
	s, records, ctx := newService(t)
	const key = "AQDq3rNlAAAAABAAv7k8q5Yq1mYc2o0J7l5h3g=="
	ceph := func(edit func(*cloud.RBDPool)) cloud.StorageClass {
		p := &cloud.RBDPool{
			FSID: "0190a000-0000-4000-8000-000000000001", Monitors: []string{"192.0.2.1", "[2001:db8::1]:6789"}, Pool: "vms", User: "trivet",
		}
		if edit != nil {
			edit(p)
		}
		return cloud.StorageClass{Name: "ceph", Driver: cloud.DriverRBD, RBD: p}
	}
	for name, edit := range map[string]func(*cloud.RBDPool){
		"rbd.fsid":     func(p *cloud.RBDPool) { p.FSID = "x" },
		"rbd.monitors": func(p *cloud.RBDPool) { p.Monitors = []string{"ceph.example.org"} },
		"rbd.pool":     func(p *cloud.RBDPool) { p.Pool = "a/b" },
		"rbd.user":     func(p *cloud.RBDPool) { p.User = "" },
	} {
		_, err := s.Create(ctx, ceph(edit), key, [32]byte{})
		require.ErrorContains(t, err, name)
	}
	_, err := s.Create(ctx, ceph(nil), "secret", [32]byte{})
	require.ErrorContains(t, err, "rbd.key")
	require.NotContains(t, err.Error(), "secret")
	_, err = s.Create(ctx, cloud.StorageClass{Name: "ceph", Driver: cloud.DriverRBD}, key, [32]byte{})
	require.ErrorContains(t, err, "rbd")

	out, err := s.Create(ctx, ceph(nil), key, [32]byte{})
	require.NoError(t, err)
	require.Equal(t, []string{"192.0.2.1:3300", "[2001:db8::1]:6789"}, out.Class.RBD.Monitors)
	require.NotContains(t, string(out.Class.RBD.SealedKey), key[:8])
	require.NotContains(t, toProto(&out.Class).String(), key[:8])
	require.NoError(t, records.Local(func(v *store.View) error {
		at, err := RBDPool(v, s.key, "ceph")
		require.NoError(t, err)
		require.Equal(t, []string{key, "vms", "trivet"}, []string{at.GetKey(), at.GetPool(), at.GetUser()})
		_, err = RBDPool(v, clusterkey.Generate(), "ceph")
		require.ErrorContains(t, err, "another cluster key")
		served, err := Served(v, &cloud.Node{RBD: true})
		require.NoError(t, err)
		require.Equal(t, []string{"ceph"}, served)
		return err
	}))

	// Another user and key, without another field. A wrong key is refused before it is stored.
	const newKey = "AQCq3rNlAAAAABAAq1mYc2o0J7l5h3gv7k8q5Y=="
	_, err = s.Update(ctx, "ceph", cloud.ClassUpdate{}, "secret", [32]byte{})
	require.ErrorContains(t, err, "rbd.key")
	require.NotContains(t, err.Error(), "secret")
	_, err = s.Update(ctx, "ceph", cloud.ClassUpdate{User: "other"}, "", [32]byte{})
	require.ErrorContains(t, err, "is required with another rbd.user")
	out, err = s.Update(ctx, "ceph", cloud.ClassUpdate{User: "other"}, newKey, [32]byte{})
	require.NoError(t, err)
	require.NotContains(t, string(out.Class.RBD.SealedKey), newKey[:8])
	require.NotContains(t, toProto(&out.Class).String(), newKey[:8])
	require.NoError(t, records.Local(func(v *store.View) error {
		at, err := RBDPool(v, s.key, "ceph")
		require.NoError(t, err)
		require.Equal(t, []any{newKey, "other", "vms", []string{"192.0.2.1:3300", "[2001:db8::1]:6789"}}, []any{at.GetKey(), at.GetUser(), at.GetPool(), at.GetMonitors()})
		changes, err := Unapplied(v)
		require.Len(t, changes, 1)
		return err
	}))
	_, err = s.Update(ctx, "local", cloud.ClassUpdate{}, newKey, [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "this cloud has no class local")
}
