package network

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func vpcs() *kind[*networkv1.Vpc] {
	return &kind[*networkv1.Vpc]{
		command: "vpc", noun: "VPC", arg: "VPC",
		header:    []string{"NAME", "CIDR", "IPV6 CIDR", "DEFAULT", "STATUS"},
		wideInAll: []string{"IPV6 CIDR", "DEFAULT"},
		row: func(v *networkv1.Vpc, _ *labels) []string {
			return []string{nameOf(v), v.GetCidrBlock(), v.GetIpv6CidrBlock(), yes(v.GetIsDefault()), status(v)}
		},
		fields: func(v *networkv1.Vpc, _ *labels) [][2]string {
			return [][2]string{
				{"CIDR", v.GetCidrBlock()}, {"IPv6 CIDR", v.GetIpv6CidrBlock()},
				{"Service CIDR", v.GetServiceCidrBlock()}, {"MTU", number(v.GetMtu())},
				{"Default", yes(v.GetIsDefault())},
			}
		},
		about: func(v *networkv1.Vpc) string {
			return v.GetCidrBlock() + " of " + v.GetOrgId() + "/" + v.GetProjectId()
		},
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Vpc, string, error) {
			page, err := c.ListVpcs(ctx, &networkv1.ListVpcsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
			})
			return page.GetVpcs(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Vpc, string, error) {
			page, err := c.ListAllVpcs(ctx, &networkv1.ListAllVpcsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetVpcs(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.Vpc, error) {
			return t.client.GetVpc(ctx, &networkv1.GetVpcRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeleteVpc(ctx, &networkv1.DeleteVpcRequest{OrgId: t.org, ProjectId: t.project, Id: id})
			return err
		},
	}
}

// number formats n, and returns "" for 0.
func number[N uint32 | uint64](n N) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(n), 10)
}

// free formats a number of free addresses.
func free(n uint64) string { return strconv.FormatUint(n, 10) }

// pairsText formats labels, such as app=web, tier=front.
func pairsText(pairs map[string]string) string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(pairs)) {
		all = append(all, key+"="+pairs[key])
	}
	return strings.Join(all, ", ")
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// vpcCommand returns the command `trivet network vpc`.
func vpcCommand(s *session.Session) *cobra.Command {
	c := group("vpc", "Create and list VPCs",
		`Create and list VPCs. A VPC is a private network with a prefix of its own. VPCs cannot reach each other
unless a peering connects them.`,
		`  trivet network vpc create prod --cidr 10.0.0.0/16 --egress nat
  trivet network subnet create front --vpc prod --cidr 10.0.1.0/24`)
	c.AddCommand(createVPCCommand(s), vpcs().listCommand(s), vpcs().showCommand(s, "Show a VPC"), updateVPCCommand(s), deleteVPCCommand(s))
	return c
}

// egresses maps the values of --egress to those of the API.
var egresses = map[string]networkv1.Egress{"": 0, "none": networkv1.Egress_EGRESS_NONE, "nat": networkv1.Egress_EGRESS_NAT}

// vpcFlags are the flags of `trivet network vpc create`.
type vpcFlags struct {
	// request has the flags that are fields of the request.
	request networkv1.CreateVpcRequest
	egress  string
	ipv6    bool
}

func createVPCCommand(s *session.Session) *cobra.Command {
	f := &vpcFlags{}
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a VPC", Args: session.Exactly("NAME"),
		Long: `Create a VPC. --cidr is a private prefix of /8 to /28, such as 10.0.0.0/16. With --egress nat, the VPC also gets a
NAT gateway as its default route, so that its VMs reach the internet. With --ipv6, the VPC also gets a random unique
local IPv6 prefix of /48 (RFC 4193). With --ipv6-cidr, you choose the IPv6 prefix. NAT is for IPv4 only. With
--service-cidr, service IPs can have addresses of this range, with which no subnet may overlap. --mtu and --service-cidr
cannot be changed later; VMs run only on hosts whose underlay has an MTU that is 50 bytes larger (70 with IPv6). The
first VPC of a project also creates the security group "default".`,
		Example: `  trivet network vpc create prod --cidr 10.0.0.0/16 --egress nat
  trivet network vpc create lab --cidr 10.9.0.0/16 --ipv6
  trivet network vpc create six --cidr 10.6.0.0/16 --ipv6-cidr fd12:3456:789a::/48`,
	}
	f.register(s, c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		name, err := nameArg(args)
		if err != nil {
			return err
		}
		v, err := f.create(ctx, t, name)
		return vpcs().printMade(ctx, t, v, err)
	})
	return c
}

// register adds the flags to c.
func (f *vpcFlags) register(s *session.Session, c *cobra.Command) {
	p, req := c.Flags(), &f.request
	p.StringVar(&req.CidrBlock, "cidr", "", "IPv4 prefix of /8 to /28, within 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16")
	p.StringVar(&req.Ipv6CidrBlock, "ipv6-cidr", "", "IPv6 prefix of /48 to /56, within fd00::/8")
	p.StringVar(&req.ServiceCidrBlock, "service-cidr", "", "part of --cidr for the addresses of service IPs without a subnet")
	p.Uint32Var(&req.Mtu, "mtu", 0, "MTU of the VMs' interfaces, 1280 to 65485 (default 1450)")
	p.BoolVar(&f.ipv6, "ipv6", false, "give the VPC a random IPv6 prefix of /48, within fd00::/8")
	session.Exclusive(c, "ipv6", "ipv6-cidr")
	p.StringVar(&f.egress, "egress", "none", "how VMs reach networks outside: nat (a NAT gateway) or none")
	refFlag(c, s, &req.ExternalNetwork, "external", "external network for --egress nat (default: the only one)", externals())
	p.StringVar(&req.Description, "description", "", "description")
	session.Require(c, "cidr")
	completeFlag(c, "egress", cobra.FixedCompletions([]string{"nat", "none"}, cobra.ShellCompDirectiveNoFileComp))
}

// check returns a *session.Usage error if a flag is invalid.
func (f *vpcFlags) check() error {
	req := &f.request
	var known bool
	if req.Egress, known = egresses[f.egress]; !known {
		return session.Usagef("--egress %q: want nat or none", f.egress)
	}
	if req.ExternalNetwork != "" && req.Egress != networkv1.Egress_EGRESS_NAT {
		return session.Usagef("--external is only for --egress nat")
	}
	return firstError(checkCIDRs("--cidr", req.CidrBlock), checkCIDRs("--ipv6-cidr", req.Ipv6CidrBlock),
		checkCIDRs("--service-cidr", req.ServiceCidrBlock), checkExternal(req.ExternalNetwork))
}

// create creates the VPC that the flags describe.
func (f *vpcFlags) create(ctx context.Context, t *target, name string) (*networkv1.Vpc, error) {
	if err := f.check(); err != nil {
		return nil, err
	}
	req := &f.request
	req.Name, req.OrgId, req.ProjectId = name, t.org, t.project
	if f.ipv6 {
		req.Ipv6CidrBlock = randomULA().String()
	}
	return t.client.CreateVpc(ctx, req)
}

func updateVPCCommand(s *session.Session) *cobra.Command {
	var change changes
	c := vpcs().argCommand(s, "update", "Change the name and description of a VPC")
	c.Example = "  trivet network vpc update prod --name production"
	change.add(c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		id, err := vpcs().find(ctx, t, args[0])
		if err != nil {
			return err
		}
		v, err := t.client.UpdateVpc(ctx, &networkv1.UpdateVpcRequest{
			OrgId: t.org, ProjectId: t.project, Id: id, Name: change.newName(), Description: change.newDescription(),
		})
		return vpcs().printMade(ctx, t, v, err)
	})
	return c
}

func deleteVPCCommand(s *session.Session) *cobra.Command {
	c := vpcs().deleteCommand(s, "Delete a VPC without subnets, service IPs and peerings")
	c.Long = "Delete a VPC without subnets, service IPs and peerings. Its NAT gateways and route tables are deleted with it."
	return c
}
