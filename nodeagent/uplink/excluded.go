package uplink

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const (
	// tokenPollInterval is the interval at which an evicted or banned host checks whether its token has changed.
	tokenPollInterval = 2 * time.Second
	// bannedRetryInterval is the interval at which a banned host retries its session.
	bannedRetryInterval = time.Minute
)

// Error reasons of an evicted and of a banned host. They can be trusted: the members of the host's own cluster that
// send them are authenticated by their certificates.
const (
	evicted = "NODE_EVICTED"
	banned  = "NODE_BANNED"
)

// exclusionReason returns the reason for which the cluster refuses this host (evicted or banned), or "" if err is
// another error.
func exclusionReason(err error) string {
	var g interface{ GRPCStatus() *status.Status }
	if !errors.As(err, &g) || g.GRPCStatus().Code() != codes.PermissionDenied {
		return ""
	}
	for _, d := range g.GRPCStatus().Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && (info.GetReason() == evicted || info.GetReason() == banned) {
			return info.GetReason()
		}
	}
	return ""
}

// waitExcluded waits after the cluster has evicted or banned this host; reason says which. It returns nil once the host
// has joined again with a token that was not tried before. If the host is banned, it also returns nil after
// bannedRetryInterval, so that the caller retries the session. During the wait the host contacts a member only to try a
// new token, changes no VMs, and does not use the assignment on disk.
func (l *Link) waitExcluded(ctx context.Context, reason string) error {
	l.deliverMu.Lock()
	l.stored = nil
	l.deliverMu.Unlock()
	if reason != l.exclusion {
		l.exclusion = reason
		if reason == banned {
			l.o.Log.Error("this host is banned from its cluster: members refuse it until `trivet host unban`; guests keep running", "node", l.Node())
		} else {
			l.o.Log.Error("this host was evicted from its cluster: it contacts no member until its join token is replaced by a new one of `trivet host token`; guests keep running",
				"node", l.Node())
		}
	}
	poll := time.NewTicker(tokenPollInterval)
	defer poll.Stop()
	var pardon <-chan time.Time
	if reason == banned {
		t := time.NewTimer(bannedRetryInterval)
		defer t.Stop()
		pardon = t.C
	}
	for {
		if in, err := l.tryToken(ctx); in || err != nil {
			return err
		}
		select {
		case <-poll.C:
		case <-pardon:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tryToken joins with the current token. It does nothing if that token was tried before. The result in is true if the
// host has joined. The error is not nil only if the certificate cannot be stored or ctx ends.
func (l *Link) tryToken(ctx context.Context) (in bool, err error) {
	token, err := l.o.Token()
	if err != nil || token == l.triedToken {
		return false, nil // the token may be replaced later
	}
	if pin, err := pinOf(token); err != nil || !l.identity.credential().matchesPin(pin) {
		l.triedToken = token
		l.o.Log.Warn("the join token belongs to another cluster than this host")
		return false, nil
	}
	for _, addr := range l.members() {
		err := l.joinAt(ctx, addr)
		switch {
		case err == nil:
			l.triedToken, l.exclusion = token, ""
			return true, nil
		case ctx.Err() != nil:
			return false, ctx.Err()
		case errors.Is(err, errStoreIdentity):
			return false, err
		case finalCodes[code(err)]:
			l.triedToken = token
			l.o.Log.Warn("the join token was refused", "member", addr, "err", err)
			return false, nil
		}
	}
	return false, nil // no member responded, so the next call tries the same token again
}
