package network

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

func routeTables() *kind[*networkv1.RouteTable] {
	return &kind[*networkv1.RouteTable]{
		command: "route", noun: "route table", arg: "TABLE",
		header:    []string{"NAME", "VPC", "SUBNETS", "ROUTES", "STATUS"},
		wideInAll: []string{"SUBNETS"},
		max:       map[string]int{"SUBNETS": 24},
		row: func(r *networkv1.RouteTable, l *labels) []string {
			return []string{
				nameOf(r), l.of(vpcs(), r.GetVpcId()), l.all(subnets(), r.GetSubnetIds()),
				strconv.Itoa(len(r.GetRoutes())),
				status(r),
			}
		},
		fields: func(r *networkv1.RouteTable, l *labels) [][2]string {
			return [][2]string{{"VPC", l.of(vpcs(), r.GetVpcId())}, {"Subnets", l.all(subnets(), r.GetSubnetIds())}}
		},
		more: func(w io.Writer, r *networkv1.RouteTable, l *labels) error {
			rows := make([][]string, len(r.GetRoutes()))
			for i, one := range r.GetRoutes() {
				rows[i] = []string{one.GetDestination(), routeTarget(one, l)}
			}
			return table(w, []string{"DESTINATION", "TARGET"}, rows)
		},
		about: func(r *networkv1.RouteTable) string { return "of VPC " + r.GetVpcId() },
		page: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.RouteTable, string, error) {
			page, err := c.ListRouteTables(ctx, &networkv1.ListRouteTablesRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token, Name: q.name,
				VpcId: q.vpc,
			})
			return page.GetRouteTables(), page.GetNextPageToken(), err
		},
		everywhere: func(ctx context.Context, c networkv1.NetworkServiceClient, q query) ([]*networkv1.RouteTable, string, error) {
			page, err := c.ListAllRouteTables(ctx, &networkv1.ListAllRouteTablesRequest{
				OrgId: q.org, ProjectId: q.project, PageSize: q.size, PageToken: q.token,
			})
			return page.GetRouteTables(), page.GetNextPageToken(), err
		},
		get: func(ctx context.Context, t *target, id string) (*networkv1.RouteTable, error) {
			return t.client.GetRouteTable(ctx, &networkv1.GetRouteTableRequest{OrgId: t.org, ProjectId: t.project, Id: id})
		},
		remove: func(ctx context.Context, t *target, id string) error {
			_, err := t.client.DeleteRouteTable(
				ctx, &networkv1.DeleteRouteTableRequest{OrgId: t.org, ProjectId: t.project, Id: id},
			)
			return err
		},
	}
}

const (
	routeForm = "DESTINATION=nat:NAME, =port:NAME, =peering:NAME or =blackhole, such as 0.0.0.0/0=nat:gw"
	blackhole = "blackhole"
)

// routeTargets lists the targets of routes with a resource: the prefix on the command line, the value in the API, and
// the kind of the resource.
var routeTargets = []struct {
	prefix string
	value  networkv1.RouteTarget
	of     func() namedFinder
}{
	{"nat", networkv1.RouteTarget_ROUTE_TARGET_NAT_GATEWAY, func() namedFinder { return natGateways() }},
	{"port", networkv1.RouteTarget_ROUTE_TARGET_PORT, func() namedFinder { return ports() }},
	{"peering", networkv1.RouteTarget_ROUTE_TARGET_PEERING, func() namedFinder { return peerings() }},
}

// namedFinder is implemented by every kind.
type namedFinder interface {
	finder
	lister
}

// routeTarget formats the target of a route in the form that parseRoute reads.
func routeTarget(r *networkv1.Route, l *labels) string {
	for _, t := range routeTargets {
		if t.value == r.GetTargetType() {
			return t.prefix + ":" + l.of(t.of(), r.GetTargetId())
		}
	}
	return strings.ToLower(show.Enum("ROUTE_TARGET", r.GetTargetType()))
}

// parseRoute parses a route, such as 0.0.0.0/0=nat:gw. arg is the flag or argument that it comes from.
func parseRoute(arg, text string) (r *networkv1.Route, of finder, err error) {
	bad := session.Usagef("%s %q: want %s", arg, text, routeForm)
	destination, to, _ := strings.Cut(text, "=")
	if destination == "" || to == "" {
		return nil, nil, bad
	}
	if err := checkCIDRs(arg, destination); err != nil {
		return nil, nil, err
	}
	r = &networkv1.Route{Destination: destination, TargetType: networkv1.RouteTarget_ROUTE_TARGET_BLACKHOLE}
	if to == blackhole {
		return r, nil, nil
	}
	prefix, name, _ := strings.Cut(to, ":")
	for _, t := range routeTargets {
		if t.prefix == prefix && name != "" {
			r.TargetType, r.TargetId = t.value, name
			return r, t.of(), nil
		}
	}
	return nil, nil, bad
}

// findRoutes parses routes and looks up their targets. It makes no call before all of them are parsed.
func findRoutes(ctx context.Context, t *target, arg string, texts []string) ([]*networkv1.Route, error) {
	routes, finders := make([]*networkv1.Route, len(texts)), make([]finder, len(texts))
	var err error
	for i, text := range texts {
		if routes[i], finders[i], err = parseRoute(arg, text); err != nil {
			return nil, err
		}
	}
	for i, r := range routes {
		if finders[i] == nil {
			continue
		}
		if r.TargetId, err = finders[i].find(ctx, t, r.TargetId); err != nil {
			return nil, err
		}
	}
	return routes, nil
}

func findAll(ctx context.Context, t *target, of finder, namesOrIDs []string) (ids []string, err error) {
	for _, n := range namesOrIDs {
		id, err := of.find(ctx, t, n)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

// routeCommand returns the command `trivet network route`.
func routeCommand(s *session.Session) *cobra.Command {
	c := group("route", "Create and list route tables",
		`Create and list route tables. A route table decides how packets leave the subnets that use it; the route with the
longest matching prefix applies. Subnets without a table use the VPC's default NAT gateway. Within a VPC, packets
are always delivered directly.`,
		`  trivet network route create out --vpc prod --subnet front --to 0.0.0.0/0=nat:gw --to 10.8.0.0/16=peering:office
  trivet network route add out 192.0.2.0/24=blackhole
  trivet network route show out`)
	c.Aliases = []string{"route-table"}
	c.AddCommand(createRouteCommand(s), routeTables().listCommand(s, inVPC()),
		routeTables().showCommand(s, "Show a route table and its routes"),
		updateRouteCommand(s), addRouteCommand(s), removeRouteCommand(s),
		routeTables().deleteCommand(s, "Delete a route table"))
	return c
}

func createRouteCommand(s *session.Session) *cobra.Command {
	req := &networkv1.CreateRouteTableRequest{}
	var vpc string
	var of, to []string
	c := &cobra.Command{
		Use: "create NAME", Short: "Create a route table", Args: session.Exactly("NAME"),
		Long: `Create a route table for subnets of a VPC. A subnet uses one table at most. A --to is
` + routeForm + `.
A port as target forwards packets, and must have port security off.`,
		Example: "  trivet network route create out --vpc prod --subnet front,back --to 0.0.0.0/0=nat:gw --to 10.8.0.0/16=port:vpn",
	}
	refFlag(c, s, &vpc, "vpc", "VPC, by name or ID", vpcs())
	refsFlag(c, s, &of, "subnet", "subnets that use the table, by name or ID, separated by commas", subnets())
	c.Flags().StringArrayVar(&to, "to", nil, "a route, repeatable: see above")
	c.Flags().StringVar(&req.Description, "description", "", "description")
	session.Require(c, "vpc")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) (err error) {
		if req.Name, err = nameArg(args); err != nil {
			return err
		}
		if req.Routes, err = findRoutes(ctx, t, "--to", to); err != nil {
			return err
		}
		if req.VpcId, err = vpcs().find(ctx, t, vpc); err != nil {
			return err
		}
		if req.SubnetIds, err = findAll(ctx, t, subnets(), of); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = t.org, t.project
		made, err := t.client.CreateRouteTable(ctx, req)
		return routeTables().printMade(ctx, t, made, err)
	})
	return c
}

func updateRouteCommand(s *session.Session) *cobra.Command {
	var change changes
	var of, to []string
	var noSubnets, noRoutes bool
	c := routeTables().argCommand(s, "update", "Change a route table")
	c.Long = "Change a route table. --subnet and --to replace all former subnets and routes; `trivet network route add` and `remove`\nchange one route. A --to is\n" + routeForm + "."
	c.Example = `  trivet network route update out --subnet front,back
  trivet network route update out --to 0.0.0.0/0=nat:gw2`
	change.add(c)
	refsFlag(c, s, &of, "subnet", "subnets that use the table, by name or ID, separated by commas", subnets())
	c.Flags().BoolVar(&noSubnets, "no-subnets", false, "no subnet uses the table")
	c.Flags().StringArrayVar(&to, "to", nil, "a route, repeatable: see above")
	c.Flags().BoolVar(&noRoutes, "no-routes", false, "remove all routes")
	session.Exclusive(c, "subnet", "no-subnets")
	session.Exclusive(c, "to", "no-routes")
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		if err := change.check(); err != nil {
			return err
		}
		routes, err := findRoutes(ctx, t, "--to", to)
		if err != nil {
			return err
		}
		req := &networkv1.UpdateRouteTableRequest{
			OrgId: t.org, ProjectId: t.project, Name: change.newName(), Description: change.newDescription(),
		}
		if req.Id, err = routeTables().find(ctx, t, args[0]); err != nil {
			return err
		}
		if len(of) > 0 || noSubnets {
			ids, err := findAll(ctx, t, subnets(), of)
			if err != nil {
				return err
			}
			req.SubnetIds = &networkv1.SubnetIds{Ids: ids}
		}
		if len(routes) > 0 || noRoutes {
			req.Routes = &networkv1.Routes{Routes: routes}
		}
		table, err := t.client.UpdateRouteTable(ctx, req)
		return routeTables().printMade(ctx, t, table, err)
	})
	return c
}

func addRouteCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use:   "add TABLE ROUTE",
		Short: "Add a route to a route table, or change its target",
		Args:  session.Exactly("TABLE", "ROUTE"),
		Long:  "Add a route to a route table. If the table has a route for the same destination, its target changes. ROUTE is\n" + routeForm + ".",
		Example: `  trivet network route add out 0.0.0.0/0=nat:gw
  trivet network route add out 10.8.0.0/16=peering:office`,
		ValidArgsFunction: session.FirstArg(routeTables().complete(s)),
	}
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		added, err := findRoutes(ctx, t, "ROUTE", args[1:])
		if err != nil {
			return err
		}
		return changeRoutes(ctx, t, args[0], func(routes []*networkv1.Route) ([]*networkv1.Route, error) {
			i := slices.IndexFunc(
				routes, func(r *networkv1.Route) bool { return r.GetDestination() == added[0].GetDestination() },
			)
			if i < 0 {
				return append(routes, added[0]), nil
			}
			routes[i] = added[0]
			return routes, nil
		})
	})
	return c
}

func removeRouteCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use:               "remove TABLE DESTINATION",
		Short:             "Remove a route from a route table",
		Args:              session.Exactly("TABLE", "DESTINATION"),
		Example:           "  trivet network route remove out 10.8.0.0/16",
		ValidArgsFunction: session.FirstArg(routeTables().complete(s)),
	}
	c.RunE = run(s, func(ctx context.Context, t *target, args []string) error {
		return changeRoutes(ctx, t, args[0], func(routes []*networkv1.Route) ([]*networkv1.Route, error) {
			i := slices.IndexFunc(routes, func(r *networkv1.Route) bool { return r.GetDestination() == args[1] })
			if i < 0 {
				return nil, session.NotFound(fmt.Sprintf("`trivet network route show %s` shows its routes", args[0]), "route table %s has no route for %q", args[0], args[1])
			}
			return slices.Delete(routes, i, i+1), nil
		})
	})
	return c
}

// changeRoutes reads a route table, changes its routes and writes them back, because the RPC replaces them as a whole.
func changeRoutes(
	ctx context.Context, t *target, nameOrID string, change func([]*networkv1.Route) ([]*networkv1.Route, error),
) error {
	was, err := routeTables().read(ctx, t, nameOrID)
	if err != nil {
		return err
	}
	routes, err := change(was.GetRoutes())
	if err != nil {
		return err
	}
	table, err := t.client.UpdateRouteTable(ctx, &networkv1.UpdateRouteTableRequest{
		OrgId: t.org, ProjectId: t.project, Id: was.GetId(), Routes: &networkv1.Routes{Routes: routes},
	})
	return routeTables().printMade(ctx, t, table, err)
}
