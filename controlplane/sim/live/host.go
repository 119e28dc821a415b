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

// host is one hypervisor host: what outlives its agents. The processes and disks here are the truth that the records are
// held against.
type host struct {
	f    *fleet
	name party
	room cloud.Capacity

	token string // of its operator, to join with
	key   ed25519.PrivateKey
	leaf  *x509.Certificate // nil before it joined
	node  cloud.NodeID

	mu      sync.Mutex
	rng     *mathrand.Rand
	guests  map[cloud.VMID]*guest
	pids    uint32
	stored  map[cloud.VMID]*agentv1.AssignedVm // the last whole assignment, nil before the first
	term    uint64                             // highest seen
	changed func(cloud.VMID)                   // tells the agent that something happened by itself; nil without one
	agent   *agent
}

// guest is all that is on a host of one VM: a directory and perhaps a process.
type guest struct {
	record
	refused bool // its disks cannot be made
	proc    *proc
	// How the process ended that is no more, as far as anybody saw.
	exit    cloud.Exit
	trouble string
}

// record is what is on the host's disk of a VM. It is written before what it speaks of is done.
type record struct {
	built        bool
	startsDone   uint64
	rebootsBegun uint64
	rebootsDone  uint64
	resetsDone   uint64
	live         bool // the last start has no recorded end
	end          cloud.Exit
	endTrouble   string
}

func (r *record) rebooting() bool { return r.rebootsBegun > r.rebootsDone }

// proc is a QEMU.
type proc struct {
	pid     uint32
	start   uint64 // the start that it is
	takes   cloud.Capacity
	since   time.Time
	up      bool // guest CPUs run
	deaf    bool // the guest ignores the power button
	pressed bool
}

func newHost(f *fleet, n int, rng *mathrand.Rand) (*host, error) {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	return &host{
		f: f, name: party("h" + itoa(uint64(n))), room: cloud.Capacity{VCPUs: 10, MemoryMiB: 10 << 10, StorageGiB: 80},
		key: key, rng: rng, guests: map[cloud.VMID]*guest{},
	}, err
}

// chance is true p times in a hundred.
func (h *host) chance(p int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.rng.IntN(100) < p
}

// between draws a duration.
func (h *host) between(least, most time.Duration) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.drawn(least, most)
}

func (h *host) drawn(least, most time.Duration) time.Duration {
	return least + time.Duration(h.rng.Int64N(int64(most-least)))
}

// shows is a context as a member's handler has it of a connection with this host's certificate.
func (h *host) shows(ctx context.Context) context.Context {
	var state tls.ConnectionState
	if h.leaf != nil {
		state.PeerCertificates = []*x509.Certificate{h.leaf}
	}
	return grpcpeer.NewContext(ctx, &grpcpeer.Peer{AuthInfo: credentials.TLSInfo{State: state}})
}

// present lists what there is.
func (h *host) present() []cloud.VMID {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Sorted(maps.Keys(h.guests))
}

// look is a copy of what there is of a VM; nil for nothing.
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

// runs says which start of a VM runs here, if any.
func (h *host) runs(id cloud.VMID) (start uint64, pid uint32, ok bool) {
	if g := h.look(id); g != nil && g.proc != nil {
		return g.proc.start, g.proc.pid, true
	}
	return 0, 0, false
}

// build makes the disks, or finds out that they cannot be made.
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

// launch makes a process. One launch in thirty fails.
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

// letRun lets a launched guest's CPUs run.
func (h *host) letRun(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil {
		g.proc.up = true
	}
}

// press presses the power button: a guest that listens goes down in its own time.
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

// off is the end of a guest that powers itself off.
func (h *host) off(id cloud.VMID, p *proc) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc == p {
		h.ended(id, g, cloud.ExitGuest, "")
	}
}

// cut ends a process at once.
func (h *host) cut(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if g := h.guests[id]; g != nil && g.proc != nil {
		h.ended(id, g, cloud.ExitAsked, "")
	}
}

// ended takes note of the end of a process. mu is held.
func (h *host) ended(id cloud.VMID, g *guest, exit cloud.Exit, trouble string) {
	h.f.trace.Add("%s: pid %d of %s ends: %d %s", h.name, g.proc.pid, short(id), exit, trouble)
	g.proc, g.exit, g.trouble = nil, exit, trouble
	if h.changed != nil {
		h.changed(id)
	} else if exit == cloud.ExitGuest && h.rng.IntN(2) == 0 {
		g.exit, g.trouble = cloud.ExitFailed, "the process ended while no agent ran"
	}
}

// destroy leaves nothing of a VM.
func (h *host) destroy(id cloud.VMID) {
	h.mu.Lock()
	defer h.mu.Unlock()
	g := h.guests[id]
	if g == nil {
		return
	}
	if g.proc != nil {
		h.ended(id, g, cloud.ExitAsked, "")
	}
	delete(h.guests, id)
	h.f.audit.destroyed(h, id)
	h.f.trace.Add("%s destroys %s", h.name, short(id))
}

// strike lets something happen to one of the guests that run.
func (h *host) strike() {
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

// boot starts an agent, as the host does when it comes up.
func (h *host) boot() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.agent == nil && !h.f.ended() {
		h.agent = newAgent(h)
		h.changed = h.agent.happened
		h.agent.start()
	}
}

// stopAgent ends the agent; everything else goes on.
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

// crash takes the host's power.
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

// short is enough of an id to read a trace by.
func short(id cloud.VMID) string { return fmt.Sprint(id)[max(len(id)-6, 0):] }
