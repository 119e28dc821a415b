package etcdrpc

import (
	"context"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// healthyContact is the time for which a member must have been in contact with the leader to count as healthy in a
// membership change. It is the 5 s of etcd's --strict-reconfig-check (HealthInterval), minus the precision of the
// measurement.
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

// checkAdd applies etcd's rule for adding a member. Even if the new member becomes a voter and is not healthy, the
// healthy voters must be a quorum. Otherwise checkAdd returns ErrGRPCUnhealthy. The rule does not apply to a cluster
// with one voter.
func checkAdd(c *kv.Contacts) error {
	if n := len(c.Voters); n > 1 && countHealthy(c) < (n+1)/2+1 {
		return rpctypes.ErrGRPCUnhealthy
	}
	return nil
}

// checkRemove applies etcd's rule for removing the member with the given ID. A learner, or a voter without contact to
// the leader, may always be removed. For any other voter, the number of healthy voters minus one must be a quorum of
// the remaining voters; otherwise checkRemove returns ErrGRPCUnhealthy. The rule does not apply to the last voter,
// because package membership checks that a voter remains.
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

// checkStrict calls the function rule with the leader's contacts and returns its error. If the contacts cannot be read,
// it returns ErrGRPCUnhealthy. If Options.StrictReconfig is not set, it returns nil.
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
