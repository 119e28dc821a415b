package live

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
)

// finalNetworks checks the witness's copy of the records, as final does for VMs.
func (t *tenantClient) finalNetworks() {
	a := t.f.audit
	a.mu.Lock()
	defer a.mu.Unlock()
	for kind, all := range t.networks {
		for _, r := range all {
			if !r.leaving && !a.networks.exists(r.id) {
				t.f.fail("%s %s, whose creation was acknowledged, is lost", kind, r.id)
			}
		}
	}
	for _, id := range t.deleted {
		if a.networks.exists(id) {
			t.f.fail("network resource %s, whose deletion was acknowledged, is there", id)
		}
	}
}

// deleteNetworks deletes all network resources after all VMs were deleted, also those whose creation was never
// acknowledged. Every call must succeed at the first attempt.
func (t *tenantClient) deleteNetworks(ctx context.Context) {
	n := t.f.audit.networks
	t.f.audit.mu.Lock()
	ports, subnets, groups, vpcs := ordered(n.ports), ordered(n.subnets), ordered(n.groups), ordered(n.vpcs)
	floating, nats, tables := ordered(n.edge.floating), ordered(n.edge.nats), ordered(n.edge.tables)
	t.f.audit.mu.Unlock()
	do := func(what string, call func(context.Context, *process) error) {
		if err := t.callAt(ctx, t.f.slots[t.rng.IntN(len(t.f.slots))], "", call); err != nil {
			t.f.fail("%s at peace: %v", what, err)
		}
	}
	remove := func(kind resourceKind, id string) {
		do("delete "+string(kind)+" "+id, func(ctx context.Context, p *process) error {
			_, err := p.deleteResource(ctx, kind, id, [32]byte{})
			return err
		})
	}
	for _, f := range floating {
		remove(kindFloating, string(f.ID))
	}
	for _, r := range tables {
		remove(kindTable, string(r.ID))
	}
	for _, g := range nats {
		remove(kindNAT, string(g.ID))
	}
	for _, p := range ports {
		remove(kindPort, string(p.ID))
	}
	for _, s := range subnets {
		remove(kindSubnet, string(s.ID))
	}
	for _, g := range groups { // rules refer to groups, so they are removed first
		for _, r := range g.Rules {
			if r.Group != "" && !g.Default {
				do("remove rule "+string(r.ID), func(ctx context.Context, p *process) error {
					_, err := p.networks.RemoveSecurityGroupRule(ctx, tenant.Default, g.ID, r.ID, [32]byte{})
					return err
				})
			}
		}
	}
	for _, g := range groups {
		if !g.Default {
			remove(kindGroup, string(g.ID))
		}
	}
	for _, v := range vpcs {
		remove(kindVPC, string(v.ID))
	}
}
