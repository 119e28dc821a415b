package cluster

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

const (
	// hostPoll is the time between two reads of the state of a host.
	hostPoll = time.Second
	// readyWait is how long rolling-drain waits until a host answers after the command of --run.
	readyWait = 5 * time.Minute
)

// safeName matches the names of hosts that may be inserted in a command for the shell. A host reports its own name. A
// hostile host could otherwise inject shell commands into --run.
var safeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]*$`)

func rollingDrainCommand(s *session.Session) *cobra.Command {
	r := &rollingDrain{s: s}
	var labels []string
	c := &cobra.Command{
		Use: "rolling-drain", Short: "Drain hosts one after the other, for example to reboot or to upgrade them",
		Long: `Drain hosts one after the other, in the order of their names. Each host is drained as by "trivet host drain --wait". Then
the command of --run is executed by the shell on this machine, and after it the host is uncordoned. {host} in the command
is replaced with the name of the host; the environment variables TRIVET_NODE and TRIVET_NODE_ID have its name and ID. With
--reboot-wait the host is uncordoned only when it has booted again, or when its agent has another version.

Without --run and --reboot-wait, the command waits after each drain until the host is uncordoned by "trivet host
uncordon".

The command stops at the first failure, and says at which host. That host stays as it is then, for example DRAINING or in
MAINTENANCE. With --from the command continues at this host. Other hosts that are CORDONED, DRAINING or in MAINTENANCE are
refused, because another operator may use them: exclude them by their labels, or uncordon them.`,
		Example: `  trivet cluster rolling-drain --run 'ssh root@{host} reboot' --reboot-wait 15m
  trivet cluster rolling-drain --label rack=7 --run './upgrade-agent {host}' --from host3`,
		Args: session.Exactly(),
	}
	r.drain.Add(c)
	c.Flags().StringArrayVar(&labels, "label", nil, "drain only hosts with this label, KEY=VALUE; can be repeated")
	c.Flags().StringVar(&r.from, "from", "", "the name of the host to begin with, in the order of the names")
	c.Flags().StringVar(&r.run, "run", "", "command that is executed when a host is in MAINTENANCE; {host} is the host's name")
	c.Flags().DurationVar(&r.rebootWait, "reboot-wait", 0, "wait for at most this time until the host has booted again or its agent has another version")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, _ []string) (err error) {
		if r.rebootWait < 0 {
			return session.Usagef("--reboot-wait %s: want a positive duration", r.rebootWait)
		}
		if _, err := r.drain.Request(""); err != nil {
			return err
		}
		if r.labels, err = session.Pairs("label", labels); err != nil {
			return err
		}
		ctx, end := s.Limit(ctx, 0)
		defer end()
		r.conn = conn
		return r.all(ctx)
	})
	return c
}

// rollingDrain is one run of `trivet cluster rolling-drain`.
type rollingDrain struct {
	s          *session.Session
	conn       *dial.Conn
	drain      node.DrainFlags
	labels     map[string]string
	from, run  string
	rebootWait time.Duration
}

// all drains the selected hosts.
func (r *rollingDrain) all(ctx context.Context) error {
	hosts, err := r.hosts(ctx)
	if err != nil {
		return err
	}
	for i, h := range hosts {
		r.s.Note("%s: host %d of %d", h.GetName(), i+1, len(hosts))
		if err := r.one(ctx, h); err != nil {
			return fmt.Errorf("stopped at host %s: %w; to continue, repeat the command with --from %s", h.GetName(), err, h.GetName())
		}
	}
	r.s.Note("%d hosts were drained", len(hosts))
	return nil
}

// hosts returns the selected hosts, sorted by name. It returns an error if one of them cannot be drained by this
// command.
func (r *rollingDrain) hosts(ctx context.Context) ([]*vmv1.Node, error) {
	hosts, err := node.All(ctx, r.conn)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(hosts, func(a, b *vmv1.Node) int {
		return cmp.Or(cmp.Compare(a.GetName(), b.GetName()), cmp.Compare(a.GetId(), b.GetId()))
	})
	if r.from != "" {
		at := slices.IndexFunc(hosts, func(n *vmv1.Node) bool { return n.GetName() == r.from })
		if at < 0 {
			return nil, session.Usagef("--from: there is no host named %q", r.from)
		}
		hosts = hosts[at:]
	}
	hosts = slices.DeleteFunc(hosts, func(n *vmv1.Node) bool {
		for k, v := range r.labels {
			if n.GetLabels()[k] != v {
				return true
			}
		}
		return false
	})
	if len(hosts) == 0 {
		return nil, fmt.Errorf("no host is selected")
	}
	for i, n := range hosts {
		if r.run != "" && !safeName.MatchString(n.GetName()) {
			return nil, fmt.Errorf("host %s (%s) has a name with special characters, which --run does not support", n.GetName(), n.GetId())
		}
		if i > 0 && n.GetName() == hosts[i-1].GetName() {
			return nil, fmt.Errorf("several hosts have the name %s", n.GetName())
		}
		switch n.GetState() {
		case vmv1.NodeState_NODE_STATE_CORDONED, vmv1.NodeState_NODE_STATE_DRAINING, vmv1.NodeState_NODE_STATE_MAINTENANCE:
		default:
			continue
		}
		if i == 0 && r.from != "" { // the host at which an earlier run stopped
			continue
		}
		// Another operator uses the host. It must not be uncordoned, and its drain must not be changed.
		state := strings.TrimPrefix(n.GetState().String(), "NODE_STATE_")
		return nil, fmt.Errorf("host %s is %s: uncordon it, or exclude it with --label", n.GetName(), state)
	}
	return hosts, nil
}

func (r *rollingDrain) get(ctx context.Context, n *vmv1.Node) (*operatorv1.GetDrainResponse, error) {
	return operatorv1.NewOperatorServiceClient(r.conn).GetDrain(ctx, &operatorv1.GetDrainRequest{NodeId: n.GetId()})
}

// one drains a host, executes the command, and uncordons the host.
func (r *rollingDrain) one(ctx context.Context, n *vmv1.Node) error {
	client := vmv1.NewNodeServiceClient(r.conn)
	before, err := r.get(ctx, n)
	if err != nil {
		return err
	}
	request, err := r.drain.Request(n.GetId())
	if err != nil {
		return err
	}
	if _, err := client.DrainNode(ctx, request); err != nil {
		return err
	}
	if err := node.AwaitDrained(ctx, r.s, r.conn, n.GetId(), n.GetName()); err != nil {
		return err
	}
	if r.run == "" && r.rebootWait == 0 {
		r.s.Note("%s is in MAINTENANCE: when your work is done, run `trivet host uncordon %s`", n.GetName(), n.GetName())
		return r.await(ctx, n, 0, "waiting until "+n.GetName()+" is uncordoned", func(now *vmv1.Node, _ *operatorv1.GetDrainResponse) bool {
			return now.GetState() == vmv1.NodeState_NODE_STATE_READY
		})
	}
	if r.run != "" {
		if err := r.execute(ctx, n); err != nil {
			return err
		}
	}
	limit, waiting := readyWait, "waiting until "+n.GetName()+" answers"
	if r.rebootWait > 0 {
		limit, waiting = r.rebootWait, "waiting until "+n.GetName()+" has booted again"
	}
	if err := r.await(ctx, n, limit, waiting, func(now *vmv1.Node, d *operatorv1.GetDrainResponse) bool {
		again := d.GetBootId() != before.GetBootId() || now.GetAgentVersion() != n.GetAgentVersion()
		return now.GetState() == vmv1.NodeState_NODE_STATE_MAINTENANCE && (again || r.rebootWait == 0)
	}); err != nil {
		return err
	}
	if _, err := client.UncordonNode(ctx, &vmv1.UncordonNodeRequest{NodeId: n.GetId()}); err != nil {
		return err
	}
	r.s.Note("%s is uncordoned", n.GetName())
	return nil
}

// execute executes the command of --run for a host. The output of the command goes to standard error.
func (r *rollingDrain) execute(ctx context.Context, n *vmv1.Node) error {
	c := exec.CommandContext(ctx, "sh", "-c", strings.ReplaceAll(r.run, "{host}", n.GetName()))
	c.Stdout, c.Stderr = r.s.Stderr, r.s.Stderr
	c.Env = append(os.Environ(), "TRIVET_NODE="+n.GetName(), "TRIVET_NODE_ID="+n.GetId())
	if err := c.Run(); err != nil {
		return fmt.Errorf("the command of --run has failed: %w", err)
	}
	return nil
}

// await waits until done returns true for a host, for at most limit. A limit of 0 means no limit.
func (r *rollingDrain) await(ctx context.Context, n *vmv1.Node, limit time.Duration, text string, done func(*vmv1.Node, *operatorv1.GetDrainResponse) bool) error {
	if limit > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, limit, fmt.Errorf("%s has taken longer than %s", text, limit))
		defer cancel()
	}
	return r.s.Wait(text, func(progress func(string)) error {
		for {
			now, err := vmv1.NewNodeServiceClient(r.conn).GetNode(ctx, &vmv1.GetNodeRequest{NodeId: n.GetId()})
			var d *operatorv1.GetDrainResponse
			if err == nil {
				d, err = r.get(ctx, n)
			}
			switch {
			case ctx.Err() != nil:
				return context.Cause(ctx)
			case status.Code(err) == codes.Unavailable: // the host may run a member that restarts with it
				progress(text + ": " + status.Convert(err).Message())
			case err != nil:
				return err
			case done(now, d):
				return nil
			default:
				progress(text + ": it is " + show.Enum("NODE_STATE", now.GetState()))
			}
			select {
			case <-time.After(hostPoll):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
	})
}
