package network

import (
	"context"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func ports() *kind[*networkv1.Port] {
	return &kind[*networkv1.Port]{
		command: "port", noun: "port", arg: "PORT",
		header:    []string{"NAME", "SUBNET", "ADDRESS", "GROUPS", "DEVICE", "STATUS"},
		wide:      []string{"GROUPS"},
		wideInAll: []string{"SUBNET", "STATUS"},
		row: func(p *networkv1.Port, l *labels) []string {
			return []string{
				nameOf(p), l.of(subnets(), p.GetSubnetId()), p.GetIpAddress(), portGroups(p, l), device(p, l),
				status(p),
			}
		},
		fields: func(p *networkv1.Port, l *labels) [][2]string {
			pairs := make([]string, len(p.GetAllowedAddressPairs()))
			for i, a := range p.GetAllowedAddressPairs() {
				pairs[i] = strings.TrimSuffix(a.GetCidr()+"="+a.GetMacAddress(), "=")
			}
			bandwidth := "unlimited"
			if p.GetBandwidthMbps() > 0 {
				bandwidth = number(p.GetBandwidthMbps()) + " Mbit/s"
			}
			return [][2]string{
				{"VPC", l.of(vpcs(), p.GetVpcId())}, {"Subnet", l.of(subnets(), p.GetSubnetId())},
				{"Address", p.GetIpAddress()},
				{"IPv6 address", p.GetIpv6Address()}, {"MAC", p.GetMacAddress()}, {"Security groups", portGroups(p, l)},
				{"Port security", yes(p.GetPortSecurity())}, {"Also sends from", strings.Join(pairs, ", ")},
				{"Bandwidth", bandwidth}, {"Labels", pairsText(p.GetLabels())},
				{"Device", device(p, l)}, {"Node", p.GetNodeId()},
			}
		},
		about: func(p *networkv1.Port) string { return p.GetIpAddress() + " in subnet " + p.GetSubnetId() },
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Port, string, error) {
			page, err := c.ListPorts(ctx, &networkv1.ListPortsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
				VpcId:    q.vpc,
				SubnetId: q.subnet,
				DeviceId: q.device, SecurityGroupId: q.group,
			})
			return page.GetPorts(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.Port, string, error) {
			page, err := c.ListAllPorts(ctx, &networkv1.ListAllPortsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetPorts(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.Port, error) {
			return t.client.GetPort(ctx, &networkv1.GetPortRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeletePort(ctx, &networkv1.DeletePortRequest{OrgId: t.org, ProjectId: t.project, Id: id})
			return err
		},
	}
}

// portGroups returns the names of a port's security groups, or "none", because an empty list means that nothing passes.
func portGroups(p *networkv1.Port, l *labels) string {
	switch {
	case !p.GetPortSecurity():
		return ""
	case len(p.GetSecurityGroups()) == 0:
		return "none"
	}
	return l.all(groups(), p.GetSecurityGroups())
}

// device returns what a port is attached to, such as vm:web; empty for nothing.
func device(p *networkv1.Port, l *labels) string {
	switch p.GetDeviceType() {
	case "":
		return ""
	case "vm":
		return vmPrefix + l.of(vms{}, p.GetDeviceId())
	case "service_ip":
		return "service-ip:" + l.of(serviceIPs(), p.GetDeviceId())
	}
	return p.GetDeviceType() + ":" + p.GetDeviceId()
}

// portCommand returns the command `trivet network port`.
func portCommand(s *session.Session) *cobra.Command {
	c := group("port", "Create and list ports of subnets",
		`Create and list ports. A port is an address in a subnet, with the security groups that permit its traffic. A VM has a
port for each of its network interfaces.`,
		`  trivet network port create web-1 --subnet front --group web
  trivet network port list --vm web`)
	c.AddCommand(createPortCommand(s), ports().listCommand(s, inVPC(),
		filter{
			"subnet", "list only those of this subnet, by name or ID", subnets(),
			func(q *query, id string) { q.subnet = id },
		},
		filter{"vm", "list only those of this VM, by name or ID", vms{}, func(q *query, id string) { q.device = id }},
		filter{
			"group", "list only those with this security group, by name or ID", groups(),
			func(q *query, id string) { q.group = id },
		},
	), ports().showCommand(s, "Show a port"), updatePortCommand(s),
		ports().deleteCommand(s, "Delete a port that no VM and no service IP uses"))
	return c
}

// portFlags holds the flags that `port create` and `port update` share.
type portFlags struct {
	groups, allow, labels []string
	noGroups              bool
	bandwidth             uint32
}

func (f *portFlags) add(c *cobra.Command, s *session.Session, groupDefault string) {
	refsFlag(c, s, &f.groups, "group", "security groups, by name or ID, separated by commas"+groupDefault, groups())
	c.Flags().BoolVar(&f.noGroups, "no-groups", false, "no security group: the port may neither send nor receive")
	c.Flags().StringSliceVar(&f.allow, "allow", nil, "CIDR[=MAC] that the port may also send from, repeatable, at most 10")
	c.Flags().Uint32Var(&f.bandwidth, "bandwidth", 0, "limit of each direction in Mbit/s (0: unlimited)")
	c.Flags().StringArrayVar(&f.labels, "label", nil, "KEY=VALUE, repeatable, at most 16; service IPs select ports by labels")
	session.Exclusive(c, "group", "no-groups")
}

// groupIDs returns the IDs of the groups in --group, an empty list for --no-groups, or nil without both.
func (f *portFlags) groupIDs(ctx context.Context, t *target) (*networkv1.GroupIds, error) {
	if len(f.groups) == 0 && !f.noGroups {
		return nil, nil
	}
	ids := &networkv1.GroupIds{}
	for _, g := range f.groups {
		id, err := groups().find(ctx, t, g)
		if err != nil {
			return nil, err
		}
		ids.Ids = append(ids.Ids, id)
	}
	return ids, nil
}

// pairs parses the values of --allow.
func (f *portFlags) pairs() (all []*networkv1.AddressPair, err error) {
	for _, text := range f.allow {
		cidr, mac, _ := strings.Cut(text, "=")
		if isAddress(cidr) {
			cidr += map[bool]string{false: "/32", true: "/128"}[strings.Contains(cidr, ":")]
		}
		if cidr == "" {
			return nil, session.Usagef("--allow %q: want CIDR[=MAC], such as 10.0.1.100/32", text)
		}
		if err := firstError(checkCIDRs("--allow", cidr), checkMAC("allow", mac)); err != nil {
			return nil, err
		}
		all = append(all, &networkv1.AddressPair{Cidr: cidr, MacAddress: mac})
	}
	return all, nil
}

func createPortCommand(s *session.Session) *cobra.Command {
	req := &networkv1.CreatePortRequest{}
	var f portFlags
	var subnet string
	var insecure bool
	c := &cobra.Command{
		Use: "create [NAME]", Short: "Create a port in a subnet", Args: optionalName,
		Long: `Create a port in a subnet. Without a NAME, its ID serves as the name. Without --ip, the port gets the lowest free
address. Without --group and --no-groups, it gets the security group "default". With --no-port-security, it may send
from any address and no security group applies, as for a VM that forwards packets.`,
		Example: `  trivet network port create web-1 --subnet front --ip 10.0.1.10 --group web,ssh
  trivet network port create web-2 --subnet front --label app=web
  trivet network port create router --subnet front --no-port-security
  trivet network port create lb-1 --subnet front --allow 10.0.1.100/32 --bandwidth 500`,
	}
	p := c.Flags()
	refFlag(c, s, &subnet, "subnet", "subnet, by name or ID", subnets())
	p.StringVar(&req.IpAddress, "ip", "", "IPv4 address (default: the lowest free one)")
	p.StringVar(&req.Ipv6Address, "ipv6", "", "IPv6 address (default: derived from the MAC)")
	p.StringVar(&req.MacAddress, "mac", "", "Ethernet address (default: derived from the ID)")
	f.add(c, s, ` (default: the group "default")`)
	p.BoolVar(&insecure, "no-port-security", false, "permit all traffic, from any address")
	p.StringVar(&req.Description, "description", "", "description")
	session.Require(c, "subnet")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		if err := firstError(
			checkAddresses("ip", req.IpAddress), checkAddresses("ipv6", req.Ipv6Address),
			checkMAC("mac", req.MacAddress),
		); err != nil {
			return err
		}
		if req.Name, err = nameArg(args); err != nil {
			return err
		}
		if req.AllowedAddressPairs, err = f.pairs(); err != nil {
			return err
		}
		if req.Labels, err = session.Pairs("label", f.labels); err != nil {
			return err
		}
		if req.SubnetId, err = subnets().find(ctx, t, subnet); err != nil {
			return err
		}
		if req.SecurityGroups, err = f.groupIDs(ctx, t); err != nil {
			return err
		}
		if insecure {
			req.PortSecurity = proto.Bool(false)
		}
		req.OrgId, req.ProjectId, req.BandwidthMbps = t.org, t.project, f.bandwidth
		made, err := t.client.CreatePort(ctx, req)
		return ports().printMade(ctx, t, made, err)
	})
	return c
}

func updatePortCommand(s *session.Session) *cobra.Command {
	var change changes
	var f portFlags
	var noAllow, noLabels, secure, insecure bool
	c := ports().argCommand(s, "update", "Change the security groups and limits of a port")
	c.Long = `Change the name, description, security groups, further addresses, port security, bandwidth and labels of a port.
--group, --allow and --label replace the former ones. Traffic that is no longer permitted ends within a second.`
	c.Example = `  trivet network port update web-1 --group web,ssh
  trivet network port update lb-1 --no-allow --bandwidth 0`
	change.add(c)
	f.add(c, s, "")
	c.Flags().BoolVar(&noAllow, "no-allow", false, "the port may send from its own addresses only")
	c.Flags().BoolVar(&secure, "port-security", false, "check addresses, and apply security groups")
	c.Flags().BoolVar(&insecure, "no-port-security", false, "permit all traffic, from any address")
	c.Flags().BoolVar(&noLabels, "no-labels", false, "remove all labels")
	session.Exclusive(c, "allow", "no-allow")
	session.Exclusive(c, "label", "no-labels")
	session.Exclusive(c, "port-security", "no-port-security")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		pairs, err := f.pairs()
		if err != nil {
			return err
		}
		labels, err := session.Pairs("label", f.labels)
		if err != nil {
			return err
		}
		req := &networkv1.UpdatePortRequest{
			OrgId: t.org, ProjectId: t.project, Name: change.newName(), Description: change.newDescription(),
		}
		if req.Id, err = ports().find(ctx, t, args[0]); err != nil {
			return err
		}
		if req.SecurityGroups, err = f.groupIDs(ctx, t); err != nil {
			return err
		}
		if len(pairs) > 0 || noAllow {
			req.AllowedAddressPairs = &networkv1.AddressPairs{Pairs: pairs}
		}
		if len(labels) > 0 || noLabels {
			req.Labels = &networkv1.PortLabels{Labels: labels}
		}
		if c.Flags().Changed("port-security") || insecure {
			req.PortSecurity = &secure
		}
		if c.Flags().Changed("bandwidth") {
			req.BandwidthMbps = &f.bandwidth
		}
		p, err := t.client.UpdatePort(ctx, req)
		return ports().printMade(ctx, t, p, err)
	})
	return c
}
