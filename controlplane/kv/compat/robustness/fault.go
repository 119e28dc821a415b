package robustness

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"syscall"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// fault is a kind of failure. The function act causes the failure and ends it. When act returns without an error, all
// initial members of the cluster run and are connected, or will be soon.
type fault struct {
	name string
	act  func(ctx context.Context, c *cluster, r *rand.Rand) error
}

// faults lists all faults that a Round can inject.
var faults = []fault{
	{"kill any", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.killAndRestart(ctx, r, anyMember(c, r))
	}},
	{"kill leader", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.killAndRestart(ctx, r, c.leader(ctx))
	}},
	{"kill two", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.killAndRestart(ctx, r, c.others(anyMember(c, r))...)
	}},
	{"kill all", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.killAndRestart(ctx, r, c.initial...)
	}},
	{"power failure of any", func(ctx context.Context, c *cluster, r *rand.Rand) error { return c.failPower(ctx, r, anyMember(c, r)) }},
	{"power failure of leader", func(ctx context.Context, c *cluster, r *rand.Rand) error { return c.failPower(ctx, r, c.leader(ctx)) }},
	{"power failure of all", func(ctx context.Context, c *cluster, r *rand.Rand) error { return c.failPower(ctx, r, c.initial...) }},
	{"stop leader", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		id := c.leader(ctx)
		return errors.Join(c.hosts[id].stop(), c.start(id))
	}},
	{"pause leader", func(ctx context.Context, c *cluster, r *rand.Rand) error { return c.pause(ctx, r, c.leader(ctx)) }},
	{"pause any", func(ctx context.Context, c *cluster, r *rand.Rand) error { return c.pause(ctx, r, anyMember(c, r)) }},
	{"cut off leader", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		id := c.leader(ctx)
		return c.dropPackets(ctx, r, connections(c, id, true, true))
	}},
	{"cut off any", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.dropPackets(ctx, r, connections(c, anyMember(c, r), true, true))
	}},
	{"drop packets from leader", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.dropPackets(ctx, r, connections(c, c.leader(ctx), true, false))
	}},
	{"drop packets to leader", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.dropPackets(ctx, r, connections(c, c.leader(ctx), false, true))
	}},
	{"cut one link of leader", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		a := c.leader(ctx)
		b := c.others(a)[r.IntN(2)]
		return c.dropPackets(ctx, r, [][2]int{{a, b}, {b, a}})
	}},
	{"freeze leader's disk", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.freezeDisk(ctx, r, c.leader(ctx))
	}},
	{"freeze any disk", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		return c.freezeDisk(ctx, r, anyMember(c, r))
	}},
	{"move leader", func(ctx context.Context, c *cluster, r *rand.Rand) error {
		from := c.leader(ctx)
		return c.moveLeader(ctx, from, c.others(from)[r.IntN(2)])
	}},
	{"a learner joins and leaves", func(ctx context.Context, c *cluster, r *rand.Rand) error { return c.addAndRemoveLearner(ctx, r) }},
}

func anyMember(c *cluster, r *rand.Rand) int { return c.initial[r.IntN(len(c.initial))] }

// connections returns connections between the given member and all other members, each as the IDs of sender and
// receiver. If out is set, it returns those from the member; if in is set, it returns those to the member.
func connections(c *cluster, id int, out, in bool) [][2]int {
	var l [][2]int
	for _, other := range c.others(id) {
		if out {
			l = append(l, [2]int{id, other})
		}
		if in {
			l = append(l, [2]int{other, id})
		}
	}
	return l
}

// waitRandom waits for a random time between shortest and longest, or until ctx ends.
func waitRandom(ctx context.Context, r *rand.Rand, shortest, longest time.Duration) {
	select {
	case <-time.After(shortest + time.Duration(r.Int64N(int64(longest-shortest)))):
	case <-ctx.Done():
	}
}

func (c *cluster) killAndRestart(ctx context.Context, r *rand.Rand, ids ...int) error {
	for _, id := range ids {
		c.hosts[id].kill()
	}
	waitRandom(ctx, r, 0, 1500*time.Millisecond)
	var errs []error
	for _, id := range ids {
		errs = append(errs, c.start(id))
	}
	return errors.Join(errs...)
}

func (c *cluster) failPower(ctx context.Context, r *rand.Rand, ids ...int) error {
	for _, id := range ids {
		if err := c.hosts[id].failPower(); err != nil {
			return err
		}
	}
	waitRandom(ctx, r, 0, time.Second)
	var errs []error
	for _, id := range ids {
		errs = append(errs, c.start(id))
	}
	return errors.Join(errs...)
}

func (c *cluster) pause(ctx context.Context, r *rand.Rand, id int) error {
	c.hosts[id].signal(syscall.SIGSTOP)
	waitRandom(ctx, r, 500*time.Millisecond, 3*time.Second)
	c.hosts[id].signal(syscall.SIGCONT)
	return nil
}

func (c *cluster) dropPackets(ctx context.Context, r *rand.Rand, links [][2]int) error {
	var errs []error
	for _, l := range links {
		errs = append(errs, dropBetween(l[0], l[1]))
	}
	waitRandom(ctx, r, time.Second, 4*time.Second)
	return errors.Join(append(errs, restoreLinks())...)
}

func (c *cluster) freezeDisk(ctx context.Context, r *rand.Rand, id int) error {
	freeze := 300*time.Millisecond + time.Duration(r.Int64N(int64(2*time.Second)))
	if err := c.hosts[id].freeze(freeze); err != nil {
		return err
	}
	waitRandom(ctx, r, freeze, freeze+1)
	return nil
}

// moveLeader requests a transfer of leadership. It ignores a refusal, because another member may have become the leader
// before the request.
func (c *cluster) moveLeader(ctx context.Context, from, to int) error {
	client, err := c.dial(c.server.endpoint(from))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if s, err := client.Status(ctx, c.server.endpoint(to)); err == nil {
		client.MoveLeader(ctx, s.Header.MemberId)
	}
	return nil
}

// addAndRemoveLearner adds a learner, starts it, promotes it when it has caught up, and then removes it.
func (c *cluster) addAndRemoveLearner(ctx context.Context, r *rand.Rand) error {
	ctx, cancel := context.WithTimeout(ctx, 40*time.Second)
	defer cancel()
	learner := len(c.initial) + len(c.joined) + 1
	peer, id := c.server.peer(learner), uint64(0)
	err := retryUntil(ctx, "a learner is added", func(ctx context.Context) error {
		_, err := c.client.MemberAddAsLearner(ctx, []string{peer})
		if list, lerr := c.client.MemberList(ctx); lerr == nil {
			id = withPeer(list, peer).GetID()
		}
		if id != 0 {
			return nil
		}
		return errors.Join(err, errors.New("it is not listed"))
	})
	if err != nil {
		return err
	}
	if c.hosts[learner], err = newMemberHost(c.dir, learner); err != nil {
		return err
	}
	c.joined[learner] = true
	if err := c.start(learner); err != nil {
		return err
	}
	err = retryUntil(ctx, "the learner is promoted", func(ctx context.Context) error {
		if !c.hosts[learner].running() {
			return fmt.Errorf("its process has exited: %s", tail(c.hosts[learner].log))
		}
		_, err := c.client.MemberPromote(ctx, id)
		if list, lerr := c.client.MemberList(ctx); err != nil && lerr == nil && withPeer(list, peer).promoted() {
			return nil
		}
		return err
	})
	if err != nil {
		return err
	}
	waitRandom(ctx, r, 200*time.Millisecond, time.Second)
	err = retryUntil(ctx, "the member is removed", func(ctx context.Context) error {
		_, err := c.client.MemberRemove(ctx, id)
		if list, lerr := c.client.MemberList(ctx); err != nil && lerr == nil && withPeer(list, peer).Member == nil {
			return nil
		}
		return err
	})
	h := c.hosts[learner]
	delete(c.hosts, learner)
	return errors.Join(err, h.remove())
}

// listedMember is a member in the response of MemberList. Its field Member is nil if the response does not contain the
// member.
type listedMember struct{ *pb.Member }

func (l listedMember) promoted() bool { return l.Member != nil && !l.IsLearner }

func withPeer(l *clientv3.MemberListResponse, peer string) listedMember {
	for _, m := range l.Members {
		if slices.Contains(m.PeerURLs, peer) {
			return listedMember{m}
		}
	}
	return listedMember{}
}

// defaultTimeout is the maximum duration of retryUntil; an earlier deadline of its context also applies.
const defaultTimeout = time.Minute

// retryUntil calls the function try repeatedly until it succeeds. Each call has a timeout of 1 s. If ctx ends or
// defaultTimeout passes, retryUntil returns the error of the last call.
func retryUntil(ctx context.Context, condition string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, defaultTimeout)
	defer cancel()
	for {
		attempt, cancel := context.WithTimeout(ctx, time.Second)
		err := try(attempt)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", condition, err)
		}
	}
}
