// Package diskspace keeps tenants from filling the members' disks: below a reserve of free space their changes are refused
// while there is room to make room. Its main type is Monitor.
//
// Decisions:
//   - Each member measures the file system of its data directory and asks the other members for theirs, every CheckEvery,
//     and measures its own again when a change comes.
//     One member that is low is enough to refuse, as one etcd that exceeds its quota is: all members write the same log, and
//     the smallest disk would stop its member. A member that does not answer does not count, because it writes nothing.
//   - The leader refuses commands of the platform, each member requests of users' keys that add data (etcd's ErrNoSpace,
//     without the alarm, so that it ends by itself).
//   - Reads, what removes something, operators' calls and the cluster's own work go on. They may use up the reserve; then
//     the member stops as on any full disk (package disk).
//   - A member is low below the reserve and no longer low at an eighth more, so that it does not change its mind each second.
//
// It knows no records and no transport.
package diskspace

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fxamacker/cbor/v2"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	// Command is the name by which a member asks another for its space.
	Command = "disk.space"
	// Reason is that of the refusals.
	Reason = "DISK_SPACE_LOW"
	// CheckEvery is the time between two measurements, which is also that between two rounds of questions to others. A
	// measurement that a call asks about is at most fresh old: a disk may take 100 MiB within a second.
	CheckEvery = time.Second
	fresh      = 100 * time.Millisecond
	// answerTime is how long another member has to answer, keepAnswer how long its answer counts.
	answerTime = time.Second
	keepAnswer = 5 * CheckEvery
	// retryAfter is what a refused caller is told to wait.
	retryAfter = 30 * time.Second
)

// Space is what a member's file system has, in bytes.
type Space struct {
	Free, Size, Reserve int64
	// Low is whether Free is below Reserve, or was and is not an eighth above it yet.
	Low bool
}

// Peers are the other members.
type Peers interface {
	// Members are the addresses of all members, this one too.
	Members() map[uint64]string
	// Direct calls a command on a member.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
}

// Options of a Monitor. Dir, Self and Log are required.
type Options struct {
	Dir  string
	Self uint64
	// Reserve is the free space in bytes below which a member is low: 0 is DefaultReserve of the file system, below 0 none.
	Reserve int64
	Log     *slog.Logger
	// Stat measures a file system; statfs(2) when nil.
	Stat func(dir string) (free, size int64, err error)
	// Now is the clock; time.Now when nil.
	Now func() time.Time
}

// Monitor knows the space of all members.
type Monitor struct {
	opts Options

	mu     sync.Mutex
	peers  Peers
	own    Space
	at     time.Time // when own was measured
	others map[uint64]answer
	lowest uint64 // the member that was logged as low; 0 for none
}

type answer struct {
	space Space
	at    time.Time
}

// DefaultReserve returns the reserve of a file system that no configuration sets: a twentieth of it, at least 512 MiB and
// at most 4 GiB, but never more than a quarter. What members have acknowledged and not yet written to the state's files,
// up to 128 MiB, must fit into it.
func DefaultReserve(size int64) int64 {
	return min(max(size/20, 512<<20), 4<<30, size/4)
}

// New returns a Monitor that has measured its own disk and knows of no other members yet: see Attach and Run.
func New(opts Options) *Monitor {
	if opts.Stat == nil {
		opts.Stat = stat
	}
	if opts.Now == nil {
		opts.Now = time.Now
	}
	m := &Monitor{opts: opts, others: map[uint64]answer{}}
	m.measure()
	return m
}

func stat(dir string) (free, size int64, err error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, 0, fmt.Errorf("measure free space: %w", err)
	}
	return int64(s.Bavail) * s.Bsize, int64(s.Blocks) * s.Bsize, nil
}

// Attach tells the monitor who the others are. Call it once, before Run.
func (m *Monitor) Attach(p Peers) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.peers = p
}

// measure looks at the own disk. When it cannot be measured what was known stays.
func (m *Monitor) measure() {
	free, size, err := m.opts.Stat(m.opts.Dir)
	if err != nil {
		m.opts.Log.Warn("disk space", "err", err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := Space{Free: free, Size: size, Reserve: max(m.opts.Reserve, 0)}
	if m.opts.Reserve == 0 {
		s.Reserve = DefaultReserve(size)
	}
	s.Low = free < s.Reserve || m.own.Low && free < s.Reserve+s.Reserve/8
	m.own, m.at = s, m.opts.Now()
}

// Run measures and asks until ctx ends.
func (m *Monitor) Run(ctx context.Context) {
	tick := time.NewTicker(CheckEvery)
	defer tick.Stop()
	for {
		m.Check(ctx)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// Check measures once and asks every other member once, at the same time.
func (m *Monitor) Check(ctx context.Context) {
	m.measure()
	m.mu.Lock()
	peers := m.peers
	m.mu.Unlock()
	if peers != nil {
		var asking sync.WaitGroup
		members := peers.Members()
		for id := range members {
			if id != m.opts.Self {
				asking.Go(func() { m.ask(ctx, peers, id) })
			}
		}
		asking.Wait()
		m.mu.Lock()
		maps.DeleteFunc(m.others, func(id uint64, _ answer) bool { _, is := members[id]; return !is })
		m.mu.Unlock()
	}
	m.report()
}

// ask asks one member and keeps its answer. One that does not answer is left as it was until keepAnswer has passed.
func (m *Monitor) ask(ctx context.Context, peers Peers, id uint64) {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	body, err := peers.Direct(ctx, id, Command, nil)
	if err != nil {
		return
	}
	var s Space
	if err := cbor.Unmarshal(body, &s); err != nil {
		m.opts.Log.Warn("disk space of another member", "member", id, "err", err)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.others[id] = answer{s, m.opts.Now()}
}

// report logs when a member becomes low, and when none is low any more.
func (m *Monitor) report() {
	id, s := m.Low()
	m.mu.Lock()
	was := m.lowest
	m.lowest = id
	m.mu.Unlock()
	switch {
	case id != 0 && id != was:
		m.opts.Log.Warn("disk space is low: tenants' changes are refused until there is room", "member", id, "free", s.Free, "reserve", s.Reserve)
	case id == 0 && was != 0:
		m.opts.Log.Info("disk space is no longer low", "member", was)
	}
}

// Answer is the command of that name: it returns this member's own space.
func (m *Monitor) Answer(context.Context, uint64, []byte) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cbor.Marshal(m.own)
}

// Members returns the space of all members that have answered lately.
func (m *Monitor) Members() map[uint64]Space {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[uint64]Space{m.opts.Self: m.own}
	for id, a := range m.others {
		if m.opts.Now().Sub(a.at) <= keepAnswer {
			out[id] = a.space
		}
	}
	return out
}

// Low returns the first member that is low and its space, or 0.
func (m *Monitor) Low() (uint64, Space) {
	m.mu.Lock()
	old := m.opts.Now().Sub(m.at).Abs() > fresh
	m.mu.Unlock()
	if old {
		m.measure()
	}
	all := m.Members()
	for _, id := range slices.Sorted(maps.Keys(all)) {
		if all[id].Low {
			return id, all[id]
		}
	}
	return 0, Space{}
}

// Full reports whether a member is low.
func (m *Monitor) Full() bool { id, _ := m.Low(); return id != 0 }

// freeing are the beginnings of the names of methods that remove something, or take access away.
var freeing = []string{"Delete", "Release", "Revoke", "Unbind", "Disable", "Unlink", "Abort", "Detach"}

// Admit returns a Throttled fault for a caller's change while a member is low. Reads, what removes something, operators and
// work that has no caller are admitted.
func (m *Monitor) Admit(ctx context.Context) error {
	id, s := m.Low()
	if id == 0 {
		return nil
	}
	c := auth.CallerOf(ctx)
	if c == nil || c.Method == "" || c.Node != "" || auth.Method(c.Method).Reads() || c.Governs() {
		return nil
	}
	verb := c.Method[strings.LastIndexByte(c.Method, '/')+1:]
	if slices.ContainsFunc(freeing, func(f string) bool { return strings.HasPrefix(verb, f) }) {
		return nil
	}
	return fault.New(fault.Throttled,
		"member %d of the cluster has less than %d MiB of disk space left: until an operator makes room you can read and delete, but not create or change", id, max(s.Reserve>>20, 1)).
		WithReason(Reason).MayRetryAfter(retryAfter)
}

var (
	freeDesc    = prometheus.NewDesc("trivet_disk_free_bytes", "Free space of the data directory's file system.", nil, nil)
	reserveDesc = prometheus.NewDesc("trivet_disk_reserve_bytes", "Free space below which tenants' changes are refused.", nil, nil)
	lowDesc     = prometheus.NewDesc("trivet_disk_low", "1 while this member's free space is below the reserve.", nil, nil)
)

// Describe implements prometheus.Collector.
func (m *Monitor) Describe(out chan<- *prometheus.Desc) {
	out <- freeDesc
	out <- reserveDesc
	out <- lowDesc
}

// Collect implements prometheus.Collector.
func (m *Monitor) Collect(out chan<- prometheus.Metric) {
	m.mu.Lock()
	s := m.own
	m.mu.Unlock()
	low := 0.0
	if s.Low {
		low = 1
	}
	out <- prometheus.MustNewConstMetric(freeDesc, prometheus.GaugeValue, float64(s.Free))
	out <- prometheus.MustNewConstMetric(reserveDesc, prometheus.GaugeValue, float64(s.Reserve))
	out <- prometheus.MustNewConstMetric(lowDesc, prometheus.GaugeValue, low)
}
