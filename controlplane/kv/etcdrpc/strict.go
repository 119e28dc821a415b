package etcdrpc

import (
	"context"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// healthyContact is how long a member must have been in contact with the leader to count as healthy in a membership
// change, as with etcd's --strict-reconfig-check (HealthInterval, 5 s), less the precision of the measurement.
const healthyContact = 5*time.Second - kv.ContactInterval

// countHealthy counts the voters that have been in contact with the leader for healthyContact, including the leader.
func countHealthy(c *kv.Contacts) (n int) {
	for _, id := range c.Voters {
		if contact, ok := c.ContactTimes[id]; id == c.Leader || ok && contact >= healthyContact {
			n++
		}
	}
	return n
}

// checkAdd applies etcd's rule for adding a member: the healthy voters must be a quorum even if the new member becomes
// a voter and is not healthy.
func checkAdd(c *kv.Contacts) error {
	if n := len(c.Voters); n > 1 && countHealthy(c) < (n+1)/2+1 {
		return rpctypes.ErrGRPCUnhealthy
	}
	return nil
}

// checkRemove applies etcd's rule for removing a member. A learner, or a member without contact, may be removed.
// Otherwise the number of healthy voters less one must be a quorum of the remaining voters. Package membership checks
// that a voter remains.
func checkRemove(c *kv.Contacts, id uint64) error {
	_, inContact := c.ContactTimes[id]
	n := len(c.Voters)
	if n <= 1 || !slices.Contains(c.Voters, id) || id != c.Leader && !inContact {
		return nil
	}
	if countHealthy(c)-1 < 1+(n-1)/2 {
		return rpctypes.ErrGRPCUnhealthy
	}
	return nil
}

// checkStrict applies a rule to the leader's contacts if Options.StrictReconfig is set. If the contacts cannot be read,
// it returns ErrGRPCUnhealthy.
func (c *cluster) checkStrict(ctx context.Context, rule func(*kv.Contacts) error) error {
	if !c.strict {
		return nil
	}
	found, err := c.service.Contacts(ctx)
	if err != nil {
		return rpctypes.ErrGRPCUnhealthy
	}
	return rule(&found)
}
