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
	// tokenEvery is how often a host that was put out of its cluster looks whether it has been given another token.
	tokenEvery = 2 * time.Second
	// pardonEvery is how often one that is banned asks whether it still is.
	pardonEvery = time.Minute
)

// Reasons of refusals by members of our own cluster: their certificates prove that they may say so.
const (
	evicted = "NODE_EVICTED"
	banned  = "NODE_BANNED"
)

// putOut is the reason for which the cluster no longer talks to this host, empty when it does.
func putOut(err error) string {
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

// outside waits until the host is in its cluster again, by a token that has not been tried, or, banned, for the time to
// ask again. Meanwhile nobody is asked anything. What is here stays as it is; an assignment on disk is no longer word of
// ours.
func (l *Link) outside(ctx context.Context, why string) error {
	l.handing.Lock()
	l.stored = nil
	l.handing.Unlock()
	if why != l.out {
		l.out = why
		if why == banned {
			l.o.Log.Error("this host is banned from its cluster: it is told nothing until `trivet node unban`; guests run on", "node", l.Node())
		} else {
			l.o.Log.Error("this host was evicted from its cluster: it asks no more until its join token is replaced by one of `trivet node token`; guests run on",
				"node", l.Node())
		}
	}
	look := time.NewTicker(tokenEvery)
	defer look.Stop()
	var pardon <-chan time.Time
	if why == banned {
		t := time.NewTimer(pardonEvery)
		defer t.Stop()
		pardon = t.C
	}
	for {
		if in, err := l.tryToken(ctx); in || err != nil {
			return err
		}
		select {
		case <-look.C:
		case <-pardon:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// tryToken joins with the token that there is, unless it was tried. An error is that of a certificate which cannot be kept,
// or of ctx.
func (l *Link) tryToken(ctx context.Context) (in bool, err error) {
	token, err := l.o.Token()
	if err != nil || token == l.tried {
		return false, nil // it may come
	}
	if pin, err := pinOf(token); err != nil || !l.identity.credential().names(pin) {
		l.tried = token
		l.o.Log.Warn("the join token is not one of this host's cluster")
		return false, nil
	}
	for _, addr := range l.members() {
		err := l.joinAt(ctx, addr)
		switch {
		case err == nil:
			l.tried, l.out = token, ""
			return true, nil
		case ctx.Err() != nil:
			return false, ctx.Err()
		case errors.Is(err, errKeep):
			return false, err
		case refusals[code(err)]:
			l.tried = token
			l.o.Log.Warn("the join token was refused", "member", addr, "err", err)
			return false, nil
		}
	}
	return false, nil // nobody answered; the same token is tried again
}
