// Package diskspace keeps tenants from filling the members' disks. While the free space of a member's disk is below a
// reserve, tenants can read and delete but not create or change anything. The reserve remains for deletions and for
// operators, who free space. The main type is Monitor.
//
// Decisions:
//   - Each member measures the file system of its data directory and queries the other members every CheckEvery. It
//     measures its own again when it admits a change. One member with low space is enough to refuse changes, as with
//     etcd's quota: all members write the same log, and the member with the smallest disk would stop first. A member
//     that does not respond is ignored, because it is probably down and writes nothing.
//   - The leader refuses commands of the platform. Each member refuses etcd requests that add data, with etcd's
//     ErrNoSpace but without its alarm, so that the refusals end as soon as there is space again.
//   - Reads, deletions, operators' calls and the cluster's own work are still admitted. They may use up the reserve;
//     then the member stops as on any full disk (package disk).
//   - A member becomes low when its free space falls below the reserve, and is no longer low at 9/8 of the reserve. The
//     distance prevents flapping.
//
// The package must not know records or transports.
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

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	// Command is the name of the command by which a member requests the disk space of another member.
	Command = "disk.space"
	// Reason is the machine-readable reason (google.rpc.ErrorInfo) of the errors of Admit.
	Reason = "DISK_SPACE_LOW"
	// CheckEvery is the time between two measurements of this member's disk, and between two queries to the other
	// members. fresh is the maximum age of the measurement by which a call is admitted. fresh is short because 100 MiB
	// can be written to a disk within a second.
	CheckEvery = time.Second
	fresh      = 100 * time.Millisecond
	// answerTime is the timeout of a query to another member. keepAnswer is how long the response of another member is
	// used.
	answerTime = time.Second
	keepAnswer = 5 * CheckEvery
	// retryAfter is the delay that the error for a refused caller recommends before a retry.
	retryAfter = 30 * time.Second
)

// Space is the free space, size and reserve of the file system of a member's data directory, in bytes.
type Space struct {
	Free, Size, Reserve int64
	// Low becomes true when Free falls below Reserve, and false when Free reaches 9/8 of Reserve.
	Low bool
}

// Peers queries the other members of the cluster.
type Peers interface {
	// Members returns the addresses of all members, including this one, by member ID.
	Members() map[uint64]string
	// Direct runs a command on a member and returns the response.
	Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error)
}

// Options configures a Monitor. Dir (the data directory), Self (this member's ID) and Log are required.
type Options struct {
	Dir  string
	Self uint64
	// Reserve is the free space in bytes below which this member's disk is low. 0 means DefaultReserve for the size of
	// the file system; with a negative value the disk is never low.
	Reserve int64
	Log     *slog.Logger
	// Stat returns the free space and size of the file system of dir, in bytes; statfs(2) when nil.
	Stat func(dir string) (free, size int64, err error)
	// Now is the clock; time.Now when nil.
	Now func() time.Time
}

// Monitor holds the last known disk space of each member, and refuses changes while one of them is low.
type Monitor struct {
	opts Options

	mu     sync.Mutex
	peers  Peers
	own    Space
	at     time.Time // time at which own was measured
	others map[uint64]answer
	lowest uint64 // ID of the low member that was logged last; 0 while no member is low
}

type answer struct {
	space Space
	at    time.Time
}

// DefaultReserve returns the default reserve for a file system of size bytes. It is a twentieth of the size, at least
// 512 MiB and at most 4 GiB, but never more than a quarter of the size. The reserve must have room for up to 128 MiB of
// acknowledged data that is not yet written to the files of the state machine.
func DefaultReserve(size int64) int64 {
	return min(max(size/20, 512<<20), 4<<30, size/4)
}

// New returns a Monitor that has measured this member's disk once. To monitor the other members, call Attach, then Run.
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

// Attach sets how the other members are queried. Call it once, before Run.
func (m *Monitor) Attach(p Peers) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.peers = p
}

// measure measures the free space of this member's disk and updates the field Low. After an error the previous
// measurement remains in use.
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

// Run calls Check every CheckEvery until ctx ends.
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

// Check measures this member's disk and requests the disk space of all other members concurrently.
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

// ask queries the free space of the member with the given ID and stores the response. After an error the previous
// response is used until it is older than keepAnswer.
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

// report logs a warning when Low returns a member that it did not return before, and an info when no member is low any
// more.
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

// Answer handles the command named Command: it returns the Space of this member as CBOR.
func (m *Monitor) Answer(context.Context, uint64, []byte) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cbor.Marshal(m.own)
}

// Members returns the Space of this member and of each member that has responded within the last keepAnswer.
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

// Low returns the ID and Space of the low member with the smallest ID, or 0 if no member is low. It first measures this
// member's disk if the last measurement is older than fresh.
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

// Full reports whether the disk of any member is low.
func (m *Monitor) Full() bool { id, _ := m.Low(); return id != 0 }

// freeing lists prefixes of the names of methods that remove data or access. These methods are admitted even if a disk
// is low.
var freeing = []string{"Delete", "Release", "Revoke", "Unbind", "Disable", "Unlink", "Abort", "Detach"}

// Admit returns a Throttled fault for a tenant's mutating call while a member's disk is low. It returns nil for reads,
// for methods that remove something, for operators and for background work without a caller.
func (m *Monitor) Admit(ctx context.Context) error {
	id, s := m.Low()
	if id == 0 {
		return nil
	}
	c := auth.CallerOf(ctx)
	if c == nil || c.Method == "" || c.Node != "" || auth.Method(c.Method).Reads() || c.IsCloudAdmin() {
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
