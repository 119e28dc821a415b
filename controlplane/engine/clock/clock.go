// Package clock provides the current time of a control-plane member. A Clock compares the wall clock of its host with
// those of the other members, and corrects the time if the wall clock is wrong.
//
// Every few seconds a member requests the time of every other member. It stores the responses relative to a monotonic
// clock (Elapsed), so that they stay correct when the wall clock is set. After each round it knows the difference
// between its wall clock and the median of all members' clocks, its own included. Skew returns this difference. One
// wrong clock is found as long as a majority of the clocks is right. With an even number of clocks, the two in the
// middle can differ by more than Bound. Then it is unknown which of the two is wrong, and the skew is unknown.
//
// Now returns the time for records and for the verification of certificates and tokens. It returns the wall clock if
// that was within Tolerance of the median in the last round, and otherwise the median. If the wall clock is set between
// two rounds, Now ignores that until the next round.
//
// Decisions:
//
//   - The time is corrected because the time in the store never goes back. A leader whose clock is ten minutes ahead
//     would move the time of all members ahead by ten minutes. Reservations and tokens that exist would end early, and
//     those created in that time would end late. For a wrong clock, CockroachDB stops the member and etcd warns; with a
//     correction, the member need not stop.
//   - A wrong clock is logged as a warning, or as an error if it is wrong by more than Bound. It is also exported as
//     the gauge trivet_clock_skew_seconds. A caller that must not continue with a wrong clock checks Skew.
//   - A member that has not yet received the time of a majority uses its wall clock as of its start plus Elapsed. The
//     only member of a cluster uses its wall clock. Consensus does not depend on any clock.
//
// In a build with the tag mutant, a test can set the wall clock of a program: see wall_mutant.go. The package must not
// depend on records or on a transport.
package clock

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// Tolerance is the maximum skew for which Now returns the uncorrected wall clock. A skew above Tolerance is logged
	// as a warning, a skew above Bound as an error.
	Tolerance = time.Second
	Bound     = time.Minute

	// Command is the name of the command by which members request each other's wall clock. The method Answer executes
	// it.
	Command = "clock.read"

	// askEvery is the pause between two rounds of requests. While the skew is unknown, the pause is askAtFirst at first
	// and doubles after each round, up to askEvery.
	askEvery, askAtFirst = 2 * time.Second, 100 * time.Millisecond
	// mostTrip is the maximum round-trip time of a request. A response that takes longer is ignored, because a response
	// may be wrong by half of its round-trip time.
	mostTrip = time.Second
	// keepFor is the maximum time for which a response is kept in preference to later ones that had a longer round-trip
	// time.
	keepFor = time.Minute
	// lately is the maximum age of a response that is used. Within it, two clocks drift apart by less than a tenth of a
	// second.
	lately = 10 * time.Minute
	// logEvery is the minimum time between two equal log messages.
	logEvery = time.Minute
)

// Peers is how a Clock sends commands to the other members of the cluster.
type Peers interface {
	// Members returns the address of each other member, by member ID.
	Members() map[uint64]string
	// Direct executes a command on a member and returns its response.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
}

// Options configures a Clock.
type Options struct {
	// Log receives the messages about the skew; required.
	Log *slog.Logger
	// Wall returns the wall clock of this host. The default is this package's function Wall.
	Wall func() time.Time
	// Elapsed returns a monotonic time, which does not change when Wall is set; default: the time since New.
	Elapsed func() time.Duration
}

// Clock provides the current time to one member. It is safe for concurrent use.
type Clock struct {
	opts       Options
	started    time.Time
	desc       *prometheus.Desc
	trips      *prometheus.HistogramVec // by member ID, in seconds
	skewLogger skewLogger

	mu    sync.RWMutex
	peers Peers
	// The following fields are the result of the last round. right is the time that Now considers correct, minus
	// Elapsed. median is the median of all members' clocks, minus Elapsed; it is valid only if known is true. apart is
	// above 0 if two clocks differ so much that one is wrong and it is unknown which; apart is their difference.
	right, median time.Duration
	known         bool
	apart         time.Duration
	// members is the number of members in the last round, including this one.
	members  int
	readings map[uint64]reading
}

// reading is a measurement of another member's clock, taken from one response of that member.
type reading struct {
	// ahead is the other member's clock in Unix time, minus the Elapsed time of this member at the same moment.
	ahead time.Duration
	// at is the Elapsed time of this member when the response arrived.
	at time.Duration
	// trip is the round-trip time of the request. ahead may be wrong by at most half of trip.
	trip time.Duration
}

// better reports whether the new reading a replaces the older reading before, of the same member. An older reading with
// a shorter round-trip time is kept until it is older than keepFor, unless the two readings contradict each other.
func (a reading) better(before reading) bool {
	if before.trip >= a.trip || a.at-before.at > keepFor {
		return true
	}
	return (a.ahead - before.ahead).Abs() > (a.trip+before.trip)/2
}

// New returns a Clock whose time is the wall clock. It is corrected only after Attach has set the peers and Run
// compares the clocks.
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
		desc: prometheus.NewDesc("trivet_clock_skew_seconds",
			"Seconds by which this member's clock is ahead of the other members' clocks, negative if behind; absent while "+
				"unknown.", nil, nil),
		trips: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "etcd_network_peer_round_trip_time_seconds", Buckets: prometheus.ExponentialBuckets(.0001, 2, 16),
			Help: "Round-trip time of the clock requests that this member sends to each other member every 2 " +
				"seconds. The label To is the ID of the other member, in hexadecimal as in etcd.",
		}, []string{"To"}),
	}
}

// Attach sets the peers whose clocks are compared. It must be called once, before Run.
func (c *Clock) Attach(p Peers) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.peers = p
}

// Now returns the current time: the wall clock, corrected by the result of the last round. The returned time may jump
// forward and back.
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

// own converts wall, the current time of the wall clock, to Unix time minus the current Elapsed, so that it can be
// compared with reading.ahead.
func (c *Clock) own(wall time.Time) time.Duration {
	return time.Duration(wall.UnixNano()) - c.opts.Elapsed()
}

// Steady returns the wall clock's time at the start of the member plus Elapsed. It never goes back. Use it for times
// that are needed only while the process runs.
func (c *Clock) Steady() time.Time { return c.started.Add(c.opts.Elapsed()) }

// Elapsed returns a monotonic time, which does not change when the wall clock is set.
func (c *Clock) Elapsed() time.Duration { return c.opts.Elapsed() }

// Skew returns how far the wall clock is ahead of the median of the members' clocks; the offset is negative if it is
// behind. known is false in three cases: there are no other members; fewer than a majority of the clocks, this member's
// included, are known; or two clocks differ by more than Bound and it is unknown which one is wrong.
func (c *Clock) Skew() (offset time.Duration, known bool) {
	own := c.own(c.opts.Wall())
	c.mu.RLock()
	defer c.mu.RUnlock()
	if !c.known {
		return 0, false
	}
	return own - c.median, true
}

// updateOffset computes and stores the result of a round. It uses the readings that are not older than lately.
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

// ask requests the time of one member and stores the resulting reading, unless the stored reading of that member is
// better.
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
	c.trips.WithLabelValues(strconv.FormatUint(member, 16)).Observe((heard - asked).Seconds())
	theirs := time.Duration(binary.BigEndian.Uint64(body))
	c.mu.Lock()
	defer c.mu.Unlock()
	a := reading{ahead: theirs - (asked+heard)/2, at: heard, trip: heard - asked}
	if before, ok := c.readings[member]; !ok || a.better(before) {
		c.readings[member] = a
	}
	return nil
}

// round requests the time of all other members concurrently, deletes the readings of members that were removed, and
// computes the new result.
func (c *Clock) round(ctx context.Context) {
	c.mu.Lock()
	peers := c.peers
	members := peers.Members()
	c.members = len(members) + 1
	for id := range c.readings {
		if _, still := members[id]; !still {
			delete(c.readings, id)
			c.trips.DeleteLabelValues(strconv.FormatUint(id, 16))
		}
	}
	c.mu.Unlock()
	var work sync.WaitGroup
	for id := range members {
		// Ignore the error: the member may be unreachable, or its version may not have the command. The result is then
		// computed without a new reading of that member.
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

// logResult logs the skew after a round. If two clocks differ by more than Bound and it is unknown which is wrong, it
// logs that instead.
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

// Describe implements prometheus.Collector with the gauge trivet_clock_skew_seconds and the histogram
// etcd_network_peer_round_trip_time_seconds.
func (c *Clock) Describe(out chan<- *prometheus.Desc) {
	out <- c.desc
	c.trips.Describe(out)
}

// Collect implements prometheus.Collector: it sends the current skew in seconds, unless the skew is unknown, and the
// round-trip times of the requests to the other members.
func (c *Clock) Collect(out chan<- prometheus.Metric) {
	if skew, known := c.Skew(); known {
		out <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, skew.Seconds())
	}
	c.trips.Collect(out)
}
