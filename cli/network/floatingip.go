package network

import (
	"cmp"
	"context"
	"fmt"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func floatingIPs() *kind[*networkv1.FloatingIp] {
	return &kind[*networkv1.FloatingIp]{
		command: "floating-ip", noun: "floating IP", arg: "FLOATING-IP",
		header:    []string{"NAME", "ADDRESS", "EXTERNAL", "TARGET", "STATUS"},
		wide:      []string{"EXTERNAL"},
		wideInAll: []string{"STATUS"},
		row: func(f *networkv1.FloatingIp, l *labels) []string {
			return []string{nameOf(f), f.GetAddress(), f.GetExternalNetwork(), floatingTarget(f, l), status(f)}
		},
		fields: func(f *networkv1.FloatingIp, l *labels) [][2]string {
			return [][2]string{
				{"Address", f.GetAddress()}, {"External network", f.GetExternalNetwork()}, {"Target", floatingTarget(f, l)},
				{"Fixed address", f.GetFixedAddress()}, {"Host", cmp.Or(f.GetNodeId(), "-")},
			}
		},
		address: (*networkv1.FloatingIp).GetAddress,
		about:   (*networkv1.FloatingIp).GetAddress,
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.FloatingIp, string, error) {
			page, err := c.ListFloatingIps(ctx, &networkv1.ListFloatingIpsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name, PortId: q.port,
			})
			return page.GetFloatingIps(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.FloatingIp, string, error) {
			page, err := c.ListAllFloatingIps(ctx, &networkv1.ListAllFloatingIpsRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetFloatingIps(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.FloatingIp, error) {
			return t.client.GetFloatingIp(ctx, &networkv1.GetFloatingIpRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeleteFloatingIp(
				ctx, &networkv1.DeleteFloatingIpRequest{OrgId: t.org, ProjectId: t.project, Id: id},
			)
			return err
		},
	}
}

// floatingTarget returns what a floating IP is attached to, such as port:web-1; empty for nothing.
func floatingTarget(f *networkv1.FloatingIp, l *labels) string {
	switch {
	case f.GetPortId() != "":
		return portPrefix + l.of(ports(), f.GetPortId())
	case f.GetServiceIpId() != "":
		return "service-ip:" + l.of(serviceIPs(), f.GetServiceIpId())
	}
	return ""
}

// floatingIPCommand returns the command `trivet network floating-ip`.
func floatingIPCommand(s *session.Session) *cobra.Command {
	c := group("floating-ip", "Create, attach and list floating IPs",
		`Create, attach and list floating IPs. A floating IP is an address of an external network. Attached to a port or a
service IP, it makes that reachable from outside, and it can be moved to another at any time. Its status is ACTIVE when
a host has acknowledged that it answers for the address. The commands accept its name, address or ID.`,
		`  trivet network floating-ip create www --port web-1
  trivet network floating-ip attach www --port web-2
  trivet network floating-ip detach 203.0.113.10`)
	c.Aliases = []string{"fip"}
	c.AddCommand(createFloatingIPCommand(s), floatingIPs().listCommand(s,
		filter{"port", "list only those of this port, by name or ID", ports(), func(q *query, id string) { q.port = id }},
	), floatingIPs().showCommand(s, "Show a floating IP"), updateFloatingIPCommand(s), attachCommand(s), detachCommand(s),
		floatingIPs().deleteCommand(s, "Detach a floating IP and return its address"))
	return c
}

// attachFlags holds the flags that name the target of a floating IP.
type attachFlags struct{ port, serviceIP, vm string }

func (f *attachFlags) add(c *cobra.Command, s *session.Session) {
	refFlag(c, s, &f.port, "port", "attach it to this port, by name or ID", ports())
	refFlag(c, s, &f.serviceIP, "service-ip", "attach it to this service IP, by name or ID", serviceIPs())
	refFlag(c, s, &f.vm, "vm", "attach it to the only port of this VM, by name or ID", vms{})
	session.Exclusive(c, "port", "service-ip", "vm")
}

// target returns the IDs of the port and the service IP that the flags name; at most one is not empty.
func (f *attachFlags) target(ctx context.Context, t *target) (port, serviceIP string, err error) {
	switch {
	case f.port != "":
		port, err = ports().find(ctx, t, f.port)
	case f.serviceIP != "":
		serviceIP, err = serviceIPs().find(ctx, t, f.serviceIP)
	case f.vm != "":
		port, err = onlyPort(ctx, t, f.vm)
	}
	return port, serviceIP, err
}

// onlyPort returns the ID of the only port of a VM. It returns an error if the VM has none or several.
func onlyPort(ctx context.Context, t *target, nameOrID string) (string, error) {
	q := t.query()
	var err error
	if q.device, err = (vms{}).find(ctx, t, nameOrID); err != nil {
		return "", err
	}
	all, err := ports().all(ctx, t, q)
	switch {
	case err != nil:
		return "", err
	case len(all) == 0:
		return "", session.NotFound(fmt.Sprintf("`trivet vm nic attach %s --subnet SUBNET` adds one", nameOrID), "VM %s has no port", nameOrID)
	case len(all) > 1:
		return "", session.Errorf(codes.InvalidArgument, fmt.Sprintf("`trivet network port list --vm %s` shows them", nameOrID), "VM %s has %d ports: name one with --port", nameOrID, len(all))
	}
	return all[0].GetId(), nil
}

func createFloatingIPCommand(s *session.Session) *cobra.Command {
	req := &networkv1.CreateFloatingIpRequest{}
	var to attachFlags
	c := &cobra.Command{
		Use: "create [NAME]", Short: "Get an address of an external network", Args: optionalName,
		Long: "Get an address of an external network, the requested one or the lowest free one, and attach it if a target is given.",
		Example: `  trivet network floating-ip create www --port web-1
  trivet network floating-ip create --external internet --address 203.0.113.10 --service-ip shop`,
	}
	refFlag(c, s, &req.ExternalNetwork, "external", "external network (default: the only one)", externals())
	c.Flags().StringVar(&req.Address, "address", "", "address to get (default: the lowest free one)")
	to.add(c, s)
	c.Flags().StringVar(&req.Description, "description", "", "description")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		if err := firstError(checkExternal(req.ExternalNetwork), checkAddresses("address", req.Address)); err != nil {
			return err
		}
		if req.Name, err = nameArg(args); err != nil {
			return err
		}
		if req.PortId, req.ServiceIpId, err = to.target(ctx, t); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = t.org, t.project
		f, err := t.client.CreateFloatingIp(ctx, req)
		return floatingIPs().printMade(ctx, t, f, err)
	})
	return c
}

func updateFloatingIPCommand(s *session.Session) *cobra.Command {
	var change changes
	c := floatingIPs().argCommand(s, "update", "Change the name and description of a floating IP")
	c.Example = "  trivet network floating-ip update 203.0.113.10 --name www"
	change.add(c)
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		return updateFloatingIP(
			ctx, t, args[0], &networkv1.UpdateFloatingIpRequest{Name: change.newName(), Description: change.newDescription()},
		)
	})
	return c
}

func attachCommand(s *session.Session) *cobra.Command {
	var to attachFlags
	c := floatingIPs().argCommand(s, "attach", "Attach a floating IP to a port or service IP")
	c.Long = `Attach a floating IP to a port, a service IP or the port of a VM. If it was attached to another one, connections through
that one end.`
	c.Example = `  trivet network floating-ip attach www --port web-2
  trivet network floating-ip attach 203.0.113.10 --vm web`
	to.add(c, s)
	session.RequireOne(c, "port", "service-ip", "vm")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		port, serviceIP, err := to.target(ctx, t)
		if err != nil {
			return err
		}
		req := &networkv1.UpdateFloatingIpRequest{PortId: &port}
		if serviceIP != "" {
			req = &networkv1.UpdateFloatingIpRequest{ServiceIpId: &serviceIP}
		}
		return updateFloatingIP(ctx, t, args[0], req)
	})
	return c
}

func detachCommand(s *session.Session) *cobra.Command {
	c := floatingIPs().argCommand(s, "detach", "Detach a floating IP from its port or service IP")
	c.Long = "Detach a floating IP. The project keeps the address; `trivet network floating-ip delete` returns it."
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		return updateFloatingIP(ctx, t, args[0], &networkv1.UpdateFloatingIpRequest{PortId: proto.String("")})
	})
	return c
}

func updateFloatingIP(
	ctx context.Context, t *target, nameOrID string, req *networkv1.UpdateFloatingIpRequest,
) (err error) {
	if req.Id, err = floatingIPs().find(ctx, t, nameOrID); err != nil {
		return err
	}
	req.OrgId, req.ProjectId = t.org, t.project
	f, err := t.client.UpdateFloatingIp(ctx, req)
	return floatingIPs().printMade(ctx, t, f, err)
}
