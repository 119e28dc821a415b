// Package network holds the commands for the networks of a project: `trivet network`. There is a file for each kind of
// resource: VPCs, subnets, ports, security groups, rules, route tables, NAT gateways, floating IPs, service IPs,
// peerings and external networks. The file kind.go has what their commands share. Decisions:
//
//   - Every argument and flag that refers to a resource accepts its name or its ID. The commands look names up with the
//     filter of the list RPCs.
//   - Tables show names where responses have IDs, and fit into 80 columns for usual names. IDs are in -o wide, in the
//     output of `show` and in documents such as JSON.
//   - `trivet network explain` has the exit code 8 if a packet would be dropped, so that scripts can distinguish this
//     from a failure of the command.
//   - UpdateRouteTable and UpdateServiceIp replace lists as a whole. The commands that change a part of a list read the
//     resource first. If two of these commands run at the same time, one may undo the other's change.
package network

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// callTimeout is the deadline of each command unless --timeout is given.
const callTimeout = 30 * time.Second

// Command returns the command `trivet network`.
func Command(s *session.Session) *cobra.Command {
	c := group("network", "Create and connect private networks",
		`Create and connect the private networks of a project. A VPC is a private network. Its subnets have parts of its
prefix, and ports are the addresses of VMs in a subnet. Security groups permit traffic of ports. Everything else
connects a VPC with the world or with other VPCs: NAT gateways, floating IPs, service IPs, route tables and peerings.

Commands return when a change is recorded. Hosts apply it within seconds. The status of a resource is PENDING until all
hosts that need it have applied it, and also while no host needs it.`,
		`  trivet network vpc create prod --cidr 10.0.0.0/16
  trivet network subnet create front --vpc prod --cidr 10.0.1.0/24
  trivet network group create web --rule "ingress tcp/443" --rule "egress any"
  trivet network port create web-1 --subnet front --group web
  trivet network floating-ip create --port web-1
  trivet network explain --from web-1 --to 10.0.1.9 --port 5432`)
	c.Aliases = []string{"net"}
	c.AddCommand(vpcCommand(s), subnetCommand(s), portCommand(s), groupCommand(s), ruleCommand(s), routeCommand(s),
		natCommand(s), floatingIPCommand(s), serviceIPCommand(s), peeringCommand(s), externalCommand(s), explainCommand(s))
	return c
}

// group returns a command that only has subcommands, and prints its help.
func group(use, short, long, example string) *cobra.Command {
	return &cobra.Command{Use: use, Short: short, Long: long, Example: example, Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() }}
}

// target contains the connection of a command and the project in which the command acts.
type target struct {
	s            *session.Session
	conn         *dial.Conn
	client       networkv1.NetworkServiceClient
	org, project string
}

func newTarget(s *session.Session, conn *dial.Conn) *target {
	t := &target{s: s, conn: conn, client: networkv1.NewNetworkServiceClient(conn)}
	t.org, t.project = s.Tenant()
	return t
}

// query returns a query for all objects of the project.
func (t *target) query() query { return query{org: t.org, project: t.project} }

// run returns a function for cobra's RunE that connects to the control plane and calls body.
func run(
	s *session.Session, body func(ctx context.Context, t *target, args []string) error,
) func(*cobra.Command, []string) error {
	return s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		return body(ctx, newTarget(s, conn), args)
	})
}
