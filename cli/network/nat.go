package network

import (
	"cmp"
	"context"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func natGateways() *kind[*networkv1.NatGateway] {
	return &kind[*networkv1.NatGateway]{
		command: "nat", noun: "NAT gateway", arg: "GATEWAY",
		header:    []string{"NAME", "VPC", "EXTERNAL", "ADDRESS", "DEFAULT", "STATUS"},
		wide:      []string{"DEFAULT"},
		wideInAll: []string{"EXTERNAL", "STATUS"},
		row: func(g *networkv1.NatGateway, l *labels) []string {
			return []string{
				nameOf(g), l.of(vpcs(), g.GetVpcId()), g.GetExternalNetwork(), natAddress(g), yes(g.GetIsDefault()), status(g),
			}
		},
		fields: func(g *networkv1.NatGateway, l *labels) [][2]string {
			return [][2]string{
				{"VPC", l.of(vpcs(), g.GetVpcId())}, {"External network", g.GetExternalNetwork()}, {"Address", natAddress(g)}, {"Default", yes(g.GetIsDefault())},
				{"Host", cmp.Or(g.GetNodeId(), "-")},
			}
		},
		about: func(g *networkv1.NatGateway) string { return "of VPC " + g.GetVpcId() },
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.NatGateway, string, error) {
			page, err := c.ListNatGateways(ctx, &networkv1.ListNatGatewaysRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name, VpcId: q.vpc,
			})
			return page.GetNatGateways(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.NatGateway, string, error) {
			page, err := c.ListAllNatGateways(ctx, &networkv1.ListAllNatGatewaysRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetNatGateways(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.NatGateway, error) {
			return t.client.GetNatGateway(ctx, &networkv1.GetNatGatewayRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeleteNatGateway(ctx, &networkv1.DeleteNatGatewayRequest{OrgId: t.org, ProjectId: t.project, Id: id})
			return err
		},
	}
}

// natAddress returns the address that peers see.
func natAddress(g *networkv1.NatGateway) string { return cmp.Or(g.GetAddress(), "of the host") }

// natCommand returns the command `trivet network nat`.
func natCommand(s *session.Session) *cobra.Command {
	c := group("nat", "Create and list NAT gateways",
		`Create and list NAT gateways. A NAT gateway gives outgoing connections of a VPC an address of an external network.
Nobody outside can open a connection through it; floating IPs are for that.`,
		`  trivet network nat create gw --vpc prod --external internet --default
  trivet network route add out 0.0.0.0/0=nat:gw`)
	c.Aliases = []string{"nat-gateway"}
	c.AddCommand(createNATCommand(s), natGateways().listCommand(s, inVPC()), natGateways().showCommand(s, "Show a NAT gateway"),
		updateNATCommand(s),
		natGateways().deleteCommand(s, "Delete a NAT gateway that no route uses"))
	return c
}

func createNATCommand(s *session.Session) *cobra.Command {
	req := &networkv1.CreateNatGatewayRequest{}
	var vpc string
	c := &cobra.Command{
		Use: "create [NAME]", Short: "Create a NAT gateway for a VPC", Args: optionalName,
		Long: `Create a NAT gateway for a VPC. With --default, it is the default route of the VPC's subnets without a route table.
Otherwise a route must lead to it. With --own-address, peers see one address of the external network that no other
gateway uses. Without it, they see the address of a host: of the VM's host if the gateway is the default, and otherwise
of the host that the gateway is on. A gateway with --own-address or without --default is on one host at a time. The
command "trivet network nat show" prints this host.`,
		Example: `  trivet network nat create gw --vpc prod --external internet --default
  trivet network nat create partner --vpc prod --external leased-line --own-address`,
	}
	refFlag(c, s, &vpc, "vpc", "VPC, by name or ID", vpcs())
	refFlag(c, s, &req.ExternalNetwork, "external", "external network (default: the only one)", externals())
	c.Flags().BoolVar(&req.OwnAddress, "own-address", false,
		"use an address of the external network that no other gateway has, instead of a host's address")
	c.Flags().BoolVar(&req.IsDefault, "default", false, "make it the VPC's default route")
	c.Flags().StringVar(&req.Description, "description", "", "description")
	session.Require(c, "vpc")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		if err := checkExternal(req.ExternalNetwork); err != nil {
			return err
		}
		if req.Name, err = nameArg(args); err != nil {
			return err
		}
		if req.VpcId, err = vpcs().find(ctx, t, vpc); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = t.org, t.project
		g, err := t.client.CreateNatGateway(ctx, req)
		return natGateways().printMade(ctx, t, g, err)
	})
	return c
}

func updateNATCommand(s *session.Session) *cobra.Command {
	var change changes
	var isDefault, noDefault bool
	c := natGateways().argCommand(s, "update", "Change the name of a NAT gateway, and whether it is the VPC's default route")
	c.Example = "  trivet network nat update gw --no-default\n  trivet network nat update partner --default"
	change.add(c)
	c.Flags().BoolVar(&isDefault, "default", false, "make it the VPC's default route")
	c.Flags().BoolVar(&noDefault, "no-default", false, "let only routes of route tables lead to it")
	session.Exclusive(c, "default", "no-default")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		id, err := natGateways().find(ctx, t, args[0])
		if err != nil {
			return err
		}
		req := &networkv1.UpdateNatGatewayRequest{
			OrgId: t.org, ProjectId: t.project, Id: id, Name: change.newName(), Description: change.newDescription(),
		}
		if c.Flags().Changed("default") || noDefault {
			req.IsDefault = &isDefault
		}
		g, err := t.client.UpdateNatGateway(ctx, req)
		return natGateways().printMade(ctx, t, g, err)
	})
	return c
}
