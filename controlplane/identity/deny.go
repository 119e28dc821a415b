package identity

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// denial is a token that was revoked: denied/<its id>. It stays until the token has ended on every member's clock.
type denial struct {
	Token string
	Until cloud.Time
	// User is the token's principal, counted for maxDenials. It is empty if the principal is unknown (an administrator
	// revoked a token by its ID) or not counted (tokens made with the cluster key), and in records of former versions.
	User cloud.UserID `cbor:",omitempty"`
}

// denialOf returns the denial that revokes a caller's own token.
func denialOf(c *cloud.Caller) denial {
	d := denial{Token: c.TokenID, Until: c.Expires}
	if c.Proof != cloud.ProofHostKey {
		d.User = c.User
	}
	return d
}

// maxDenials bounds the stored denials of one principal. The next denial instead revokes all tokens of the principal,
// by raising its epoch, and removes the stored denials.
const maxDenials = 1000

// denied is the answer of the command that denies a token. AllEnded is set if it revoked all tokens of the principal.
type denied struct{ AllEnded bool }

var (
	denials = store.NewTable[denial]("denied")
	// overDenials are denials by when they may be forgotten: denied-until/<16 hexadecimal digits>/<id>.
	overDenials = store.NewTable[struct{}]("denied-until")
	// userDenials indexes denials by principal: denied-user/<user>/<token's ID>.
	userDenials = store.NewTable[struct{}]("denied-user")
)

// put denies a token.
func (d denial) put(tx *store.Tx) (denied, error) {
	d.Until += token.Leeway.Milliseconds()
	had, err := denials.Get(tx, d.Token)
	if err != nil {
		return denied{}, err
	}
	if had != nil {
		if had.Until >= d.Until {
			return denied{}, nil
		}
		had.remove(tx)
		if d.User == "" {
			d.User = had.User
		}
	}
	if d.User != "" {
		full, err := d.endAll(tx)
		if err != nil || full {
			return denied{AllEnded: full}, err
		}
		userDenials.Put(tx, &struct{}{}, string(d.User), d.Token)
	}
	denials.Put(tx, &d, d.Token)
	overDenials.Put(tx, &struct{}{}, until(d.Until), d.Token)
	return denied{}, nil
}

// endAll revokes all tokens of the denial's principal if the principal has maxDenials denials already, and removes
// these: their tokens now have an old epoch. It reports whether it did.
func (d denial) endAll(tx *store.Tx) (bool, error) {
	had, _, err := userDenials.List(tx, maxDenials, string(d.User))
	if err != nil || len(had) < maxDenials {
		return false, err
	}
	// The tokens of a principal that was deleted meanwhile are invalid already, also for a new principal of the same
	// ID.
	if _, err := principal.Revoke(tx, d.User); err != nil && !fault.Is(err, fault.NotFound) {
		return false, err
	}
	for _, r := range had {
		userDenials.Delete(tx, r.Path...)
		one, err := denials.Get(tx, r.Path[1])
		if err != nil {
			return false, err
		}
		if one != nil {
			one.remove(tx)
		}
	}
	return true, nil
}

// remove deletes a denial with its index entry.
func (d *denial) remove(tx *store.Tx) {
	denials.Delete(tx, d.Token)
	overDenials.Delete(tx, until(d.Until), d.Token)
	if d.User != "" {
		userDenials.Delete(tx, string(d.User), d.Token)
	}
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
				d, err := denials.Get(tx.Unguarded(), r.Path[1])
				if err != nil {
					return err
				}
				if d != nil {
					d.remove(tx)
				}
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
