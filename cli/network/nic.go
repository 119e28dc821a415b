package network

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// Resolver looks up the resources that NICs of VMs refer to, and their names, for package vm.
type Resolver struct {
	t      *target
	labels *labels
}

// NewResolver returns a resolver for the project that the command acts for. Its calls for names end with ctx.
func NewResolver(ctx context.Context, s *session.Session, conn *dial.Conn) *Resolver {
	t := newTarget(s, conn)
	return &Resolver{t, t.labels(ctx)}
}

// FindVPC returns the ID of the VPC with a name or ID.
func (r *Resolver) FindVPC(ctx context.Context, nameOrID string) (string, error) {
	return vpcs().find(ctx, r.t, nameOrID)
}

// FindSubnet returns the ID of the subnet with a name or ID.
func (r *Resolver) FindSubnet(ctx context.Context, nameOrID string) (string, error) {
	return subnets().find(ctx, r.t, nameOrID)
}

// FindPort returns the ID of the port with a name or ID.
func (r *Resolver) FindPort(ctx context.Context, nameOrID string) (string, error) {
	return ports().find(ctx, r.t, nameOrID)
}

// FindGroups returns the IDs of the security groups with these names or IDs.
func (r *Resolver) FindGroups(ctx context.Context, namesOrIDs []string) ([]string, error) {
	return findAll(ctx, r.t, groups(), namesOrIDs)
}

// VPCName returns the name of the VPC with an ID, or the ID if the VPC has no name or cannot be read.
func (r *Resolver) VPCName(id string) string { return r.labels.of(vpcs(), id) }

// SubnetName returns the name of the subnet with an ID, or the ID if the subnet has no name or cannot be read.
func (r *Resolver) SubnetName(id string) string { return r.labels.of(subnets(), id) }

// PortsOfVM returns the ports of a VM by ID. It returns none if they cannot be read.
func (r *Resolver) PortsOfVM(ctx context.Context, id string) map[string]*networkv1.Port {
	q := r.t.query()
	q.device = id
	all, err := ports().all(ctx, r.t, q)
	if err != nil {
		return nil
	}
	byID := map[string]*networkv1.Port{}
	for _, p := range all {
		byID[p.GetId()] = p
	}
	return byID
}

// GroupsOfPort returns the IDs of the security groups of the port with an ID.
func (r *Resolver) GroupsOfPort(ctx context.Context, id string) ([]string, error) {
	p, err := ports().get(ctx, r.t, id)
	return p.GetSecurityGroups(), err
}

// SetGroups replaces the security groups of a port. Ports and groups are given by ID.
func (r *Resolver) SetGroups(ctx context.Context, port string, groups []string) error {
	_, err := r.t.client.UpdatePort(ctx, &networkv1.UpdatePortRequest{
		OrgId: r.t.org, ProjectId: r.t.project, Id: port, SecurityGroups: &networkv1.GroupIds{Ids: groups},
	})
	return err
}

// PortStatus formats the status of a port; empty for nil.
func PortStatus(p *networkv1.Port) string { return status(p) }

// VPCNames returns a shell completion with the names of VPCs.
func VPCNames(s *session.Session) cobra.CompletionFunc { return vpcs().complete(s) }

// SubnetNames returns a shell completion with the names of subnets.
func SubnetNames(s *session.Session) cobra.CompletionFunc { return subnets().complete(s) }

// PortNames returns a shell completion with the names of ports.
func PortNames(s *session.Session) cobra.CompletionFunc { return ports().complete(s) }

// GroupNames returns a shell completion with the names of security groups.
func GroupNames(s *session.Session) cobra.CompletionFunc { return groups().complete(s) }
