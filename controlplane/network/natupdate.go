package network

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// NATUpdate describes a change of a NAT gateway. Nil fields keep their value.
type NATUpdate struct {
	ID                cloud.NATGatewayID
	Name, Description *string
	Default           *bool
}

// UpdateNATGateway changes the name and the description of a NAT gateway, and whether it is the default of its VPC. It
// returns AlreadyExists if another gateway is the default.
func (s *Service) UpdateNATGateway(ctx context.Context, t cloud.Tenant, q NATUpdate, body [32]byte) (Result[cloud.NATGateway], error) {
	if err := cloud.CheckUUID("id", string(q.ID)); err != nil {
		return Result[cloud.NATGateway]{}, err
	}
	return updateNATCommand.Call(ctx, s.opts.Commands, change[NATUpdate]{t, body, q})
}

var updateNATCommand = newCommand("network.nat.update", "UpdateNatGateway", updateNAT)

// updateNAT implements UpdateNATGateway in a transaction of the leader.
func updateNAT(tx *store.Tx, t cloud.Tenant, q NATUpdate) (cloud.NATGateway, error) {
	nat, err := find(tx, natGateways, kindNAT, t, string(q.ID))
	if err != nil {
		return cloud.NATGateway{}, err
	}
	if err := describe(tx, t.Project, kindNAT, string(nat.ID), &nat.Name, &nat.Description, q.Name, q.Description); err != nil {
		return cloud.NATGateway{}, err
	}
	if q.Default != nil && *q.Default != nat.Default {
		if *q.Default {
			vpc, err := find(tx, vpcs, kindVPC, t, string(nat.VPC))
			if err != nil {
				return cloud.NATGateway{}, err
			}
			if err := checkNoDefaultNAT(tx, vpc); err != nil {
				return cloud.NATGateway{}, err
			}
		}
		before := nat.OnOneHost()
		nat.Default = *q.Default
		if nat.OnOneHost() != before {
			beginGateway(nat)
		}
		natIn.Put(tx, &nat.Default, string(nat.VPC), string(nat.ID))
	}
	nat.UpdatedAt = tx.Now()
	natGateways.Put(tx, nat, string(t.Project), string(nat.ID))
	return *nat, nil
}
