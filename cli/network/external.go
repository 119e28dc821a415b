package network

import (
	"context"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

func externals() *kind[*networkv1.ExternalNetwork] {
	return &kind[*networkv1.ExternalNetwork]{
		command: "external", noun: "external network", arg: "NETWORK", named: true,
		header: []string{"NAME", "CIDR", "GATEWAY", "VLAN", "FREE"},
		row: func(n *networkv1.ExternalNetwork, _ *labels) []string {
			return []string{n.GetName(), n.GetCidrBlock(), n.GetGatewayIp(), number(n.GetVlan()), freeOf(n)}
		},
		fields: func(n *networkv1.ExternalNetwork, _ *labels) [][2]string {
			return [][2]string{
				{"CIDR", n.GetCidrBlock()}, {"Pools", pools(n)}, {"Gateway", n.GetGatewayIp()},
				{"VLAN", number(n.GetVlan())},
				{"Free addresses", freeOf(n)},
			}
		},
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.ExternalNetwork, string, error) {
			page, err := c.ListExternalNetworks(ctx, &networkv1.ListExternalNetworksRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
			})
			return page.GetExternalNetworks(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, name string) (*networkv1.ExternalNetwork, error) {
			return t.client.GetExternalNetwork(
				ctx, &networkv1.GetExternalNetworkRequest{OrgId: t.org, ProjectId: t.project, Name: name},
			)
		},
		remove: func(ctx context.Context, t *target, name string) error {
			_, err := t.client.DeleteExternalNetwork(
				ctx, &networkv1.DeleteExternalNetworkRequest{OrgId: t.org, ProjectId: t.project, Name: name},
			)
			return err
		},
	}
}

func pools(n *networkv1.ExternalNetwork) string {
	all := make([]string, len(n.GetPools()))
	for i, p := range n.GetPools() {
		all[i] = p.GetFirst() + "-" + p.GetLast()
		if p.GetFirst() == p.GetLast() {
			all[i] = p.GetFirst()
		}
	}
	return strings.Join(all, ", ")
}

// freeOf returns the number of free addresses, or "" for tenants, who see neither pools nor this number.
func freeOf(n *networkv1.ExternalNetwork) string {
	if len(n.GetPools()) == 0 {
		return ""
	}
	return free(n.GetAvailableIpCount())
}

// checkExternal returns a *session.Usage error if a name cannot be that of an external network. It accepts "".
func checkExternal(name string) error {
	if name != "" && cloud.CheckName("", name) != nil {
		return session.Usagef("--external %q: want the name of an external network: `trivet network external list` shows them", name)
	}
	return nil
}

// parsePools parses the values of --pool, each FIRST-LAST or one address.
func parsePools(texts []string) (all []*networkv1.AddressRange, err error) {
	for _, text := range texts {
		first, last, isRange := strings.Cut(text, "-")
		if !isRange {
			last = first
		}
		if !isAddress(first) || !isAddress(last) {
			return nil, session.Usagef("--pool %q: want FIRST-LAST, such as 203.0.113.10-203.0.113.99", text)
		}
		all = append(all, &networkv1.AddressRange{First: first, Last: last})
	}
	return all, nil
}

// externalCommand returns the command `trivet network external`.
func externalCommand(s *session.Session) *cobra.Command {
	c := group("external", "Describe networks outside of the cloud",
		`Describe networks outside of the cloud that hosts are attached to, such as the internet. Floating IPs and NAT
gateways get their addresses from the pools of an external network. Creating, changing and deleting one requires the
role system:admin.`,
		`  trivet network external create internet --cidr 203.0.113.0/24 --pool 203.0.113.10-203.0.113.99 --gateway 203.0.113.1
  trivet network external list`)
	c.AddCommand(createExternalCommand(s), externals().listCommand(s),
		externals().showCommand(s, "Show an external network"),
		updateExternalCommand(s), externals().deleteCommand(s, "Delete an external network of which no address is assigned"))
	return c
}

const poolUsage = "FIRST-LAST, addresses that can be assigned, repeatable"

func createExternalCommand(s *session.Session) *cobra.Command {
	req := &networkv1.CreateExternalNetworkRequest{}
	var poolTexts []string
	c := &cobra.Command{
		Use: "create NAME", Short: "Describe an external network", Args: session.Exactly("NAME"),
		Long: `Describe an external network. NAME is the name that hosts use for it in their configuration. A --pool is
FIRST-LAST or one address, within --cidr and without the gateway.`,
		Example: `  trivet network external create internet --cidr 203.0.113.0/24 --pool 203.0.113.10-203.0.113.99 --gateway 203.0.113.1 --vlan 100`,
	}
	p := c.Flags()
	p.StringVar(&req.CidrBlock, "cidr", "", "IPv4 prefix of the network")
	p.StringSliceVar(&poolTexts, "pool", nil, poolUsage)
	p.StringVar(&req.GatewayIp, "gateway", "", "address of the network's router (default: the network needs none)")
	p.Uint32Var(&req.Vlan, "vlan", 0, "VLAN of 1 to 4094 (default: untagged)")
	p.StringVar(&req.Description, "description", "", "description")
	session.Require(c, "cidr", "pool")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		if err := firstError(checkCIDRs("--cidr", req.CidrBlock), checkAddresses("gateway", req.GatewayIp)); err != nil {
			return err
		}
		if req.Vlan > cloud.MaxVLAN {
			return session.Usagef("--vlan %d: want 1 to %d", req.Vlan, cloud.MaxVLAN)
		}
		if req.Pools, err = parsePools(poolTexts); err != nil {
			return err
		}
		if req.Name, err = nameArg(args); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = t.org, t.project
		n, err := t.client.CreateExternalNetwork(ctx, req)
		return externals().printMade(ctx, t, n, err)
	})
	return c
}

func updateExternalCommand(s *session.Session) *cobra.Command {
	var poolTexts []string
	var gateway, description string
	c := externals().argCommand(s, "update", "Change the pools and gateway of an external network")
	c.Long = "Change the pools, gateway and description of an external network. --pool replaces all former pools."
	c.Example = "  trivet network external update internet --pool 203.0.113.10-203.0.113.199"
	change := changes{command: c}
	c.Flags().StringSliceVar(&poolTexts, "pool", nil, poolUsage)
	c.Flags().StringVar(&gateway, "gateway", "", "address of the network's router; empty for none")
	c.Flags().StringVar(&description, "description", "", "new description")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := firstError(change.check(), checkAddresses("gateway", gateway)); err != nil {
			return err
		}
		pools, err := parsePools(poolTexts)
		if err != nil {
			return err
		}
		name, err := externals().find(ctx, t, args[0])
		if err != nil {
			return err
		}
		req := &networkv1.UpdateExternalNetworkRequest{
			OrgId: t.org, ProjectId: t.project, Name: name, GatewayIp: change.given("gateway", gateway),
			Description: change.given("description", description),
		}
		if len(pools) > 0 {
			req.Pools = &networkv1.AddressRanges{Ranges: pools}
		}
		n, err := t.client.UpdateExternalNetwork(ctx, req)
		return externals().printMade(ctx, t, n, err)
	})
	return c
}
