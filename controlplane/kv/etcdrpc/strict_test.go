package etcdrpc

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// TestStrictReconfig checks etcd's rules. To add a member to three, or to remove one of three that is in contact with
// the leader, all three must have been in contact with the leader for five seconds.
func TestStrictReconfig(t *testing.T) {
	const long, short = 6 * time.Second, time.Second
	three, heard := []uint64{1, 2, 3}, func(two, three time.Duration) map[uint64]time.Duration {
		out := map[uint64]time.Duration{}
		for id, d := range map[uint64]time.Duration{2: two, 3: three} {
			if d > 0 {
				out[id] = d
			}
		}
		return out
	}
	unhealthy := rpctypes.ErrGRPCUnhealthy
	for name, c := range map[string]struct {
		voters      []uint64
		heard       map[uint64]time.Duration
		add         error
		remove1, r3 error // expected errors of removing member 1, the leader, and member 3
	}{
		"one member":                     {[]uint64{1}, nil, nil, nil, nil},
		"all healthy":                    {three, heard(long, long), nil, nil, nil},
		"new leader":                     {three, heard(short, short), unhealthy, unhealthy, unhealthy},
		"one follower was down recently": {three, heard(long, short), unhealthy, unhealthy, unhealthy},
		"one follower is down":           {three, heard(long, 0), unhealthy, unhealthy, nil},
		"both followers are down":        {three, nil, unhealthy, unhealthy, nil},
		"two members":                    {[]uint64{1, 3}, heard(0, long), nil, nil, nil},
		"two members, new leader":        {[]uint64{1, 3}, heard(0, short), unhealthy, unhealthy, unhealthy},
		"member 3 is a learner":          {[]uint64{1, 2}, heard(short, short), unhealthy, unhealthy, nil},
	} {
		t.Run(name, func(t *testing.T) {
			contacts := &kv.Contacts{Leader: 1, Voters: c.voters, ContactTimes: c.heard}
			require.Equal(t, c.add, checkAdd(contacts))
			require.Equal(t, c.remove1, checkRemove(contacts, 1))
			require.Equal(t, c.r3, checkRemove(contacts, 3))
		})
	}
}
