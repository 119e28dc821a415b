package network

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// world is the network service of a member that leads, with its records in memory and two projects of different orgs.
type world struct {
	t        testing.TB
	clock    *storetest.Clock
	store    *store.Store
	quorum   *storetest.Quorum
	networks *Service
}

var (
	acme = cloud.Tenant{Org: "acme", Project: "web"}
	evil = cloud.Tenant{Org: "evil", Project: "lair"}
)

func newWorld(t testing.TB) *world {
	w := &world{t: t, clock: storetest.NewClock(time.UnixMilli(1_800_000_000_000))}
	w.store, w.quorum = storetest.Open(t, w.clock.Now)
	w.networks = New(Options{Store: w.store, Commands: leadertest.Single(), Log: slog.New(slog.DiscardHandler)})
	w.update(func(tx *store.Tx) error {
		for _, t := range []cloud.Tenant{acme, evil} {
			if _, err := tenant.CreateOrg(tx, t.Org, ""); err != nil {
				return err
			}
			if _, err := tenant.CreateProject(tx, t, "", tenant.Quota{}); err != nil {
				return err
			}
		}
		return nil
	})
	return w
}

func (w *world) update(f func(*store.Tx) error) {
	w.t.Helper()
	_, err := w.store.Update(w.t.Context(), f)
	require.NoError(w.t, err)
}

// as returns the context of a call by a project member of the tenant t, with the idempotency key key if it is not
// empty.
func (w *world) as(t cloud.Tenant, key string) context.Context {
	c := &cloud.Caller{
		User: "ada", Proof: cloud.ProofPassword, IdempotencyKey: key,
		Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: t.Org, Project: t.Project}},
	}
	return auth.With(w.t.Context(), c, auth.RPC)
}

// asAdmin returns the context of a call by an operator, with the idempotency key key if it is not empty.
func (w *world) asAdmin(key string) context.Context {
	c := &cloud.Caller{User: "admin", Proof: cloud.ProofPassword, IdempotencyKey: key, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
	return auth.With(w.t.Context(), c, auth.RPC)
}

// records returns the number of records in each table of the service that is not empty.
func (w *world) records() map[string]int {
	w.t.Helper()
	out := map[string]int{}
	require.NoError(w.t, w.store.View(w.t.Context(), func(v *store.View) error {
		for name, count := range map[string]func() (int, error){
			"vpc": counter(v, vpcs), "subnet": counter(v, subnets), "subnet-of": counter(v, subnetsOf),
			"port":    counter(v, ports),
			"port-of": counter(v, portsOf), "port-mac": counter(v, macs), "address6": counter(v, addresses6),
			"ipam":          counter(v, bitmaps),
			"ipam-assigned": counter(v, assigned), "ipam-resting": counter(v, resting),
			"security-group": counter(v, groups),
			"group-default":  counter(v, defaultGroups), "vpc-default": counter(v, defaultVPCs),
			"group-port": counter(v, groupPorts), "group-referrer": counter(v, groupReferrers),
			"network-name": counter(v, names), "vni": counter(v, vnis),
			"port-at": counter(v, portAt), "device-port": counter(v, devicePorts),
			"route-table":    counter(v, routeTables),
			"route-table-in": counter(v, tablesIn), "route-table-of": counter(v, tableOf),
			"route-target": counter(v, routeTargets),
			"nat":          counter(v, natGateways), "nat-in": counter(v, natIn), "nat-of": counter(v, natOf),
			"floating-ip": counter(v, floatingIPs),
			"floating-at": counter(v, floatingAt), "service-ip": counter(v, serviceIPs),
			"service-ip-in": counter(v, servicesIn),
			"backend-of":    counter(v, backendsOf), "peering": counter(v, peerings),
			"peering-between": counter(v, peeringBetween),
			"peering-of":      counter(v, peeringsOf), "external-network": counter(v, externals),
			"external-address": counter(v, externalAddresses),
			"host-network":     counter(v, hostNetworks), "port-label": counter(v, portLabels),
			"service-at": counter(v, serviceAt), "service-selector": counter(v, selectorsIn),
		} {
			n, err := count()
			if err != nil {
				return err
			}
			if n > 0 {
				out[name] = n
			}
		}
		return nil
	}))
	return out
}

func counter[T any](r store.Reader, table store.Table[T]) func() (int, error) {
	return func() (int, error) {
		all, _, err := table.List(r, 0)
		return len(all), err
	}
}
