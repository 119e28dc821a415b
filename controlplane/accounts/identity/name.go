package identity

import (
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity/principal"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Limits of the names that callers may register without a token. maxOpenNames is the maximum number of such names that
// exist at the same time. nameBurst is how many one member accepts without a pause; then it accepts one per namesEvery.
const (
	maxOpenNames = 100_000
	namesEvery   = 50 * time.Millisecond
	nameBurst    = 1000
)

// openNames counts the existing names that unauthenticated callers registered, in the record open-names/all.
var openNames = store.NewTable[uint64]("open-names")

// nameGate limits the rate at which unauthenticated callers can register names on this member.
type nameGate struct{ limit *rate.Limiter }

func newNameGate() nameGate { return nameGate{rate.NewLimiter(rate.Every(namesEvery), nameBurst)} }

func (g nameGate) pass(now time.Time) error {
	if !g.limit.AllowN(now, 1) {
		return fault.New(fault.ResourceExhausted, "too many names are being registered; try again in a moment").MayRetry()
	}
	return nil
}

var createUserCommand = newCommand("create-user", leader.Keyed, (*Service).createUserOnLeader)

// createUserOnLeader creates a user. If q.Open is true, the name counts in openNames; if there are maxOpenNames such
// names, createUserOnLeader returns ResourceExhausted. If q.Open is false, it first deletes an existing user with the
// same ID that is only an unused name (see dropUnused).
func (s *Service) createUserOnLeader(tx *store.Tx, q newName) (principal.User, error) {
	if q.Open {
		count, err := openNames.Get(tx, "all")
		if err != nil {
			return principal.User{}, err
		}
		if count == nil {
			count = new(uint64)
		}
		if *count++; *count > maxOpenNames {
			return principal.User{}, fault.New(fault.ResourceExhausted, "%d names were registered without a token: no more are taken", maxOpenNames)
		}
		openNames.Put(tx, count, "all")
	} else if err := s.dropUnused(tx, q.ID); err != nil {
		return principal.User{}, err
	}
	return valueOf(principal.Create(tx, q.ID, q.Name, q.Home, q.Open))
}

// dropUnused deletes the user with the given ID if an unauthenticated caller registered the name over REST and it has
// neither a role nor a credential. So an administrator can create a user although somebody else registered the name
// before.
func (s *Service) dropUnused(tx *store.Tx, id cloud.UserID) error {
	u, err := principal.Users.Get(tx, string(id))
	if err != nil || u == nil || !u.Unused() {
		return err
	}
	_, err = s.deleteUserOnLeader(tx, id)
	return err
}

var deleteUserCommand = newCommand("delete-user", leader.Keyed, (*Service).deleteUserOnLeader)

// deleteUserOnLeader deletes a user. If the name was registered without a token, it also decrements the count in
// openNames.
func (s *Service) deleteUserOnLeader(tx *store.Tx, id cloud.UserID) (none, error) {
	u, err := principal.Find(tx, id)
	if err != nil {
		return none{}, err
	}
	if u.Claimed {
		count, err := openNames.Get(tx, "all")
		if err != nil {
			return none{}, err
		}
		if count != nil && *count > 0 {
			*count--
			openNames.Put(tx, count, "all")
		}
	}
	loginNetworks.Delete(tx, string(id))
	return none{}, principal.Delete(tx, id)
}
