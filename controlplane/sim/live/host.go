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

// host is the state of one hypervisor host, which survives its agents. The records are compared with its processes and
// disks.
type host struct {
	f    *fleet
	name endpoint
	room cloud.Capacity

	token string // join token
	key   ed25519.PrivateKey
	leaf  *x509.Certificate // nil before the host has joined
	node  cloud.NodeID

	mu      sync.Mutex
	rng     *mathrand.Rand
	guests  map[cloud.VMID]*guest
	pids    uint32
	stored  map[cloud.VMID]*agentv1.AssignedVm // the last complete assignment, nil before the first
	term    uint64                             // the highest leader term received
	changed func(cloud.VMID)                   // notifies the agent that a process has ended; nil without an agent
	agent   *agent
}

// guest is the state of one VM on a host: its directory and perhaps a process.
type guest struct {
	record
	refused bool // creating the disks fails
	proc    *proc
	// How the last process ended, as far as the host can know.
	exit      cloud.Exit
	exitError string
}

// record is the data of a VM on the host's disk. It is written before the action that it records.
type record struct {
	built        bool
	startsDone   uint64
	rebootsBegun uint64
	rebootsDone  uint64
	resetsDone   uint64
	live         bool // the end of the last start is not recorded yet
	end          cloud.Exit
	exitError    string
}

func (r *record) rebooting() bool { return r.rebootsBegun > r.rebootsDone }

// proc is a simulated QEMU process.
type proc struct {
	pid     uint32
	start   uint64 // the number of the start
	takes   cloud.Capacity
	since   time.Time
	up      bool // the guest's CPUs run
	deaf    bool // the guest ignores the power button
	pressed bool
}

func newHost(f *fleet, n int, rng *mathrand.Rand) (*host, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return &host{
		f: f, name: endpoint("h" + itoa(uint64(n))), room: cloud.Capacity{VCPUs: 10, MemoryMiB: 10 << 10, StorageGiB: 80},
		key: key, rng: rng, guests: map[cloud.VMID]*guest{},
	}, err
}

// chance returns true with a probability of p percent.
func (h *host) chance(p int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rng.IntN(100) < p
}

// between returns a random duration of at least least and less than most.
func (h *host) between(least, most time.Duration) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.drawn(least, most)
}

func (h *host) drawn(least, most time.Duration) time.Duration {
	return least + time.Duration(h.rng.Int64N(int64(most-least)))
}

// shows returns the context of a member's handler for a connection with this host's certificate.
func (h *host) shows(ctx context.Context) context.Context {
	var state tls.ConnectionState
	if h.leaf != nil {
		state.PeerCertificates = []*x509.Certificate{h.leaf}
	}
	return grpcpeer.NewContext(ctx, &grpcpeer.Peer{AuthInfo: credentials.TLSInfo{State: state}})
}

// present returns the IDs of all VMs on the host.
func (h *host) present() []cloud.VMID {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.guests))
}

// look returns a copy of a VM's state, nil if the VM is not on the host.
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
		seen.proc = &p
	}
	return &seen
}

// runs returns the start and the process ID of a VM that has a process here.
func (h *host) runs(id cloud.VMID) (start uint64, pid uint32, ok bool) {
	if g := h.look(id); g != nil && g.proc != nil {
		return g.proc.start, g.proc.pid, true
	}
	return 0, 0, false
}

// build creates the disks of a VM. One VM in forty has disks that cannot be created.
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

// change changes the record of a VM.
func (h *host) change(id cloud.VMID, f func(*record)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil {
		f(&g.record)
	}
}

// launch starts a process. One launch in thirty fails. again is set for the second half of a reboot.
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
	g.proc = &proc{pid: h.pids, start: start, since: time.Now(), deaf: h.rng.IntN(6) == 0}
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
	if h.rng.IntN(30) == 0 {
		h.ended(id, g, cloud.ExitFailed, "QEMU could not start")
	}
}

// letRun starts the CPUs of a launched guest.
func (h *host) letRun(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil {
		g.proc.up = true
	}
}

// press presses the power button. Unless the guest ignores the button, it powers off after 0.3 to 9 seconds.
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

// off ends a process because its guest has powered off.
func (h *host) off(id cloud.VMID, p *proc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc == p {
		h.ended(id, g, cloud.ExitGuest, "")
	}
}

// cut kills a process.
func (h *host) cut(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil {
		h.ended(id, g, cloud.ExitRequested, "")
	}
}

// ended records the end of a process. Without an agent, the exit of a guest may be recorded as a failure. mu is held.
func (h *host) ended(id cloud.VMID, g *guest, exit cloud.Exit, exitError string) {
	h.f.trace.Add("%s: pid %d of %s ends: %d %s", h.name, g.proc.pid, short(id), exit, exitError)
	g.proc, g.exit, g.exitError = nil, exit, exitError
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
		if p := h.guests[id].proc; p != nil && p.up {
			up = append(up, id)
		}
	}
	if len(up) == 0 {
		return
	}
	id := up[h.rng.IntN(len(up))]
	if h.rng.IntN(2) == 0 {
		h.f.count("guests that power off")
		h.ended(id, h.guests[id], cloud.ExitGuest, "")
	} else {
		h.f.count("guests that crash")
		h.ended(id, h.guests[id], cloud.ExitFailed, "QEMU was killed by signal 9")
	}
}

// boot starts an agent if none runs.
func (h *host) boot() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.agent == nil && !h.f.ended() {
		h.agent = newAgent(h)
		h.changed = h.agent.happened
		h.agent.start()
	}
}

// stopAgent stops the agent. The processes of VMs continue.
func (h *host) stopAgent() {
	h.mu.Lock()
	a := h.agent
	h.agent, h.changed = nil, nil
	h.mu.Unlock()
	if a != nil {
		h.f.trace.Add("%s: its agent ends", h.name)
		a.stop()
	}
}

// crash simulates a power loss of the host: the agent and all processes end.
func (h *host) crash() {
	h.stopAgent()
	h.mu.Lock()
	defer h.mu.Unlock()
	h.f.trace.Add("%s loses power", h.name)
	for _, id := range slices.Sorted(maps.Keys(h.guests)) {
		if g := h.guests[id]; g.proc != nil {
			h.ended(id, g, cloud.ExitFailed, "the host was restarted")
		}
	}
}

// short returns the last six characters of an ID, for the trace.
func short(id cloud.VMID) string { return fmt.Sprint(id)[max(len(id)-6, 0):] }
