package identity

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/token"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// denial is the record of a revoked token: denied/<token ID>. The record is removed when the token has expired even by
// the slowest clock of a member.
type denial struct {
	Token string
	Until cloud.Time
	// User is the token's principal; maxDenials limits the denials of each principal. User is empty in three cases: an
	// administrator revoked the token by its ID, so the principal is unknown; the token was signed with the host key,
	// and such denials are not counted; or an earlier version wrote the record.
	User cloud.UserID `cbor:",omitempty"`
	// Org is the org of the service account that the token belonged to; maxOrgDenials limits the denials of each org.
	// Org is empty if the token belonged to a user.
	Org cloud.OrgID `cbor:",omitempty"`
}

// denialOf returns the denial that revokes the token with which the caller c authenticated.
func denialOf(c *cloud.Caller) denial {
	d := denial{Token: c.TokenID, Until: c.Expires}
	if c.Proof != cloud.ProofHostKey {
		d.User = c.User
	}
	if c.Proof == cloud.ProofAppCred {
		d.Org = c.Scope.Org
	}
	return d
}

// maxDenials is the maximum number of stored denials of one principal. At the maximum, the next denial revokes all
// tokens of the principal by incrementing the principal's epoch. The stored denials are then removed.
const maxDenials = 1000

// maxOrgDenials is the maximum number of stored denials of all service accounts of one org together. It exists because
// an org can create any number of accounts over time. At the maximum, the next denial revokes all tokens of the service
// account, as for maxDenials.
const maxOrgDenials = 20_000

// denied is the result of the command that revokes one token. AllEnded is true if the command revoked all tokens of the
// principal instead.
type denied struct{ AllEnded bool }

var (
	// denials holds the revoked tokens: denied/<token ID>.
	denials = store.NewTable[denial]("denied")
	// overDenials indexes denials by Until, the time after which they are removed: denied-until/<Unix milliseconds as
	// 16 hexadecimal digits>/<token ID>.
	overDenials = store.NewTable[struct{}]("denied-until")
	// userDenials indexes denials by principal: denied-user/<user>/<token ID>.
	userDenials = store.NewTable[struct{}]("denied-user")
	// orgDenials counts the stored denials of each org's service accounts: denied-org/<org>.
	orgDenials = store.NewTable[uint64]("denied-org")
)

// put stores the denial of a token. If the principal or its org has too many denials, put revokes all tokens of the
// principal instead (see endAll). If a denial of the same token with the same or a later Until is stored already, put
// changes nothing.
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
		if err := had.remove(tx); err != nil {
			return denied{}, err
		}
		if d.User == "" {
			d.User, d.Org = had.User, had.Org
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
	return denied{}, d.count(tx, 1)
}

// count adds n to the number of stored denials of the org in d. If d has no org, count does nothing.
func (d *denial) count(tx *store.Tx, n int) error {
	if d.Org == "" {
		return nil
	}
	stored, err := orgDenials.Get(tx, string(d.Org))
	if err != nil {
		return err
	}
	sum := int64(n)
	if stored != nil {
		sum += int64(*stored)
	}
	if sum <= 0 {
		orgDenials.Delete(tx, string(d.Org))
		return nil
	}
	now := uint64(sum)
	orgDenials.Put(tx, &now, string(d.Org))
	return nil
}

// orgIsFull reports whether the denial's org has maxOrgDenials stored denials.
func (d *denial) orgIsFull(tx *store.Tx) (bool, error) {
	if d.Org == "" {
		return false, nil
	}
	stored, err := orgDenials.Get(tx, string(d.Org))
	return stored != nil && *stored >= maxOrgDenials, err
}

// endAll does nothing and returns false if the principal has fewer than maxDenials denials and its org has fewer than
// maxOrgDenials. Otherwise it revokes all tokens of the principal, removes the principal's denials, which are no longer
// needed, and returns true.
func (d denial) endAll(tx *store.Tx) (bool, error) {
	full, err := d.orgIsFull(tx)
	if err != nil {
		return false, err
	}
	had, _, err := userDenials.List(tx, maxDenials, string(d.User))
	if err != nil || len(had) < maxDenials && !full {
		return false, err
	}
	// Ignore NotFound: if the principal was deleted meanwhile, its tokens are invalid already. They stay invalid if a
	// new principal gets the same ID.
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
			if err := one.remove(tx); err != nil {
				return false, err
			}
		}
	}
	return true, nil
}

// remove deletes a denial and its index entries, and decrements the number of denials of its org.
func (d *denial) remove(tx *store.Tx) error {
	denials.Delete(tx, d.Token)
	overDenials.Delete(tx, until(d.Until), d.Token)
	if d.User != "" {
		userDenials.Delete(tx, string(d.User), d.Token)
	}
	return d.count(tx, -1)
}

// forgetAtOnce is the maximum number of denials that one transaction of forgetDenied removes.
const forgetAtOnce = 1000

// forgetDenied removes the denials of expired tokens.
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
					if err := d.remove(tx); err != nil {
						return err
					}
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

// until returns the time at as 16 hexadecimal digits. As a part of a key, they make earlier times sort first.
func until(at cloud.Time) string { return fmt.Sprintf("%016x", max(at, 0)) }
