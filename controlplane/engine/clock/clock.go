// Package clock provides a member's current time. A Clock compares the wall clock of its host with those of the other
// members, and corrects it if it is wrong.
//
// Every few seconds a member requests the time of every other member. It stores the responses relative to a monotonic
// clock (Elapsed). After each round it knows the difference between its wall clock and the median of all members'
// clocks, its own included. Skew returns this difference, and remains correct when the wall clock is set between two
// rounds. One wrong clock is found as long as a majority of the clocks is right. Of two clocks that differ by more than
// Bound, it is unknown which one is wrong; then there is no known skew.
//
// Now returns the time for records and for the verification of certificates and tokens: the wall clock while it was
// within Tolerance of the median in the last round, otherwise the median. A wall clock that is set between two rounds
// has no effect before the next round.
//
// Decisions:
//
//   - The time is corrected, because the store's time never goes back: a leader whose clock is ten minutes ahead would
//     move the time of all members ahead for ten minutes. Reservations and tokens would end early, and those made in
//     that time late. CockroachDB stops a member with a wrong clock, etcd warns; with a correction neither is needed.
//   - A wrong clock is logged, as a warning, beyond Bound as an error, and exported as the gauge
//     trivet_clock_skew_seconds. A caller that must not continue with a wrong clock checks Skew.
//   - A member that has not received the time of a majority since its start uses its wall clock as of the start. The
//     only member of a cluster uses its wall clock. Consensus does not depend on any clock.
//
// In a build with the tag mutant, a test can set the wall clock of a program: see wall_mutant.go. The package must not
// know records or a transport.
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
	// Tolerance is the largest skew that is not corrected. Bound is the largest skew that is not logged as an error.
	Tolerance = time.Second
	Bound     = time.Minute

	// Command is the name of the command that returns a member's wall clock; see Answer.
	Command = "clock.read"

	// askEvery is the pause between two rounds of requests. While the skew is unknown, the pause starts at askAtFirst
	// and doubles.
	askEvery, askAtFirst = 2 * time.Second, 100 * time.Millisecond
	// mostTrip is the longest round trip of a response that is used. The error of a response is at most half of its
	// round trip.
	mostTrip = time.Second
	// keepFor is how long a response with a short round trip is preferred to later ones with longer round trips.
	keepFor = time.Minute
	// lately is how long a response is used. In that time two clocks drift apart by less than a tenth of a second.
	lately = 10 * time.Minute
	// logEvery is the pause between two equal log messages.
	logEvery = time.Minute
)

// Peers sends commands to the other members of the cluster.
type Peers interface {
	// Members returns the addresses of the other members, by member ID.
	Members() map[uint64]string
	// Direct executes a command on a member and returns its response.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
}

// Options configures a Clock.
type Options struct {
	// Log receives the warnings about skew; required.
	Log *slog.Logger
	// Wall returns the wall clock of this host; default: the function Wall.
	Wall func() time.Time
	// Elapsed returns a monotonic time, which does not change when Wall is set; default: the time since New.
	Elapsed func() time.Duration
}

// Clock provides the current time to one member. It is safe for concurrent use.
type Clock struct {
	opts       Options
	started    time.Time
	desc       *prometheus.Desc
	skewLogger skewLogger

	mu    sync.RWMutex
	peers Peers
	// The following fields are the result of the last round. right is the accepted time minus Elapsed. median is the
	// median of all clocks minus Elapsed, valid if known is set. apart is the difference between two clocks if it is
	// unknown which of them is wrong, otherwise 0.
	right, median time.Duration
	known         bool
	apart         time.Duration
	// members is the number of members in the last round, including this one.
	members  int
	readings map[uint64]reading
}

// reading is the time that another member's clock showed, as computed from one response.
type reading struct {
	// ahead is the other member's clock, in Unix time, minus Elapsed of this member.
	ahead time.Duration
	// at is the Elapsed time when the response arrived.
	at time.Duration
	// trip is the round-trip time. The error of ahead is at most half of it.
	trip time.Duration
}

// better reports whether a replaces the reading before of the same member. A reading with a shorter round trip is not
// replaced while it is younger than keepFor and does not contradict a.
func (a reading) better(before reading) bool {
	if before.trip >= a.trip || a.at-before.at > keepFor {
		return true
	}
	return (a.ahead - before.ahead).Abs() > (a.trip+before.trip)/2
}

// New returns a clock that shows the wall clock until Attach has set the peers and Run compares the clocks.
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
		opts: opts, started: started, right: time.Duration(started.UnixNano()), readings: map[uint64]reading{}, skewLogger: skewLogger{log: opts.Log},
		desc: prometheus.NewDesc("trivet_clock_skew_seconds", "How far this member's clock is ahead of the others'; absent while that is not known.", nil, nil),
	}
}

// Attach sets the peers whose clocks are compared. It must be called once, before Run.
func (c *Clock) Attach(p Peers) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.peers = p
}

// Now returns the current time: the wall clock, corrected by the result of the last round. It may jump in both
// directions.
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

// own converts wall, a time of the wall clock, to Unix time minus the current Elapsed.
func (c *Clock) own(wall time.Time) time.Duration {
	return time.Duration(wall.UnixNano()) - c.opts.Elapsed()
}

// Steady returns the wall clock's time at the start of the member plus Elapsed. It is monotonic. Use it for times that
// are not needed beyond the life of the process.
func (c *Clock) Steady() time.Time { return c.started.Add(c.opts.Elapsed()) }

// Elapsed returns a monotonic time, which does not change when the wall clock is set.
func (c *Clock) Elapsed() time.Duration { return c.opts.Elapsed() }

// Skew returns how far the wall clock is ahead of the median of the members' clocks; negative if it is behind. known is
// false if there are no other members, if the clocks of a majority (this member included) are not known, or if the
// clocks differ by more than Bound and it is unknown which is wrong.
func (c *Clock) Skew() (offset time.Duration, known bool) {
	own := c.own(c.opts.Wall())
	c.mu.RLock()
	defer c.mu.RUnlock()
	if !c.known {
		return 0, false
	}
	return own - c.median, true
}

// updateOffset computes the result of a round from the readings that are at most lately old, and stores it.
func (c *Clock) updateOffset() {
	own, now := c.own(c.opts.Wall()), c.opts.Elapsed()
	c.mu.Lock()
	defer c.mu.Unlock()
	var others []time.Duration
	for _, a := range c.readings {
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

// Answer executes Command: it returns this member's wall clock in Unix nanoseconds, as 8 bytes, big endian.
func (c *Clock) Answer(context.Context, uint64, []byte) ([]byte, error) {
	return binary.BigEndian.AppendUint64(nil, uint64(c.opts.Wall().UnixNano())), nil
}

var errTooSlow = errors.New("the response took too long to contain a usable time")

// ask requests the time of one member and stores the reading, unless a stored reading is better.
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
		return fmt.Errorf("the time of member %d has %d bytes, want 8", member, len(body))
	case heard-asked > mostTrip:
		return errTooSlow
	}
	theirs := time.Duration(binary.BigEndian.Uint64(body))
	c.mu.Lock()
	defer c.mu.Unlock()
	a := reading{ahead: theirs - (asked+heard)/2, at: heard, trip: heard - asked}
	if before, ok := c.readings[member]; !ok || a.better(before) {
		c.readings[member] = a
	}
	return nil
}

// round requests the time of all other members concurrently, removes the readings of removed members, and stores the
// result.
func (c *Clock) round(ctx context.Context) {
	c.mu.Lock()
	peers := c.peers
	members := peers.Members()
	c.members = len(members) + 1
	for id := range c.readings {
		if _, still := members[id]; !still {
			delete(c.readings, id)
		}
	}
	c.mu.Unlock()
	var work sync.WaitGroup
	for id := range members {
		// A member is ignored if it cannot be reached or if its version is too old for the command.
		work.Go(func() { _ = c.ask(ctx, peers, id) })
	}
	work.Wait()
	c.updateOffset()
}

// Run compares the clocks periodically until ctx ends.
func (c *Clock) Run(ctx context.Context) {
	for pause := askAtFirst; ctx.Err() == nil; pause = min(2*pause, askEvery) {
		c.round(ctx)
		c.logResult()
		if _, known := c.Skew(); known {
			pause = askEvery
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// logResult logs the skew that the last round has found, or that it is unknown which clock is wrong.
func (c *Clock) logResult() {
	skew, known := c.Skew()
	c.mu.RLock()
	apart := c.apart
	c.mu.RUnlock()
	switch {
	case known:
		c.skewLogger.report(c.opts.Elapsed(), skew)
	case apart > 0:
		c.skewLogger.reportUnknown(c.opts.Elapsed(), apart)
	}
}

// Describe implements prometheus.Collector with the gauge trivet_clock_skew_seconds.
func (c *Clock) Describe(out chan<- *prometheus.Desc) { out <- c.desc }

// Collect implements prometheus.Collector: it sends the current skew in seconds, or nothing while the skew is unknown.
func (c *Clock) Collect(out chan<- prometheus.Metric) {
	if skew, known := c.Skew(); known {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, skew.Seconds())
	}
}
