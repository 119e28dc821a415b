package live

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// host is the simulated state of one hypervisor host, which survives restarts of its agent. The witness compares the
// host's processes and disks with the members' records.
type host struct {
	f    *fleet
	name endpoint
	// room is the host's total capacity for VMs: vCPUs, memory and storage.
	room cloud.Capacity
	// vtep is the address of the host on the underlay.
	vtep     string
	networks *hostNetworks

	token string // the join token, with which the host registers as a node
	key   ed25519.PrivateKey
	leaf  *x509.Certificate // the certificate of the host; nil before the host has joined
	node  cloud.NodeID

	mu      sync.Mutex
	rng     *mathrand.Rand
	guests  map[cloud.VMID]*guest
	volumes map[cloud.VolumeID]*storedVolume
	pids    uint32
	stored  map[cloud.VMID]*agentv1.AssignedVm // the last complete assignment, on disk; nil before the first
	term    uint64                             // the highest leader term received
	changed func(cloud.VMID)                   // tells the agent that a VM's process has ended; nil without an agent
	agent   *agent
	// lease is the end of the host's lease. It is stored, so that it survives a restart of the agent.
	lease time.Time
}

// guest is the state of one VM on a host: what is stored on disk, and the process if the VM runs.
type guest struct {
	record
	refused bool // whether creating the disks fails
	proc    *proc
	// exit and exitError say how the VM's last process ended, as far as the host knows. If no agent was running at that
	// time, the host may record a failure instead of a power-off.
	exit      cloud.Exit
	exitError string
}

// record is the data that a host stores on disk about a VM. It is written before the action that it describes is
// executed.
type record struct {
	built        bool
	startsDone   uint64
	rebootsBegun uint64
	rebootsDone  uint64
	resetsDone   uint64
	// stopsWithLease is true if the VM must not run after the host's lease has ended.
	stopsWithLease bool
	migration      migrationRecord
	live           bool // a start was begun whose end is not recorded yet
	end            cloud.Exit
	exitError      string
}

func (r *record) rebooting() bool { return r.rebootsBegun > r.rebootsDone }

// proc is a simulated QEMU process of a VM.
type proc struct {
	pid   uint32
	start uint64 // number of the start that launched it
	// takes is the part of the host's capacity that the process uses.
	takes cloud.Capacity
	since time.Time
	up    bool // whether the guest's CPUs run
	deaf  bool // whether the guest ignores the power button
	// pressed is true if the power button was pressed, so that the guest will power off.
	pressed bool
	// paused is true while the guest is paused for a switchover, and pausedAt is the time at which it was paused. incoming
	// is the attempt of the migration for which the process waits, or 0. received is true when the process has the
	// complete state of the guest.
	paused   bool
	pausedAt time.Time
	incoming uint64
	received bool
	// nics has the NICs of the guest, by ID.
	nics map[string]bool
	// volumes has the volumes of the guest, by disk ID. refused has the reasons for volumes that could not be attached
	// or detached, also by disk ID. They apply to the generation settled of the desired state.
	volumes map[string]cloud.VolumeID
	refused map[string]string
	settled uint64
}

func newHost(f *fleet, n int, rng *mathrand.Rand) (*host, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return &host{
		f: f, name: endpoint("h" + itoa(uint64(n))), room: cloud.Capacity{VCPUs: 10, MemoryMiB: 10 << 10, StorageGiB: 80},
		key: key, rng: rng, guests: map[cloud.VMID]*guest{}, volumes: map[cloud.VolumeID]*storedVolume{}, vtep: vtepOf(n), networks: newHostNetworks(),
	}, err
}

// chance returns true with a probability of p percent. It uses the host's random source.
func (h *host) chance(p int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rng.IntN(100) < p
}

// between returns a random duration d from the host's random source, with least <= d < most.
func (h *host) between(least, most time.Duration) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.drawn(least, most)
}

func (h *host) drawn(least, most time.Duration) time.Duration {
	return least + time.Duration(h.rng.Int64N(int64(most-least)))
}

// shows returns a copy of ctx for a call of a member's method. In it, the caller's TLS certificate is that of this
// host, as if the call had come over the network.
func (h *host) shows(ctx context.Context) context.Context {
	var state tls.ConnectionState
	h.mu.Lock()
	if h.leaf != nil {
		state.PeerCertificates = []*x509.Certificate{h.leaf}
	}
	h.mu.Unlock()
	return grpcpeer.NewContext(ctx, &grpcpeer.Peer{AuthInfo: credentials.TLSInfo{State: state}})
}

// present returns the IDs of all VMs on the host, sorted.
func (h *host) present() []cloud.VMID {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.guests))
}

// look returns a copy of a VM's state on the host. It returns nil if the VM is not on the host.
func (h *host) look(id cloud.VMID) *guest {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil {
		return nil
	}
	seen := *g
	if g.proc != nil {
		p := *g.proc
		p.nics, p.volumes, p.refused = maps.Clone(p.nics), maps.Clone(p.volumes), maps.Clone(p.refused)
		seen.proc = &p
	}
	return &seen
}

// runs returns the start number and the process ID of a VM's process on the host. ok is false if the VM has no process
// there.
func (h *host) runs(id cloud.VMID) (start uint64, pid uint32, ok bool) {
	if g := h.look(id); g != nil && g.proc != nil {
		return g.proc.start, g.proc.pid, true
	}
	return 0, 0, false
}

// build creates the disks of a VM. For one VM in forty, at random, the disks can never be created.
func (h *host) build(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil {
		g = &guest{refused: h.rng.IntN(40) == 0}
		h.guests[id] = g
	}
	g.built = !g.refused
}

// change calls f to modify the VM's record on disk. It does nothing if the VM is not on the host.
func (h *host) change(id cloud.VMID, f func(*record)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil {
		f(&g.record)
	}
}

// launch starts a process of a VM. One launch in thirty fails, at random. again is true if the process completes a
// reboot, and false if it is the first process of a requested start.
func (h *host) launch(want *agentv1.AssignedVm, start uint64, again bool) {
	id := cloud.VMID(want.GetVmId())
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil {
		return
	}
	if g.proc != nil {
		h.f.fail("%s launches VM %s beside process %d of it", h.name, id, g.proc.pid)
	}
	h.f.audit.launched(h, id, start, again)
	h.pids++
	g.proc = &proc{pid: h.pids, start: start, since: time.Now(), deaf: h.rng.IntN(6) == 0, nics: nicsOf(want)}
	g.proc.takes = cloud.Capacity{VCPUs: want.GetVcpus(), MemoryMiB: want.GetMemoryMib()}
	var taken cloud.Capacity
	for _, g := range h.guests {
		if g.proc != nil {
			taken = taken.Plus(g.proc.takes)
		}
	}
	if taken.VCPUs > h.room.VCPUs || taken.MemoryMiB > h.room.MemoryMiB {
		h.f.fail("%s runs guests of %+v together, it has room for %+v", h.name, taken, h.room)
	}
	h.f.trace.Add("%s launches %s, start %d, pid %d", h.name, short(id), start, g.proc.pid)
	h.f.count("launches")
	g.proc.volumes = map[string]cloud.VolumeID{}
	for disk, a := range volumesOf(want) {
		if !h.open(id, a) {
			h.ended(id, g, cloud.ExitFailed, "a volume belongs to a later attachment")
			return
		}
		g.proc.volumes[disk] = cloud.VolumeID(a.GetVolumeId())
	}
	if h.rng.IntN(30) == 0 {
		h.ended(id, g, cloud.ExitFailed, "QEMU could not start")
	}
}

// letRun starts the virtual CPUs of a VM that was launched, so that the guest runs.
func (h *host) letRun(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil {
		g.proc.up = true
	}
}

// setNICs attaches and detaches NICs of a running guest, so that it has exactly those of its desired state.
func (h *host) setNICs(id cloud.VMID, want *agentv1.AssignedVm) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil {
		g.proc.nics = nicsOf(want)
	}
}

// nicsOf returns the IDs of the NICs in the desired state of a VM.
func nicsOf(want *agentv1.AssignedVm) map[string]bool {
	out := map[string]bool{}
	for _, n := range want.GetNics() {
		out[n.GetId()] = true
	}
	return out
}

// press presses the power button of a VM. The guest then powers off after 0.3 to 9 seconds, unless the simulation has
// chosen it as one that ignores the button.
func (h *host) press(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil || g.proc == nil || g.proc.pressed || g.proc.deaf {
		return
	}
	g.proc.pressed = true
	p := g.proc
	time.AfterFunc(h.drawn(300*time.Millisecond, 9*time.Second), func() { h.off(id, p) })
}

// off ends the process p of a VM, because its guest has powered off. It does nothing if p is no longer the VM's
// process.
func (h *host) off(id cloud.VMID, p *proc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc == p {
		h.ended(id, g, cloud.ExitGuest, "")
	}
}

// cut kills the process of a VM without giving the guest time to shut down.
func (h *host) cut(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil {
		h.ended(id, g, cloud.ExitRequested, "")
	}
}

// ended removes a VM's process and records how the process ended. If no agent is running, the host may record a failure
// although the guest powered off. The caller must hold h.mu.
func (h *host) ended(id cloud.VMID, g *guest, exit cloud.Exit, exitError string) {
	h.f.trace.Add("%s: pid %d of %s ends: %d %s", h.name, g.proc.pid, short(id), exit, exitError)
	g.proc, g.exit, g.exitError = nil, exit, exitError
	h.f.audit.stopped(h, id)
	h.closeVolumes(id)
	if h.changed != nil {
		h.changed(id)
	} else if exit == cloud.ExitGuest && h.rng.IntN(2) == 0 {
		g.exit, g.exitError = cloud.ExitFailed, "the process ended while no agent ran"
	}
}

// destroy kills the process of a VM and removes the VM from the host.
func (h *host) destroy(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil {
		return
	}
	if g.proc != nil {
		h.ended(id, g, cloud.ExitRequested, "")
	}
	delete(h.guests, id)
	h.f.audit.destroyed(h, id)
	h.f.trace.Add("%s destroys %s", h.name, short(id))
}

// endRandomGuest makes a random running guest power off or crash.
func (h *host) endRandomGuest() {
	h.mu.Lock()
	defer h.mu.Unlock()
	var up []cloud.VMID
	for _, id := range slices.Sorted(maps.Keys(h.guests)) {
		if p := h.guests[id].proc; p != nil && (p.up || p.incoming != 0) {
			up = append(up, id)
		}
	}
	if len(up) == 0 {
		return
	}
	id := up[h.rng.IntN(len(up))]
	if p := h.guests[id].proc; h.rng.IntN(2) == 0 && p.up && !p.paused {
		h.f.count("guests that power off")
		h.ended(id, h.guests[id], cloud.ExitGuest, "")
	} else {
		h.f.count("guests that crash")
		h.ended(id, h.guests[id], cloud.ExitFailed, "QEMU was killed by signal 9")
	}
}

// boot starts the host's agent. It does nothing if an agent already runs or the simulation is ending.
func (h *host) boot() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.agent == nil && !h.f.ended() {
		h.agent = newAgent(h)
		h.changed = h.agent.happened
		h.agent.start()
	}
}

// stopAgent ends the host's agent. The processes of VMs continue to run.
func (h *host) stopAgent() {
	h.mu.Lock()
	a := h.agent
	h.mu.Unlock()
	if a != nil {
		h.endAgent(a)
	}
}

// crash simulates a power loss of the host: the agent and all processes end.
func (h *host) crash() {
	h.stopAgent() // so that nothing is recorded about the volumes that the processes had open
	h.mu.Lock()
	defer h.mu.Unlock()
	h.f.trace.Add("%s loses power", h.name)
	for _, id := range slices.Sorted(maps.Keys(h.guests)) {
		if g := h.guests[id]; g.proc != nil {
			h.ended(id, g, cloud.ExitFailed, "the host was restarted")
		}
	}
}

// short returns the last six characters of a VM ID. The trace uses this short form.
func short(id cloud.VMID) string { return fmt.Sprint(id)[max(len(id)-6, 0):] }
