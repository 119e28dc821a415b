package identity

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// denial is a token that was revoked: denied/<its id>. It stays until the token has ended on every member's clock.
type denial struct {
	Token string
	Until cloud.Time
}

var (
	denials = store.NewTable[denial]("denied")
	// overDenials are denials by when they may be forgotten: denied-until/<16 hexadecimal digits>/<id>.
	overDenials = store.NewTable[struct{}]("denied-until")
)

// put denies a token.
func (d denial) put(tx *store.Tx) error {
	d.Until += token.Leeway.Milliseconds()
	had, err := denials.Get(tx, d.Token)
	if err != nil {
		return err
	}
	if had != nil {
		if had.Until >= d.Until {
			return nil
		}
		overDenials.Delete(tx, until(had.Until), d.Token)
	}
	denials.Put(tx, &d, d.Token)
	overDenials.Put(tx, &struct{}{}, until(d.Until), d.Token)
	return nil
}

// forgetAtOnce bounds the denials that a transaction forgets.
const forgetAtOnce = 1000

// forgetDenied removes the denials of tokens that have ended.
func forgetDenied(ctx context.Context, s *store.Store) error {
	for more := true; more; {
		_, err := s.Update(ctx, func(tx *store.Tx) error {
			more = false
			over, rest, err := overDenials.List(tx.Unguarded(), forgetAtOnce)
			if err != nil {
				return err
			}
			for _, r := range over {
				if r.Path[0] > until(tx.Now()) {
					return nil
				}
				denials.Delete(tx, r.Path[1])
				overDenials.Delete(tx, r.Path...)
			}
			more = rest
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func until(at cloud.Time) string { return fmt.Sprintf("%016x", max(at, 0)) }
