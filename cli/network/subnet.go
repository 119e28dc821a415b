package network

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func subnets() *kind[*networkv1.Subnet] {
	return &kind[*networkv1.Subnet]{
		command: "subnet", noun: "subnet", arg: "SUBNET",
		header:    []string{"NAME", "VPC", "CIDR", "GATEWAY", "DHCP", "FREE", "STATUS"},
		wide:      []string{"GATEWAY"},
		wideInAll: []string{"DHCP", "FREE", "STATUS"},
		row: func(n *networkv1.Subnet, l *labels) []string {
			return []string{
				nameOf(n), l.of(vpcs(), n.GetVpcId()), n.GetCidrBlock(), n.GetGatewayIp(), yes(n.GetDhcpEnabled()),
				free(n.GetAvailableIpCount()), status(n),
			}
		},
		fields: func(n *networkv1.Subnet, l *labels) [][2]string {
			return [][2]string{
				{"VPC", l.of(vpcs(), n.GetVpcId())}, {"CIDR", n.GetCidrBlock()}, {"IPv6 CIDR", n.GetIpv6CidrBlock()},
				{"Gateway", n.GetGatewayIp()},
				{"DHCP", yes(n.GetDhcpEnabled())}, {"DNS servers", strings.Join(n.GetDnsServers(), ", ")},
				{"Free addresses", free(n.GetAvailableIpCount())},
			}
		},
		about: func(n *networkv1.Subnet) string { return n.GetCidrBlock() + " in VPC " + n.GetVpcId() },
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Subnet, string, error) {
			page, err := c.ListSubnets(ctx, &networkv1.ListSubnetsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
				VpcId: q.vpc,
			})
			return page.GetSubnets(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Subnet, string, error) {
			page, err := c.ListAllSubnets(ctx, &networkv1.ListAllSubnetsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetSubnets(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.Subnet, error) {
			return t.client.GetSubnet(ctx, &networkv1.GetSubnetRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeleteSubnet(ctx, &networkv1.DeleteSubnetRequest{OrgId: t.org, ProjectId: t.project, Id: id})
			return err
		},
	}
}

// subnetCommand returns the command `trivet network subnet`.
func subnetCommand(s *session.Session) *cobra.Command {
	c := group("subnet", "Create and list subnets of VPCs",
		`Create and list subnets. A subnet has a part of its VPC's prefix. Ports get their addresses from it, and its VMs
their configuration by DHCP.`,
		`  trivet network subnet create front --vpc prod --cidr 10.0.1.0/24
  trivet network subnet list --vpc prod`)
	c.AddCommand(createSubnetCommand(s), subnets().listCommand(s, inVPC()), subnets().showCommand(s, "Show a subnet"),
		updateSubnetCommand(s), subnets().deleteCommand(s, "Delete a subnet without ports"))
	return c
}

const dnsUsage = "DNS servers for guests, at most 3, separated by commas (default: the subnet's own resolver)"

// subnetFlags are the flags of `trivet network subnet create`.
type subnetFlags struct {
	// request has the flags that are fields of the request.
	request      networkv1.CreateSubnetRequest
	vpc          string
	noDHCP, ipv6 bool
}

func createSubnetCommand(s *session.Session) *cobra.Command {
	f := &subnetFlags{}
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a subnet in a VPC", Args: session.Exactly("NAME"),
		Long: `Create a subnet in a VPC. --cidr is a part of the VPC's prefix that no other subnet of the VPC overlaps, /29 or
larger. With --ipv6, the subnet also gets the first free /64 of the VPC's IPv6 prefix.`,
		Example: `  trivet network subnet create front --vpc prod --cidr 10.0.1.0/24
  trivet network subnet create db --vpc prod --cidr 10.0.2.0/24 --gateway 10.0.2.254 --dns 9.9.9.9,1.1.1.1
  trivet network subnet create six --vpc prod --cidr 10.0.3.0/24 --ipv6`,
	}
	f.register(s, c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		name, err := nameArg(args)
		if err != nil {
			return err
		}
		n, err := f.create(ctx, t, name)
		return subnets().printMade(ctx, t, n, err)
	})
	return c
}

// register adds the flags to c.
func (f *subnetFlags) register(s *session.Session, c *cobra.Command) {
	p, req := c.Flags(), &f.request
	refFlag(c, s, &f.vpc, "vpc", "VPC, by name or ID", vpcs())
	p.StringVar(&req.CidrBlock, "cidr", "", "IPv4 prefix, a part of the VPC's")
	p.StringVar(&req.Ipv6CidrBlock, "ipv6-cidr", "", "IPv6 prefix, a /64 of the VPC's")
	p.BoolVar(&f.ipv6, "ipv6", false, "give the subnet the first free /64 of the VPC's IPv6 prefix")
	session.Exclusive(c, "ipv6", "ipv6-cidr")
	p.StringVar(&req.GatewayIp, "gateway", "", "address of the gateway (default: the first host address)")
	p.BoolVar(&f.noDHCP, "no-dhcp", false, "do not answer DHCP requests of guests")
	p.StringSliceVar(&req.DnsServers, "dns", nil, dnsUsage)
	p.StringVar(&req.Description, "description", "", "description")
	session.Require(c, "vpc", "cidr")
}

// check returns a *session.Usage error if a flag is invalid.
func (f *subnetFlags) check() error {
	req := &f.request
	return firstError(checkCIDRs("--cidr", req.CidrBlock), checkCIDRs("--ipv6-cidr", req.Ipv6CidrBlock),
		checkAddresses("gateway", req.GatewayIp), checkAddresses("dns", req.DnsServers...))
}

// create creates the subnet that the flags describe.
func (f *subnetFlags) create(ctx context.Context, t *target, name string) (_ *networkv1.Subnet, err error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	req := &f.request
	req.Name, req.OrgId, req.ProjectId = name, t.org, t.project
	if req.VpcId, err = vpcs().find(ctx, t, f.vpc); err != nil {
		return nil, err
	}
	if f.ipv6 {
		if req.Ipv6CidrBlock, err = chooseSubnet6(ctx, t, req.VpcId); err != nil {
			return nil, err
		}
	}
	if f.noDHCP {
		req.DhcpEnabled = proto.Bool(false)
	}
	return t.client.CreateSubnet(ctx, req)
}

func updateSubnetCommand(s *session.Session) *cobra.Command {
	var change changes
	var dns []string
	var dhcp, noDHCP, noDNS bool
	c := subnets().argCommand(s, "update", "Change the name, DHCP and DNS servers of a subnet")
	c.Long = `Change the name, description, DHCP and DNS servers of a subnet. Guests learn of new DNS servers when they renew their
DHCP lease.`
	c.Example = `  trivet network subnet update front --dns 9.9.9.9
  trivet network subnet update front --no-dns --no-dhcp`
	change.add(c)
	c.Flags().StringSliceVar(&dns, "dns", nil, dnsUsage)
	c.Flags().BoolVar(&noDNS, "no-dns", false, "use the subnet's own resolver")
	c.Flags().BoolVar(&dhcp, "dhcp", false, "answer DHCP requests of guests")
	c.Flags().BoolVar(&noDHCP, "no-dhcp", false, "do not answer DHCP requests of guests")
	session.Exclusive(c, "dns", "no-dns")
	session.Exclusive(c, "dhcp", "no-dhcp")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := firstError(change.check(), checkAddresses("dns", dns...)); err != nil {
			return err
		}
		id, err := subnets().find(ctx, t, args[0])
		if err != nil {
			return err
		}
		req := &networkv1.UpdateSubnetRequest{
			OrgId: t.org, ProjectId: t.project, Id: id, Name: change.newName(), Description: change.newDescription(),
		}
		if len(dns) > 0 || noDNS {
			req.DnsServers = &networkv1.DnsServers{Addresses: dns}
		}
		if c.Flags().Changed("dhcp") || noDHCP {
			req.DhcpEnabled = &dhcp
		}
		n, err := t.client.UpdateSubnet(ctx, req)
		return subnets().printMade(ctx, t, n, err)
	})
	return c
}
