package uplink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// snapshotTimeout is the maximum time until a member sends the next message of a snapshot. After the snapshot,
// heartbeats detect a dead member.
const snapshotTimeout = 5 * time.Second

var (
	errSilent     = errors.New("the member accepted the connection but sent nothing")
	errWatchEnded = errors.New("the member ended the watch")
)

// foreignClusterError means that a member of another cluster responded at a known member's address: the cluster was
// recreated, from a backup or from one member's data, or the address now belongs to another cluster.
type foreignClusterError struct{ own, other string }

func (e *foreignClusterError) Error() string {
	return fmt.Sprintf("this is a member of cluster %s, but this host belongs to cluster %s: if that one is lost and %s was restored from its backup,  "+
		"replace the join token by one of `trivet host token` there, and start the agent with --leave-cluster %s; guests keep running meanwhile",
		e.other, e.own, e.other, e.own)
}

// session connects to the member at addr, and receives assignments and sends reports and heartbeats until any of these
// fails. The error is never nil.
func (l *Link) session(ctx context.Context, addr string) error {
	credential := l.identity.credential()
	var other atomic.Pointer[string]
	conn, err := l.dial(addr, credential.clientReporting(func(cluster string) { other.Store(&cluster) }))
	if err != nil {
		return err
	}
	defer conn.Close()
	err = l.sessionOn(ctx, conn, credential, addr)
	if cluster := other.Load(); cluster != nil && !errors.Is(err, errRenewed) {
		return &foreignClusterError{credential.cluster, *cluster}
	}
	return err
}

func (l *Link) sessionOn(ctx context.Context, conn *grpc.ClientConn, credential *credential, addr string) error {
	agent := agentv1.NewAgentServiceClient(conn)
	if credential.expired(time.Now()) {
		if err := l.renewExpired(ctx, agent, addr); err != nil {
			return err
		}
		return errRenewed
	}
	group, ctx := errgroup.WithContext(ctx)
	defer l.consoles.cancelAll()
	defer l.consoleStreams.cancelAll()
	defer l.snapshots.cancelAll()
	defer l.guests.cancelAll()
	group.Go(func() error {
		return l.watch(ctx, agent, func(lasts time.Duration) {
			if l.o.Connected != nil {
				l.o.Connected()
			}
			l.connected(conn, addr)
			l.o.Log.Info("connected", "member", addr, "node", l.Node())
			l.consoles.setSession(ctx, agent)
			l.consoleStreams.setSession(ctx, agent)
			l.snapshots.setSession(ctx, agent)
			l.guests.setSession(ctx, agent)
			group.Go(func() error { return l.report(ctx, agent) })
			group.Go(func() error { return l.syncNetworks(ctx, agent) })
			group.Go(func() error { return l.sendHeartbeats(ctx, vmv1.NewNodeServiceClient(conn), lasts) })
			group.Go(func() error { return l.renew(ctx, agent) })
		})
	})
	return group.Wait()
}

// watch receives assignments from a member and delivers them until the stream ends. After the first message it calls
// accepted once, with the duration of a lease. Only the leader sends a first message, so that the session is then with
// the leader.
func (l *Link) watch(ctx context.Context, agent agentv1.AgentServiceClient, accepted func(lasts time.Duration)) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	silence := time.AfterFunc(snapshotTimeout, func() { cancel(errSilent) })
	defer silence.Stop()
	request := &agentv1.WatchRequest{Protocol: Protocol, AgentVersion: l.o.Version}
	for _, id := range l.o.Present() {
		request.PresentVms = append(request.PresentVms, string(id))
	}
	stream, err := agent.Watch(ctx, request)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	l.assembly.begin()
	for first := true; ; first = false {
		m, err := stream.Recv()
		switch {
		case errors.Is(context.Cause(ctx), errSilent):
			return errSilent
		case errors.Is(err, io.EOF):
			return errWatchEnded
		case err != nil:
			return fmt.Errorf("watch: %w", err)
		}
		assignment, err := l.assembly.add(m)
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		l.disk.raiseTerm(m.GetTerm())
		if first {
			accepted(time.Duration(m.GetLeaseSeconds()) * time.Second)
		}
		if l.assembly.complete {
			silence.Stop()
		} else {
			silence.Reset(snapshotTimeout)
		}
		if assignment != nil {
			l.deliver(assignment)
		}
		for _, r := range m.GetConsoleRequests() {
			l.sendConsole(r)
		}
		for _, r := range m.GetOpenConsoles() {
			l.openConsole(r)
		}
		for _, r := range m.GetSnapshotRequests() {
			l.sendSnapshot(r)
		}
		for _, r := range m.GetGuestRequests() {
			l.callGuest(r)
		}
	}
}
