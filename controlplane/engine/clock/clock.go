// Package clock is what time it is for a member: its own clock, watched against those of the others.
//
// Every member asks every other what its clock says, every few seconds, and keeps the answers by a clock of its own that
// only goes forward (Elapsed). After each round it knows how far its clock is from the median of all of them, its own
// included, and from then on at any moment, also right after its own clock was set: Skew. An odd one out is found as long
// as a majority of the clocks is right; two clocks that differ say nothing about which is wrong, and then nothing is known.
//
// Now is the time to put into records and to judge certificates and tokens by: what the last round found to be right, which
// is the own clock while that is within Tolerance of the median, and the median otherwise. A clock that is set in between
// changes nothing before the others have been asked again. The store's time never goes back, so a
// leader that is ten minutes ahead would move everybody's time ahead for ten minutes: reservations and tokens would end
// early, and those made then late. CockroachDB ends a member whose clock is off, etcd warns; a member that knows the
// others' time need do neither. It says so (a warning, beyond Bound an error, and the gauge trivet_clock_skew_seconds),
// and who must not go on with a wrong clock asks Skew.
//
// What is left: a member that has not heard from a majority since it was started goes by its own clock as it was then, and
// one that is alone by the only one there is. Nothing in the agreement between members depends on any clock; only times that people read, or set, do.
//
// In a build with the tag mutant the own clock is set by whoever runs the program: see wall_mutant.go. It knows no records
// and no transport.
package clock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// Tolerance is how far a clock may be from the others to be taken as it is, and Bound how far before it is an error.
	Tolerance = time.Second
	Bound     = time.Minute

	// Command is what a member is asked for its clock by.
	Command = "clock.read"

	// askEvery is the pause between rounds, and askAtFirst the first while nothing is known: they double.
	askEvery, askAtFirst = 2 * time.Second, 100 * time.Millisecond
	// mostTrip is how long a question and its answer may take to count: half of it is how wrong they can be.
	mostTrip = time.Second
	// keepFor is how long an answer that came fast is kept against slower ones.
	keepFor = time.Minute
	// lately is for how long an answer counts: about as long as two clocks cannot part by a tenth of a second.
	lately = 10 * time.Minute
	// sayEvery is the pause between two lines of the log that say the same.
	sayEvery = time.Minute
)

// Peers are the other members.
type Peers interface {
	// Members are those that are known now, by their addresses.
	Members() map[uint64]string
	// Direct calls a command on a member.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
}

// Options of a Clock.
type Options struct {
	// Log is required.
	Log *slog.Logger
	// Wall is the own clock; Wall of this package when nil.
	Wall func() time.Time
	// Elapsed goes forward only, and does not follow when Wall is set; the process's own when nil.
	Elapsed func() time.Duration
}

// Clock is a member's.
type Clock struct {
	opts    Options
	started time.Time
	desc    *prometheus.Desc
	teller  teller

	mu    sync.RWMutex
	peers Peers
	// What the last round has found: right is the time less Elapsed, and median that of all clocks, if known. They are apart
	// when nobody can say whose is wrong.
	right, median time.Duration
	known         bool
	apart         time.Duration
	// members counts them all, this one too, as of the last round.
	members int
	answers map[uint64]answer
}

// answer is what another member's clock said.
type answer struct {
	// ahead is that clock less Elapsed here, in Unix time.
	ahead time.Duration
	at    time.Duration
	// trip is how long question and answer took: half of it is how wrong ahead can be.
	trip time.Duration
}

// better says whether an answer is to be believed rather than the one before it: that told more exactly what this one does
// not contradict, and is not old.
func (a answer) better(before answer) bool {
	if before.trip >= a.trip || a.at-before.at > keepFor {
		return true
	}
	return (a.ahead - before.ahead).Abs() > (a.trip+before.trip)/2
}

// New makes a clock that knows of no others yet: see Attach and Run.
func New(opts Options) *Clock {
	if opts.Wall == nil {
		opts.Wall = Wall
	}
	if opts.Elapsed == nil {
		began := time.Now()
		opts.Elapsed = func() time.Duration { return time.Since(began) }
	}
	started := opts.Wall().Add(-opts.Elapsed())
	return &Clock{
		opts: opts, started: started, right: time.Duration(started.UnixNano()), answers: map[uint64]answer{}, teller: teller{log: opts.Log},
		desc: prometheus.NewDesc("trivet_clock_skew_seconds", "How far this member's clock is ahead of the others'; absent while that is not known.", nil, nil),
	}
}

// Attach says who the others are. Call it once, before Run.
func (c *Clock) Attach(p Peers) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.peers = p
}

// Now is the time, as the last round has found it. It may step.
func (c *Clock) Now() time.Time {
	wall := c.opts.Wall()
	if mutant.On(mutant.OwnClock) {
		return wall
	}
	c.mu.RLock()
	defer c.mu.RUnlock()
	if off := c.own(wall) - c.right; off.Abs() > Tolerance && c.members != 1 {
		return wall.Add(-off)
	}
	return wall
}

// own is a reading of the own clock less Elapsed.
func (c *Clock) own(wall time.Time) time.Duration {
	return time.Duration(wall.UnixNano()) - c.opts.Elapsed()
}

// Steady is the own clock as it was when the member started, and goes on from there whatever becomes of it: for what lasts
// as long as the process at most.
func (c *Clock) Steady() time.Time { return c.started.Add(c.opts.Elapsed()) }

// Elapsed goes forward only, whatever becomes of the clock.
func (c *Clock) Elapsed() time.Duration { return c.opts.Elapsed() }

// Skew is how far the own clock is ahead of the members' median, less than 0 when it is behind. It is not known without
// other members, while fewer than a majority have answered lately, or when nobody can say whose clock is wrong.
func (c *Clock) Skew() (offset time.Duration, known bool) {
	own := c.own(c.opts.Wall())
	c.mu.RLock()
	defer c.mu.RUnlock()
	if !c.known {
		return 0, false
	}
	return own - c.median, true
}

// judge makes of the answers what is right.
func (c *Clock) judge() {
	own, now := c.own(c.opts.Wall()), c.opts.Elapsed()
	c.mu.Lock()
	defer c.mu.Unlock()
	var others []time.Duration
	for _, a := range c.answers {
		if now-a.at <= lately {
			others = append(others, a.ahead)
		}
	}
	var skew time.Duration
	skew, c.known, c.apart = offset(own, others, c.members)
	switch {
	case c.known && skew.Abs() > Tolerance:
		c.median, c.right = own-skew, own-skew
	case c.known:
		c.median, c.right = own-skew, own
	case c.members == 1:
		c.right = own
	}
}

// Answer is the command of that name: what this member's own clock says.
func (c *Clock) Answer(context.Context, uint64, []byte) ([]byte, error) {
	return binary.BigEndian.AppendUint64(nil, uint64(c.opts.Wall().UnixNano())), nil
}

var errTooSlow = errors.New("the answer took too long to say what time it is")

// ask asks one member and keeps what it says.
func (c *Clock) ask(ctx context.Context, peers Peers, member uint64) error {
	ctx, cancel := context.WithTimeout(ctx, mostTrip)
	defer cancel()
	asked := c.opts.Elapsed()
	body, err := peers.Direct(ctx, member, Command, nil)
	heard := c.opts.Elapsed()
	switch {
	case err != nil:
		return err
	case len(body) != 8:
		return fmt.Errorf("the clock of member %d says %d bytes, want 8", member, len(body))
	case heard-asked > mostTrip:
		return errTooSlow
	}
	said := time.Duration(binary.BigEndian.Uint64(body))
	c.mu.Lock()
	defer c.mu.Unlock()
	a := answer{ahead: said - (asked+heard)/2, at: heard, trip: heard - asked}
	if before, ok := c.answers[member]; !ok || a.better(before) {
		c.answers[member] = a
	}
	return nil
}

// round asks every other member at once, and forgets those that are none any more.
func (c *Clock) round(ctx context.Context) {
	c.mu.Lock()
	peers := c.peers
	members := peers.Members()
	c.members = len(members) + 1
	for id := range c.answers {
		if _, still := members[id]; !still {
			delete(c.answers, id)
		}
	}
	c.mu.Unlock()
	var work sync.WaitGroup
	for id := range members {
		// A member that cannot be reached, or is too old to know the command, just does not count.
		work.Go(func() { _ = c.ask(ctx, peers, id) })
	}
	work.Wait()
	c.judge()
}

// Run watches the clocks until ctx ends.
func (c *Clock) Run(ctx context.Context) {
	for pause := askAtFirst; ctx.Err() == nil; pause = min(2*pause, askEvery) {
		c.round(ctx)
		c.say()
		if _, known := c.Skew(); known {
			pause = askEvery
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// say tells the log what the last round has found.
func (c *Clock) say() {
	skew, known := c.Skew()
	c.mu.RLock()
	apart := c.apart
	c.mu.RUnlock()
	switch {
	case known:
		c.teller.tell(c.opts.Elapsed(), skew)
	case apart > 0:
		c.teller.doubt(c.opts.Elapsed(), apart)
	}
}

// Describe implements prometheus.Collector.
func (c *Clock) Describe(out chan<- *prometheus.Desc) { out <- c.desc }

// Collect implements prometheus.Collector.
func (c *Clock) Collect(out chan<- prometheus.Metric) {
	if skew, known := c.Skew(); known {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, skew.Seconds())
	}
}
