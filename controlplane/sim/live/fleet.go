// Package live is ring (b) of the simulation: the services of three members (store, lead, identity, image, node, vm) over
// consensus with its real runner, some hosts with simulated agents, and tenants, on the virtual time of testing/synctest.
// It must not know how a host does what it does: agents here follow the protocol and the VM's design on their own, so that
// they do not share the mistakes of package nodeagent. See package sim for the whole.
//
// # What is real and what is not
//
// Members are built as the program builds them, but for listeners and TLS: agents call the handlers of port 7443 with a
// certificate that a member signed for them, commands travel between members as lead and peer would carry them, and a
// network in between delays, holds and cuts everything. A member's disk is crashable memory; image files are real files.
// QEMU is a record with a process id that can be launched, run, ignore the power button, power off, crash and be cut. What
// a host knows of its VMs outlives its agent; its processes outlive the agent, not the host.
//
// # What happens
//
// Members are killed, one or all, and come back; members and hosts are cut off; agents and hosts restart; guests power off
// and crash; reports come again, much later; all tenants create at once; a host is lost for so long that deadlines pass.
// Tenants create, start, stop, reboot, reset, delete and list, each call under an idempotency key, again and again until
// it is answered.
//
// # What must hold
//
// After every commit, read whole and in order from the records: what a host has allocated is the sum of what is placed on
// it and of what it was told to destroy and has not yet, and never more than it has; every VM has one name, one placement
// and its images' marks; one create is made for a key; generations and wishes only grow, and a changed wish is a new
// generation; what is recorded STOPPED does not run. On the hosts: one process of a VM, on one host, each start made once,
// nothing runs beyond what a host has, nothing is destroyed that has a record. For tenants: what was acknowledged is there,
// on every member at once, and what was deleted is not. At peace: no state outlives its deadline, records say what hosts
// do, every call is answered at the first try, and when all is deleted nothing is left of it anywhere.
package live

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/sim"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

var memberIDs = []uint64{1, 2, 3}

// fleet is ring (b): the trio, its hosts, its tenants, and the trouble they have.
type fleet struct {
	seed      uint64
	rng       *rand.Rand
	trace     *sim.Trace
	log       *slog.Logger
	key       *clusterkey.Key
	authority *mtls.Authority
	token     string // of the administrator
	imports   string
	image     cloud.ImageID
	lateness  int    // percent of reports that arrive once more, late
	tail      uint64 // entries of the log that are kept for members that were away

	net     *fabric
	seats   []*seat
	hosts   []*host
	tenants []*customer
	audit   *witness
	behind  sync.WaitGroup // what nobody waits for before the end

	mu     sync.Mutex
	counts map[string]int
	broken string
	rushed chan struct{} // closed when all tenants create at once
	last   bool          // tenants begin nothing new
	over   bool          // nothing starts any more
	serial uint64
	byNode map[cloud.NodeID]*host
}

// Outcome is what a run came to.
type Outcome struct {
	Counts map[string]int
	Trace  string
}

// Run runs one seed of ring (b) on virtual time and returns what it came to, or a *sim.Violation. The seed decides what
// happens to whom and when; how goroutines take turns it does not.
func Run(t *testing.T, seed uint64) (out Outcome, err error) {
	dir := t.TempDir()
	defer os.RemoveAll(dir) // there may be many runs in one test
	var f *fleet
	synctest.Test(t, func(t *testing.T) {
		f = &fleet{
			seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), key: clusterkey.Generate(),
			counts: map[string]int{}, rushed: make(chan struct{}), byNode: map[cloud.NodeID]*host{}, imports: filepath.Join(dir, layout.ImportDir),
		}
		began := time.Now()
		f.tail = 8 << f.rng.IntN(5)
		f.trace = sim.NewTrace(func() string { return fmt.Sprintf("%8.3f", time.Since(began).Seconds()) })
		f.log = slog.New(slog.NewTextHandler(logged{f.trace}, &slog.HandlerOptions{Level: slog.LevelInfo}))
		if err := f.run(dir); err != nil {
			f.fail("%v", err)
		}
	})
	out = Outcome{Counts: f.counts, Trace: f.trace.String()}
	if f.broken != "" {
		return out, &sim.Violation{Ring: "b", Seed: seed, Says: f.broken, Trace: f.trace}
	}
	return out, nil
}

// logged writes logs into a trace.
type logged struct{ trace *sim.Trace }

// Write implements io.Writer.
func (l logged) Write(b []byte) (int, error) {
	l.trace.Add("log %s", b[:len(b)-1])
	return len(b), nil
}

// source is another source of chance.
func (f *fleet) source(n uint64) *rand.Rand { return rand.New(rand.NewPCG(f.seed, n)) }

func (f *fleet) count(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[what]++
}

// fail notes the first broken promise.
func (f *fleet) fail(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken == "" {
		f.broken = fmt.Sprintf(format, args...)
		f.trace.Add("BROKEN: %s", f.broken)
	}
}

func (f *fleet) failed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.broken != ""
}

// closing says that tenants begin nothing new.
func (f *fleet) closing() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last || f.broken != ""
}

func (f *fleet) late() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lateness
}

func (f *fleet) number() uint64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.serial++
	return f.serial
}

func (f *fleet) seat(id uint64) *seat { return f.seats[id-1] }

func (f *fleet) joined(h *host) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.byNode[h.node] = h
	f.trace.Add("%s is node %s", h.name, h.node)
}

func (f *fleet) hostOf(id cloud.NodeID) *host {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.byNode[id]
}

// run is the whole story: a cloud comes up, lives through trouble, and comes to rest.
func (f *fleet) run(dir string) (err error) {
	if f.authority, err = f.key.Authority(); err != nil {
		return err
	}
	if f.token, err = identity.HostToken(f.key, cloud.Tenant{}, time.Now(), 24*time.Hour); err != nil {
		return err
	}
	f.net, f.audit = newFabric(f.source(2)), newAudit(f)
	for _, id := range memberIDs {
		s := &seat{f: f, id: id, name: party("m" + itoa(id)), dir: filepath.Join(dir, itoa(id)), disk: vfs.NewCrashableMem(), turn: make(chan struct{}, 1)}
		f.seats = append(f.seats, s)
	}
	defer func() { err = errors.Join(err, f.close()) }()
	for _, s := range f.seats {
		if err := s.start(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if err := f.furnish(ctx); err != nil {
		return err
	}
	var work sync.WaitGroup
	for n := range 3 {
		t := &customer{f: f, name: fmt.Sprintf("t%d", n+1), rng: f.source(uint64(200 + n))}
		f.tenants = append(f.tenants, t)
		work.Go(func() { t.life(ctx) })
	}
	f.trouble()
	f.heal()
	work.Wait()
	f.rest(ctx)
	return nil
}

// within tries until something works, for a while of virtual time.
func within(most time.Duration, try func() error) error {
	for end := time.Now().Add(most); ; {
		err := try()
		if err == nil || time.Now().After(end) {
			return err
		}
		time.Sleep(250 * time.Millisecond)
	}
}

// furnish makes an image and hosts.
func (f *fleet) furnish(ctx context.Context) error {
	if err := os.MkdirAll(f.imports, 0o700); err != nil {
		return err
	}
	source := filepath.Join(f.imports, "small.raw")
	if err := os.WriteFile(source, make([]byte, 64<<10), 0o600); err != nil {
		return err
	}
	p := f.seats[0].current()
	admin := func() (context.Context, error) {
		caller, err := p.identities.Verify(ctx, f.token)
		return auth.With(ctx, caller, auth.RPC), err
	}
	if err := within(30*time.Second, func() error {
		ctx, err := admin()
		if err != nil {
			return err
		}
		made, err := p.images.Create(ctx, cloud.Image{
			Name: "small", Org: tenant.Default.Org, Format: cloud.FormatRaw, Source: "file://" + source,
		}, [32]byte{})
		f.image = made.Image.ID
		return err
	}); err != nil {
		return fmt.Errorf("create the image: %w", err)
	}
	if err := within(time.Minute, func() error {
		i, err := p.images.Get(ctx, tenant.Default.Org, f.image)
		if err == nil && i.Status != cloud.ImageAvailable {
			err = fmt.Errorf("it is %s", i.Status)
		}
		return err
	}); err != nil {
		return fmt.Errorf("wait for the image: %w", err)
	}
	for n := range 2 + f.rng.IntN(3) {
		h, err := newHost(f, n+1, f.source(uint64(100+n)))
		if err != nil {
			return err
		}
		if err := within(30*time.Second, func() (err error) {
			h.token, _, err = p.nodes.NewToken(ctx, string(h.name), 0)
			return err
		}); err != nil {
			return fmt.Errorf("make a join token: %w", err)
		}
		f.hosts = append(f.hosts, h)
		h.boot()
	}
	return within(time.Minute, func() error {
		f.audit.mu.Lock()
		defer f.audit.mu.Unlock()
		ready := 0
		for id, n := range f.audit.nodes {
			if h := f.hostOf(id); h != nil && n.Allocatable == h.room {
				ready++
			}
		}
		if ready < len(f.hosts) {
			return fmt.Errorf("%d of %d hosts are ready", ready, len(f.hosts))
		}
		return nil
	})
}

// rest waits until everything has come to rest and judges what is left; then it lets the tenants delete all they have,
// after which nothing must be left.
func (f *fleet) rest(ctx context.Context) {
	f.settle("the last fault", f.audit.unsettled)
	if f.rng.IntN(3) == 0 && !f.failed() {
		f.lose(ctx)
	}
	if f.failed() {
		return
	}
	f.audit.final()
	for _, t := range f.tenants {
		t.final()
		t.farewell(ctx)
	}
	f.settle("the last VM was deleted", func() string { return cmp.Or(f.audit.unsettled(), f.audit.leftovers()) })
}

// settle waits for as long as a healthy cloud may take, and some.
func (f *fleet) settle(since string, unsettled func() string) {
	const most = 4 * time.Minute
	// lead is how long a new leader may take to find out what is late.
	const lead = 30 * time.Second
	began := time.Now()
	for end := began.Add(most); !f.failed(); {
		time.Sleep(time.Second)
		why := unsettled()
		if why == "" {
			return
		}
		if time.Since(began) > lead {
			if late := f.audit.overdue(time.Now().Add(-lead).UnixMilli()); late != "" {
				f.fail("%s after %s: %s", time.Since(began), since, late)
			}
		}
		if time.Now().After(end) {
			f.fail("%s after %s the cloud has not settled: %s", most, since, why)
		}
	}
}

func (f *fleet) ended() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.over
}

// close ends everything.
func (f *fleet) close() error {
	f.mu.Lock()
	f.over = true
	f.mu.Unlock()
	for _, h := range f.hosts {
		h.stopAgent()
	}
	var errs []error
	for _, s := range f.seats {
		errs = append(errs, s.kill(f.rng))
	}
	f.behind.Wait()
	// Whatever else a process left under way has a deadline.
	time.Sleep(time.Hour)
	return errors.Join(errs...)
}
