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
	// User is the token's principal, for maxDenials. It is empty where the principal is not known (an administrator names a
	// token by its ID) or not counted (only a holder of the cluster key makes the administrator's tokens), and in denials
	// of former versions.
	User cloud.UserID `cbor:",omitempty"`
}

// denialOf is the denial of a caller's own token.
func denialOf(c *cloud.Caller) denial {
	d := denial{Token: c.TokenID, Until: c.Expires}
	if c.Proof != cloud.ProofHostKey {
		d.User = c.User
	}
	return d
}

// maxDenials is how many denials of one principal are kept. The next one ends all tokens of the principal instead, which
// takes no record, and the denials are removed.
const maxDenials = 1000

// denied is the answer of a denial. AllEnded is set when all tokens of the principal were ended for it.
type denied struct{ AllEnded bool }

var (
	denials = store.NewTable[denial]("denied")
	// overDenials are denials by when they may be forgotten: denied-until/<16 hexadecimal digits>/<id>.
	overDenials = store.NewTable[struct{}]("denied-until")
	// userDenials are the denials of a principal: denied-user/<user>/<token's ID>.
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

// endAll ends all tokens of the denial's principal when there are maxDenials already, and removes these: each of them is
// of an earlier epoch now. It reports whether it did.
func (d denial) endAll(tx *store.Tx) (bool, error) {
	had, _, err := userDenials.List(tx, maxDenials, string(d.User))
	if err != nil || len(had) < maxDenials {
		return false, err
	}
	// A principal that was deleted meanwhile has no valid tokens, and would not have them back under the same ID.
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

// remove forgets a denial.
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
