package uplink

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// answerWithin bounds a call that changes something on the control plane.
const answerWithin = 10 * time.Second

// refusals of a Join are final: asking again with the same token and name would get the same answer.
var refusals = map[codes.Code]bool{
	codes.InvalidArgument: true, codes.Unauthenticated: true, codes.PermissionDenied: true, codes.NotFound: true,
	codes.AlreadyExists: true, codes.Unimplemented: true,
}

// join gets a certificate if there is none, or the host is to leave the cluster of the one that it has. It asks member
// after member until one answers.
func (l *Link) join(ctx context.Context) error {
	if c := l.identity.credential(); c != nil {
		if leaves, err := l.leaves(c); !leaves {
			return err
		}
		l.o.Log.Warn("leaving the cluster for that of the join token", "cluster", c.cluster, "node", c.node)
	}
	var r route
	for {
		addr := r.next(l.members())
		err := l.joinAt(ctx, addr)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case refusals[code(err)] || errors.Is(err, errToken) || errors.Is(err, errKeep):
			return err
		}
		l.o.Log.Warn("not joined yet", "member", addr, "err", err)
		r.missed(err)
		if err := r.wait(ctx, len(l.members())); err != nil {
			return err
		}
	}
}

// errToken wraps what is wrong with the token on our side.
var errToken = errors.New("no join token that could be used (`trivet node token` makes one)")

// leaves says whether the host is to leave the cluster of its certificate: it was told to, and holds a token of another.
// Told so once more afterwards it does nothing, so that the word may stay where it was written. A token alone is not
// enough: one that came to a host by mistake would take its guests out of a cloud that lives.
func (l *Link) leaves(c *credential) (bool, error) {
	if l.o.Leave != c.cluster {
		return false, nil
	}
	token, err := l.o.Token()
	if err != nil {
		return false, fmt.Errorf("%w: %w", errToken, err)
	}
	pin, err := pinOf(token)
	if err != nil {
		return false, fmt.Errorf("%w: %w", errToken, err)
	}
	if c.names(pin) {
		return false, fmt.Errorf("%w: leave-cluster: the join token is of cluster %s itself", errToken, c.cluster)
	}
	return true, nil
}

// errKeep wraps what is wrong with our directory: a certificate that cannot be kept is of no use.
var errKeep = errors.New("cannot keep the host's identity")

func (l *Link) joinAt(ctx context.Context, addr string) error {
	token, err := l.o.Token()
	if err != nil {
		return fmt.Errorf("%w: %w", errToken, err)
	}
	pin, err := pinOf(token)
	if err != nil {
		return fmt.Errorf("%w: %w", errToken, err)
	}
	csr, err := l.identity.request()
	if err != nil {
		return err
	}
	conn, err := dial(addr, mtls.ClientPinned(pin))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	answer, err := agentv1.NewAgentServiceClient(conn).Join(ctx, &agentv1.JoinRequest{
		Protocol: Protocol, Token: token, Csr: csr, Name: l.o.Name,
	})
	if err != nil {
		return fmt.Errorf("join: %w", err)
	}
	l.handing.Lock()
	defer l.handing.Unlock()
	if had := l.identity.credential(); had == nil || !had.names(pin) || string(had.node) != answer.GetNodeId() {
		if err := l.kept.forget(); err != nil {
			return fmt.Errorf("%w: %w", errKeep, err)
		}
		l.stored, l.assembly = nil, assembly{}
		if had != nil {
			l.o.Assign(Assignment{}) // no wish of the other outlives it
		}
	}
	if err := l.identity.take(answer, pin); err != nil {
		return fmt.Errorf("%w: %w", errKeep, err)
	}
	l.o.Log.Info("joined", "cluster", l.identity.credential().cluster, "node", answer.GetNodeId())
	return nil
}

// revive gets a new certificate for a host that was away until its own ran out: within the control plane's grace by the
// old one, later only by a new token.
func (l *Link) revive(ctx context.Context, agent agentv1.AgentServiceClient, addr string) error {
	if time.Since(l.renewed) < renewAgain {
		return errClock
	}
	renewal := l.renewNow(ctx, agent)
	if renewal == nil {
		return nil
	}
	if err := l.rejoin(ctx, addr); err != nil {
		return fmt.Errorf("the host's certificate ran out at %s: %w; %w", l.identity.credential().cert.Leaf.NotAfter.Format(time.RFC3339), renewal, err)
	}
	return nil
}

// rejoin is joinAt for a host that stays in its cluster.
func (l *Link) rejoin(ctx context.Context, addr string) error {
	token, err := l.o.Token()
	if err != nil {
		return fmt.Errorf("%w: %w", errToken, err)
	}
	if pin, err := pinOf(token); err == nil && !l.identity.credential().names(pin) {
		return fmt.Errorf("%w: the one that is set is of another cluster", errToken)
	}
	return l.joinAt(ctx, addr)
}

// errClock is what remains when a certificate is over as soon as it is given.
var errClock = errors.New("the certificate that the control plane has just given is over already: is this host's clock right?")

// errRenewed ends a session whose certificate was renewed: a connection shows the one that it was made with.
var errRenewed = errors.New("the certificate was renewed")

// renewAgain is the least time between two renewals, and between two attempts. Half of a certificate's life is left when
// one is due.
const renewAgain = time.Minute

// renew waits until half of the certificate's life is over, gets a new one, and returns errRenewed.
func (l *Link) renew(ctx context.Context, agent agentv1.AgentServiceClient) error {
	for {
		wait := max(time.Until(l.identity.credential().renewAt()), renewAgain-time.Since(l.renewed))
		due := time.NewTimer(wait)
		select {
		case <-due.C:
		case <-ctx.Done():
			due.Stop()
			return ctx.Err()
		}
		err := l.renewNow(ctx, agent)
		if err == nil {
			return errRenewed
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		l.o.Log.Warn("certificate not renewed yet", "until", l.identity.credential().cert.Leaf.NotAfter, "err", err)
		select {
		case <-time.After(renewAgain):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (l *Link) renewNow(ctx context.Context, agent agentv1.AgentServiceClient) error {
	csr, err := l.identity.request()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	answer, err := agent.Renew(ctx, &agentv1.RenewRequest{Csr: csr})
	if err != nil {
		return fmt.Errorf("renew certificate: %w", err)
	}
	l.renewed = time.Now()
	return l.identity.take(answer, "")
}
