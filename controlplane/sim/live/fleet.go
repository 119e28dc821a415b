// Package live is ring (b), one of the two parts of the simulation; see package sim. It runs on the virtual time of
// testing/synctest. It consists of three members with their services (store, leader, identity, image, node, network,
// vm, volume) on top of consensus with its real Runner, two to four hosts with simulated agents, and three tenants. The
// package must not import package nodeagent. Its agents implement the agent protocol and the life cycle of VMs
// separately, so that a bug of the real agent is not repeated here.
//
// # What is real and what is simulated
//
// Members are built as the program builds them, except for listeners and TLS. Agents call the handlers of port 7443
// directly, with a certificate that a member has signed for them. Type mesh carries commands between members, instead
// of the program's transport. A simulated network delays these calls and messages, and can be cut. The disk of a member
// is a file system in memory that simulates crashes; image files are real files. A QEMU process is a data structure
// with a process ID. It can be launched, run, ignore the power button, power off, crash and be killed. What a host has
// stored about its VMs and volumes survives restarts of the agent and of the host. Its QEMU processes survive restarts
// of the agent only. Agents keep the records of VPCs that they receive over SyncNetworks, and acknowledge them after a
// random delay. They build no networks. A volume is an entry in a table of its host, which simulated QEMU processes
// open and close. A volume of the driver RBD or of the shared pool is an entry in a table that all hosts share. Its host
// may change while the host is not READY. A snapshot is an entry of its volume, which is complete after up to 40
// seconds, unless the agent or the host is restarted meanwhile. The agent of a host that was evicted or banned changes no
// VMs, and the guard process of the host goes on. The removal of a host without VMs is not simulated.
//
// Members have the same engine options as the program, except the sizes. StateMachineOptions.FlushBytes depends on the
// seed: some runs write each change to disk, others replay most of the log when a member restarts.
//
// # Faults
//
// One member or all members are killed and restarted. Members and hosts are isolated from the network. Agents and hosts
// restart. Guests power off and crash. Reports of agents arrive a second time, up to a minute later. All tenants create
// VMs at the same time. A host stays down until deadlines have passed, also one from which a guest is being migrated.
// Agents acknowledge network records late, replace their SyncNetworks streams before they have acknowledged, and report
// that VPCs could not be applied. Meanwhile
// tenants create, start, stop, reboot, reset, delete and list VMs, attach and detach NICs and volumes, create, enlarge
// and delete volumes, create and delete snapshots of volumes and VMs, make volumes from snapshots, and create, change
// and delete VPCs with IPv4 and IPv6, subnets, ports, security groups, floating IPs, NAT gateways and route tables.
// They repeat each call, under one idempotency key, until they get a response. An operator drains one host after the
// other, and uncordons it during the drain, after it or in its maintenance. Another one evicts or bans hosts with VMs,
// and lets them join again or removes the ban.
//
// # Checked guarantees
//
//   - In the records, after every commit: the allocated capacity of a host is the sum of two parts, the VMs placed on
//     it and the VMs that it must destroy and has not destroyed yet. It does not exceed the host's capacity. Every VM
//     has one name, one placement, and one usage record per image. An idempotency key creates at most one VM.
//     Generations and the counters of the desired state never decrease, and a changed desired state has a new
//     generation. A VM whose recorded state is STOPPED has no process.
//   - After every commit: no VM runs, starts or is to run on a host in maintenance, or has a process there.
//   - After every commit: no VM that must stop with the lease of its host has run without a lease for longer than the
//     guard process of the host needs. A VM leaves a lost host only after the lease of the host has ended.
//   - A host that was evicted, and joins again with the same key, has the same ID.
//   - On the hosts: a VM has at most one process, and all its processes are on one host. Each start is executed once.
//     Running VMs do not exceed the host's capacity. No VM that has a record is destroyed.
//   - After every commit, for volumes: an attached volume belongs to one VM, which has the volume as a disk, or which
//     is deleted and not yet destroyed by its host. A volume is attached only when it is detached and flushed, each
//     time with the next attachment generation. Generations never decrease. Only a volume of the driver RBD changes its
//     host, and only while it is detached and flushed. A volume that is recorded as detached is not open on any host.
//     The allocated space of a pool is the sum of the sizes of its volumes and snapshots.
//   - After every commit, for snapshots: an AVAILABLE snapshot has a complete copy, and its instant never changes. The
//     AVAILABLE snapshots of one call for a VM have the same instant. A volume with snapshots has a record, and the
//     record of a snapshot is removed only after its bytes. On the hosts: a volume is made only from a complete
//     snapshot.
//   - On the hosts: two VMs never open a volume at the same attachment generation, and no volume is opened at a lower
//     generation than before.
//   - For tenants: once any member has acknowledged the creation of a VM, every member lists the VM. Once any member
//     has acknowledged the deletion of a VM, no member lists it.
//   - In the network records, after every commit: no address is twice in a subnet, no MAC twice in a VPC, and an
//     address is assigned again 60 seconds after its release or later. Binding generations never decrease, and a port
//     that moves to a host has a new one. A port becomes ACTIVE only after its host has acknowledged this binding. An
//     external address has one user, a port at most one floating IP, a VPC one default NAT gateway, and a subnet one
//     route table. What they refer to exists.
//   - On the hosts: no binding of a port is older than one that the host has received before.
//   - After the end of the faults: every port of a host is ACTIVE, and no two hosts serve a floating IP. The network
//     records of every host are those of the VPCs that it needs, and a new snapshot does not change them. Every network
//     resource exists whose creation was acknowledged and whose deletion was not. After all are deleted, each table has
//     as many records as at the beginning.
//   - After the end of the faults: no VM stays in a transient state beyond its deadline, the records agree with the
//     hosts, and every call succeeds at the first attempt. After all VMs are deleted, nothing is left of them on
//     members and hosts.
package live

import (
	"cmp"
	"context"
	"crypto/x509"
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
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/sim"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

var memberIDs = []uint64{1, 2, 3}

// fleet holds the state of one simulation run: three members, the hosts, the tenants, and the network.
type fleet struct {
	seed      uint64
	rng       *rand.Rand
	trace     *sim.Trace
	log       *slog.Logger
	key       *clusterkey.Key
	authority *mtls.Authority
	token     string // an access token of the administrator
	// imports is the directory from which the members import image files.
	imports  string
	image    cloud.ImageID
	lateness int    // the percentage of reports that arrive a second time, late
	tail     uint64 // consensus.Limits.TailEntries
	// flushBytes is StateMachineOptions.FlushBytes of the members. With 1, every change is flushed, which is slow. With
	// the largest value, a restarted member applies most of its log again.
	flushBytes int64

	net          *fabric
	slots        []*memberSlot
	hosts        []*host
	tenants      []*tenantClient
	audit        *witness
	ceph, shared *commonStorage
	behind       sync.WaitGroup // the goroutines that only close waits for

	mu     sync.Mutex
	counts map[string]int
	// abandoned is true if the simulation ends without a result.
	abandoned bool
	// broken describes the first violation of a checked guarantee; "" if there was none.
	broken string
	rushed chan struct{} // closed when all tenants must create a VM
	last   bool          // whether tenants must begin no new calls
	over   bool          // whether no member or agent may start any more
	// serial is the number that the method number returned last.
	serial uint64
	byNode map[cloud.NodeID]*host
}

// Outcome has the event counters and the trace of a run. Run fills it in also when it has found a violation.
type Outcome struct {
	Counts map[string]int
	Trace  string
}

// Run runs the simulation once, on virtual time. If a guarantee was violated, it returns a *sim.Violation. The seed
// determines the faults and their times, but not how goroutines are scheduled.
func Run(t *testing.T, seed uint64) (out Outcome, err error) {
	dir := t.TempDir()
	defer os.RemoveAll(dir) // a test may call Run many times
	var f *fleet
	synctest.Test(t, func(t *testing.T) {
		f = &fleet{
			seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), key: clusterkey.Generate(),
			counts: map[string]int{}, rushed: make(chan struct{}), byNode: map[cloud.NodeID]*host{}, imports: filepath.Join(dir, layout.ImportDir),
		}
		began := time.Now()
		f.tail = 8 << f.rng.IntN(5)
		f.flushBytes = []int64{1, 8 << 10, 32 << 10, 64 << 10, 256 << 10}[seed%5]
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

// logged is an io.Writer that adds log lines to a trace.
type logged struct{ trace *sim.Trace }

// Write adds one log line to the trace.
func (l logged) Write(b []byte) (int, error) {
	l.trace.Add("log %s", b[:len(b)-1])
	return len(b), nil
}

// source returns a new random source. It is determined by the seed of the run and by n, so each user of randomness has
// its own n.
func (f *fleet) source(n uint64) *rand.Rand { return rand.New(rand.NewPCG(f.seed, n)) }

func (f *fleet) count(what string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.counts[what]++
}

// fail records a violation, which Run returns at the end. Only the first violation is recorded.
func (f *fleet) fail(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken == "" && !f.abandoned {
		f.broken = fmt.Sprintf(format, args...)
		f.trace.Add("BROKEN: %s", f.broken)
	}
}

func (f *fleet) failed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.broken != "" || f.abandoned
}

// closing reports whether tenants must begin no new calls. That is so after the faults have ended, and after a
// violation.
func (f *fleet) closing() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.last || f.broken != "" || f.abandoned
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

func (f *fleet) slot(id uint64) *memberSlot { return f.slots[id-1] }

// joined stores the certificate and the ID of a host that has joined. A host that joins again must get the same ID.
func (f *fleet) joined(h *host, leaf *x509.Certificate, id cloud.NodeID) {
	h.mu.Lock()
	h.leaf = leaf
	before := h.node
	if before == "" {
		h.node = id
	}
	h.mu.Unlock()
	f.trace.Add("%s is node %s", h.name, id)
	if before != "" && before != id {
		f.fail("%s joins again as node %s, and was node %s", h.name, id, before)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.byNode[id] = h
}

func (f *fleet) hostOf(id cloud.NodeID) *host {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.byNode[id]
}

// run executes one simulation: it starts the members, hosts and tenants, injects faults, ends the faults, and checks
// the result.
func (f *fleet) run(dir string) (err error) {
	if f.authority, err = f.key.Authority(); err != nil {
		return err
	}
	if f.token, err = identity.HostToken(f.key, cloud.Tenant{}, time.Now(), 24*time.Hour); err != nil {
		return err
	}
	f.net, f.audit = newFabric(f.source(2)), newAudit(f)
	f.ceph, f.shared = newCommonStorage(f, "RBD images", false), newCommonStorage(f, "shared volumes", true)
	for _, id := range memberIDs {
		s := &memberSlot{f: f, id: id, name: endpoint("m" + itoa(id)), dir: filepath.Join(dir, itoa(id)), disk: vfs.NewCrashableMem(), turn: make(chan struct{}, 1)}
		f.slots = append(f.slots, s)
	}
	defer func() { err = errors.Join(err, f.close()) }()
	for _, s := range f.slots {
		if err := s.start(); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if err := f.createResources(ctx); err != nil {
		return err
	}
	var work sync.WaitGroup
	for n := range 3 {
		t := &tenantClient{f: f, name: fmt.Sprintf("t%d", n+1), rng: f.source(uint64(200 + n)), networks: map[resourceKind][]networkResource{}}
		f.tenants = append(f.tenants, t)
		work.Go(func() { t.life(ctx) })
	}
	work.Go(func() { f.drainHosts(ctx) })
	work.Go(func() { f.excludeHosts(ctx) })
	f.injectFaults()
	f.heal()
	work.Wait()
	f.rest(ctx)
	return nil
}

// within calls the function try every 250 ms of virtual time until it succeeds or the duration given as most has
// passed. It returns the error of the last call.
func within(most time.Duration, try func() error) error {
	for end := time.Now().Add(most); ; {
		err := try()
		if err == nil || time.Now().After(end) {
			return err
		}
		time.Sleep(250 * time.Millisecond)
	}
}

// rest is called after the faults have ended. It waits until the cloud has settled, and checks the result. Then it
// makes the tenants delete all VMs, and checks that nothing remains of them.
func (f *fleet) rest(ctx context.Context) {
	f.settle("the last fault", f.audit.unsettled)
	if f.rng.IntN(3) == 0 && !f.failed() {
		f.lose(ctx)
	}
	if f.failed() {
		return
	}
	f.audit.final()
	f.compareSnapshots()
	for _, t := range f.tenants {
		t.final()
		t.finalNetworks()
		t.finalVolumes()
		t.finalSnapshots()
		t.deleteAll(ctx)
	}
	time.Sleep(time.Second) // until the witness has seen the deletions
	f.tenants[0].deleteNetworks(ctx)
	f.settle("the last VM was deleted", func() string { return cmp.Or(f.audit.unsettled(), f.audit.leftovers()) })
	if !f.failed() {
		f.tenants[0].endSchedules(ctx)
		f.tenants[0].deleteSnapshots(ctx)
		f.settle("the last snapshot was deleted", f.audit.unsettled)
		f.tenants[0].deleteVolumes(ctx)
		f.settle("the last volume was deleted", f.audit.leftVolumes)
	}
}

// settle waits until the function unsettled returns "". It reports a violation if that takes more than four minutes, or
// if a VM stays in a transient state after its deadline. The string since names the event before settle, for the
// message of the violation.
func (f *fleet) settle(since string, unsettled func() string) {
	const most = 4 * time.Minute
	// lead is the maximum time that a new leader may need before it acts on deadlines that have passed.
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

// close ends all agents and members, and waits for all goroutines.
func (f *fleet) close() error {
	f.mu.Lock()
	f.over = true
	f.mu.Unlock()
	for _, h := range f.hosts {
		h.stopAgent()
	}
	var errs []error
	for _, s := range f.slots {
		errs = append(errs, s.kill(f.rng))
	}
	f.behind.Wait()
	// Other goroutines of the members end at their own timeouts, each within an hour of virtual time.
	time.Sleep(time.Hour)
	return errors.Join(errs...)
}
