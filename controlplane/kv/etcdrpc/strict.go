package etcdrpc

import (
	"context"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// steadyTime is how long a member must have been heard to count for a change of the members, as with etcd's
// --strict-reconfig-check (HealthInterval).
const steadyTime = 5*time.Second - kv.ContactLook

// steady counts the voters that the leader has heard for long enough, itself included.
func steady(c *kv.Contacts) (n int) {
	for _, id := range c.Voters {
		if heard, ok := c.Heard[id]; id == c.Leader || ok && heard >= steadyTime {
			n++
		}
	}
	return n
}

// mayAdd is etcd's rule for one more member, which is thought of as one that votes and is not heard.
func mayAdd(c *kv.Contacts) error {
	if n := len(c.Voters); n > 1 && steady(c) < (n+1)/2+1 {
		return rpctypes.ErrGRPCUnhealthy
	}
	return nil
}

// mayRemove is etcd's rule for one less: a learner or one that is not heard may go, else those who stay must be enough
// without it. Whether a voter would be left is for others to say.
func mayRemove(c *kv.Contacts, id uint64) error {
	_, heard := c.Heard[id]
	n := len(c.Voters)
	if n <= 1 || !slices.Contains(c.Voters, id) || id != c.Leader && !heard {
		return nil
	}
	if steady(c)-1 < 1+(n-1)/2 {
		return rpctypes.ErrGRPCUnhealthy
	}
	return nil
}

// strictly asks a rule of whom the leader hears, if there shall be rules. Where nobody can be asked, nobody is healthy.
func (c *cluster) strictly(ctx context.Context, rule func(*kv.Contacts) error) error {
	if !c.strict {
		return nil
	}
	found, err := c.service.Contacts(ctx)
	if err != nil {
		return rpctypes.ErrGRPCUnhealthy
	}
	return rule(&found)
}
