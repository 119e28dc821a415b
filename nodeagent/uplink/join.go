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

// callTimeout is the timeout of a call that changes something on the control plane.
const callTimeout = 10 * time.Second

// finalCodes holds the gRPC codes of a Join after which it is not retried, because the same token and name would fail
// again.
var finalCodes = map[codes.Code]bool{
	codes.InvalidArgument: true, codes.Unauthenticated: true, codes.PermissionDenied: true, codes.NotFound: true,
	codes.AlreadyExists: true, codes.Unimplemented: true,
}

// join joins a cluster if the host has no certificate, or if it must leave the cluster of its certificate. It tries one
// member after the other until one has issued a certificate or an error is final.
func (l *Link) join(ctx context.Context) error {
	if c := l.identity.credential(); c != nil {
		if leaves, err := l.mustLeave(c); !leaves {
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
		case finalCodes[code(err)] || errors.Is(err, errToken) || errors.Is(err, errStoreIdentity):
			return err
		}
		l.o.Log.Warn("not joined yet", "member", addr, "err", err)
		r.failed(err)
		if err := r.wait(ctx, len(l.members())); err != nil {
			return err
		}
	}
}

// errToken is wrapped by errors of a join token that is missing or cannot be used.
var errToken = errors.New("no usable join token (`trivet host token` makes one)")

// mustLeave reports whether the host must leave the cluster of its certificate. It must if Options.Leave is the id of
// that cluster and the join token is of another cluster. After the host has left, the option has no effect, so that it
// may stay in the configuration. Another token alone is not enough: a token that is placed on the wrong host by mistake
// would remove the host's guests from a working cloud.
func (l *Link) mustLeave(c *credential) (bool, error) {
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
	if c.matchesPin(pin) {
		return false, fmt.Errorf("%w: leave-cluster: the join token is of cluster %s itself", errToken, c.cluster)
	}
	return true, nil
}

// errStoreIdentity is wrapped by errors of writing to Options.Dir. A certificate that cannot be stored must not be
// used.
var errStoreIdentity = errors.New("cannot store the host's identity")

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
	conn, err := l.dial(addr, mtls.ClientPinned(pin))
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := agentv1.NewAgentServiceClient(conn).Join(ctx, &agentv1.JoinRequest{
		Protocol: Protocol, Token: token, Csr: csr, Name: l.o.Name,
	})
	if err != nil {
		return fmt.Errorf("join: %w", err)
	}
	// The credential is verified before anything is changed: after an invalid credential, the host keeps its identity
	// and its assignment.
	if _, err := l.identity.verify(answer, pin); err != nil {
		return fmt.Errorf("join: %w", err)
	}
	l.deliverMu.Lock()
	defer l.deliverMu.Unlock()
	if previous := l.identity.credential(); previous == nil || !previous.matchesPin(pin) || string(previous.node) != answer.GetNodeId() {
		if err := l.disk.clear(); err != nil {
			return fmt.Errorf("%w: %w", errStoreIdentity, err)
		}
		l.stored, l.assembly, l.networks.term = nil, assembly{}, 0
		if previous != nil {
			l.o.Assign(Assignment{}) // ends the assignment of the node that this host was before
		}
	}
	if err := l.identity.accept(answer, pin); err != nil {
		return fmt.Errorf("%w: %w", errStoreIdentity, err)
	}
	l.o.Log.Info("joined", "cluster", l.identity.credential().cluster, "node", answer.GetNodeId())
	return nil
}

// renewExpired gets a new certificate for a host whose certificate expired while it was offline. It first requests one
// with the expired certificate, which the control plane accepts within a grace period. If that fails, it joins again
// with the join token.
func (l *Link) renewExpired(ctx context.Context, agent agentv1.AgentServiceClient, addr string) error {
	if time.Since(l.renewed) < minRenewInterval {
		return errClock
	}
	renewal := l.renewNow(ctx, agent)
	if renewal == nil {
		return nil
	}
	if err := l.rejoin(ctx, addr); err != nil {
		return fmt.Errorf("the host's certificate expired at %s: %w; %w", l.identity.credential().cert.Leaf.NotAfter.Format(time.RFC3339), renewal, err)
	}
	return nil
}

// rejoin joins at the member with the address addr. It returns an error if the join token is of another cluster than
// the host's.
func (l *Link) rejoin(ctx context.Context, addr string) error {
	token, err := l.o.Token()
	if err != nil {
		return fmt.Errorf("%w: %w", errToken, err)
	}
	if pin, err := pinOf(token); err == nil && !l.identity.credential().matchesPin(pin) {
		return fmt.Errorf("%w: the one that is set is of another cluster", errToken)
	}
	return l.joinAt(ctx, addr)
}

// errClock means that a certificate has expired right after it was issued.
var errClock = errors.New("the certificate that the control plane has just issued has already expired: is this host's clock right?")

// errRenewed is the error of a session that ended because the certificate was renewed. A connection keeps its old
// certificate, so a new connection must be opened.
var errRenewed = errors.New("the certificate was renewed")

// minRenewInterval is the minimum time between two renewals, and between two attempts. A renewal is due when half of
// the certificate's lifetime is left.
const minRenewInterval = time.Minute

// renew waits until half of the certificate's lifetime is over, gets a new certificate, and returns errRenewed. If a
// renewal fails, it tries again after minRenewInterval.
func (l *Link) renew(ctx context.Context, agent agentv1.AgentServiceClient) error {
	for {
		wait := max(time.Until(l.identity.credential().renewAt()), minRenewInterval-time.Since(l.renewed))
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
		case <-time.After(minRenewInterval):
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
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, err := agent.Renew(ctx, &agentv1.RenewRequest{Csr: csr})
	if err != nil {
		return fmt.Errorf("renew certificate: %w", err)
	}
	l.renewed = time.Now()
	return l.identity.accept(answer, "")
}
