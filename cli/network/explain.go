package network

import (
	"context"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// explainCommand returns the command `trivet network explain`.
func explainCommand(s *session.Session) *cobra.Command {
	req := &networkv1.ExplainPathRequest{}
	var from, to string
	c := &cobra.Command{
		Use: "explain", Short: "Tell whether a packet would pass, and why not", Args: session.Exactly(),
		Long: `Tell whether a packet would pass from a VM or port to another or to an address, and which rule or route decides. The
control plane evaluates its records; it sends no packet. One line is printed for each decision, up to the one that
drops the packet. If a VM and a port have the same name, write vm:NAME or port:NAME. Of a VM, the first port counts.
A packet to a VM or port is sent to its IPv4 address, except that icmpv6 is sent to its IPv6 address. To explain
another protocol over IPv6, give the IPv6 address.

Exit code: 0 if the packet would pass, 8 if it would be dropped. Errors have the exit codes of all commands.`,
		Example: `  trivet network explain --from web --to db --port 5432
  trivet network explain --from web-1 --to 192.0.2.1 --port 443
  trivet network explain --from port:web-1 --to vm:db --protocol icmp`,
	}
	p := c.Flags()
	p.StringVar(&from, "from", "", "VM or port that sends the packet, by name or ID")
	p.StringVar(&to, "to", "", "VM or port by name or ID, or address")
	p.StringVar(&req.Protocol, "protocol", "tcp", "tcp, udp, sctp, icmp, icmpv6, or the number of another protocol")
	p.Uint32Var(&req.Port, "port", 0, "destination port of tcp, udp and sctp")
	session.Require(c, "from", "to")
	completeFlag(c, "protocol", cobra.FixedCompletions([]string{"tcp", "udp", "sctp", "icmp", "icmpv6"}, cobra.ShellCompDirectiveNoFileComp))
	for _, flag := range []string{"from", "to"} {
		completeFlag(c, flag, endpointNames(s))
	}
	c.RunE = run(s, func(ctx context.Context, t *target, _ []string) (err error) {
		if err := checkPacket(req); err != nil {
			return err
		}
		if isAddress(from) {
			return session.Usagef("--from %q: want a VM or a port, not an address", from)
		}
		if req.FromVmId, req.FromPortId, err = findEndpoint(ctx, t, "--from", from); err != nil {
			return err
		}
		if isAddress(to) {
			req.ToAddress = to
		} else if req.ToVmId, req.ToPortId, err = findEndpoint(ctx, t, "--to", to); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = t.org, t.project
		path, err := t.client.ExplainPath(ctx, req)
		if err != nil {
			return err
		}
		if err := printPath(s, path); err != nil {
			return err
		}
		if !path.GetPasses() {
			return &session.Coded{Code: exitDropped, Message: "the packet would be dropped"}
		}
		return nil
	})
	return c
}

// exitDropped is the exit code if the packet would be dropped. No error has this exit code.
const exitDropped = 8

// checkPacket returns a *session.Usage error if the protocol and port of a packet do not fit.
func checkPacket(req *networkv1.ExplainPathRequest) error {
	_, err := strconv.ParseUint(req.GetProtocol(), 10, 8)
	hasPort := slices.Contains(withPorts, req.GetProtocol())
	switch {
	case !hasPort && err != nil && req.GetProtocol() != "icmp" && req.GetProtocol() != "icmpv6":
		return session.Usagef("--protocol %q: want tcp, udp, sctp, icmp, icmpv6 or a number of 0 to 255", req.GetProtocol())
	case hasPort && (req.GetPort() == 0 || req.GetPort() > 65535):
		return session.Usagef("%s needs a destination port: give --port, 1 to 65535", req.GetProtocol())
	case !hasPort && req.GetPort() != 0:
		return session.Usagef("--port is only for tcp, udp and sctp")
	}
	return nil
}

func printPath(s *session.Session, path *networkv1.ExplainPathResponse) error {
	result := map[bool]string{true: "passes", false: "dropped"}
	return s.Print(path, []string{result[path.GetPasses()]}, func(w io.Writer) error {
		rows := make([][]string, len(path.GetSteps()))
		for i, step := range path.GetSteps() {
			rows[i] = []string{step.GetStage(), result[step.GetPasses()], step.GetExplanation()}
		}
		return show.WrapRows(w, s.Form, []string{"STAGE", "RESULT", "EXPLANATION"}, rows)
	})
}

// findEndpoint returns the ID of the VM or the port with a name or ID; the other ID is empty. The name may have the
// prefix vm: or port:. It returns an error if there is neither or if there are several.
func findEndpoint(ctx context.Context, t *target, flag, text string) (vmID, portID string, err error) {
	if name, ok := strings.CutPrefix(text, vmPrefix); ok {
		vmID, err = vms{}.find(ctx, t, name)
		return vmID, "", err
	}
	if name, ok := strings.CutPrefix(text, portPrefix); ok {
		portID, err = ports().find(ctx, t, name)
		return "", portID, err
	}
	if session.IsID(text) {
		if _, err = ports().get(ctx, t, text); grpcstatus.Code(err) == codes.NotFound {
			return text, "", nil
		}
		return "", text, err
	}
	vmMatches, err := lookup.Matches(ctx, t.s, t.conn, text)
	if err != nil {
		return "", "", err
	}
	portMatches, err := ports().matches(ctx, t, t.query(), text)
	switch {
	case err != nil:
		return "", "", err
	case len(vmMatches) > 0 && len(portMatches) > 0:
		return "", "", session.Usagef("%s: a VM and a port are named %q: write vm:%s or port:%s", flag, text, text, text)
	case len(vmMatches) == 0 && len(portMatches) == 0:
		return "", "", session.NotFound("`trivet vm list` and `trivet network port list` show the existing ones", "%s: no VM or port named %q", flag, text)
	case len(vmMatches) > 0:
		vmID, err = session.One("vm", t.s.Scope(), text, vmMatches)
	default:
		portID, err = session.One("network port", t.s.Scope(), text, portMatches)
	}
	return vmID, portID, err
}

// endpointNames returns a shell completion with the names of VMs and ports.
func endpointNames(s *session.Session) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		names, directive := lookup.Names(s)(cmd, args, prefix)
		more, _ := ports().complete(s)(cmd, args, prefix)
		return append(names, more...), directive
	}
}
