// Package vpc keeps the VPCs of this host as the control plane wants them. [Networks] receives updates, computes the
// wanted state of each VPC ([cloud.HostVPC]), and applies it through packages netdev, firewall, peering, edge,
// balancer, dhcp, resolver and metadata.
//
// # One update
//
// Networks.Apply changes the records (tables.go) and wakes one goroutine for each VPC whose records changed
// (worker.go). The goroutine computes the wanted state (hostvpc.go) and passes it to plane.apply (plane.go), which sets
// devices, packet filter, peerings, external networks, DHCP, DNS, metadata and service IPs, and at last sets the ports
// up. When all VPCs of an update are applied or have failed, Options.Acknowledge gets the update's revision and the
// failures (progress.go).
//
// # Decisions
//
//   - The agent changes no device and no packet filter before the first snapshot. Then it removes the VPCs that the
//     snapshot does not name, including those that an earlier process of the agent made.
//   - The kernel has the state; a restarted agent compares it with the snapshot, and writes nothing if they agree.
//   - The data that the DHCP, DNS and metadata servers need is also stored in files (stored.go), because the kernel
//     does not have it. So a restarted agent answers guests even if no member of the control plane is reachable. The
//     files have no other use, and are not read for a VPC whose state from the control plane was applied. They can be a
//     second old.
//   - Each VPC has a goroutine of its own, so that a slow or failing VPC does not delay others. Updates that arrive
//     while a VPC is being applied are applied together afterwards. At most Options.Parallel VPCs are applied at a
//     time.
//   - A VPC that failed is tried again with growing pauses. Meanwhile its last state stays in force.
//   - Every VPC is compared with the kernel's state every 30 s, however many updates arrive, at first, and after a
//     failure. If that writes anything without an update, somebody changed the kernel's state by hand: the writes are
//     logged and counted. Between these times, the application of an update reads as little as possible.
//   - A wrong record is left out or keeps its last valid content, and the VPC is reported as failed. The other records
//     of the VPC are applied: a wrong port must not stop the revocation of a rule. A snapshot does not end the last
//     valid content of a wrong record. A VPC whose own record never was valid in this process is not changed at all:
//     its guests would lose their taps, and get them back only at their next start.
//   - Of an address pair with more than one address, no address becomes a member of the port's groups.
//   - A host also has the peers of the VPCs of its ports, even without ports in these peers. Of such a peer it has
//     everything except the default NAT gateway, which no port on the host could use.
//   - The agent checks the backends on this host (health.go), and applies the results at once, even if the records
//     differ. It reports them for as long as the records differ, so that no report is lost and the agent need not
//     remember which ones it has sent.
//   - A host that has no contact to the control plane for cloud.AddressLease withdraws the addresses of NAT gateways
//     and of floating IPs of service IPs, which another host may take over, and nothing else (contact.go). The time is
//     measured with the monotonic clock of the host. An agent that starts without contact withdraws nothing, because it
//     does not know these addresses before its first snapshot.
//   - A tap is opened only when the packet filter for its port is installed, and is set up at once.
//
// The package does not know the connection to the control plane and how guests are run.
package vpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/edge"
	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/health"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/retry"
)

const (
	// resyncInterval is the time after which a VPC is compared with the kernel's state although nothing changed.
	resyncInterval = 30 * time.Second
	// defaultParallel is the default of Options.Parallel.
	defaultParallel = 4
)

// looseWindow is the time after the end of a live migration during which a host accepts packets of TCP connections
// whose beginning it has not seen. A connection without a packet in this time is interrupted.
const looseWindow = 2 * time.Minute

// retries are the pauses between attempts to apply a VPC.
var retries = retry.Pauses{First: 200 * time.Millisecond, Last: 30 * time.Second, Jitter: 0.2}

// Options are the parameters of Networks.
type Options struct {
	// VTEP is the host's address on the underlay, as in the Host's options. Required.
	VTEP netip.Addr
	// Host makes the network devices. The caller closes it after Networks. Required.
	Host *netdev.Host
	// Firewall filters the packets. It must trust the VXLAN devices, vx*. Required.
	Firewall *firewall.Firewall
	// Edge connects VPCs to external networks. The caller closes it after Networks. Nil on a host without external
	// networks, where NAT gateways and floating IPs have no effect.
	Edge *edge.Edge
	// Upstreams returns the host's own resolvers. Required.
	Upstreams func() []netip.AddrPort
	// Acknowledge receives the newest revision that is applied, and the VPCs that failed, whenever one of these changes.
	// It must not block. Required.
	Acknowledge func(cloud.NetworkAck)
	// Report receives the health of the backends on this host that differs from the records, at most 1,000. It is called
	// again until the records agree. It must not block. Without it, only this host uses the results of its checks.
	Report func([]cloud.BackendHealth)
	// Guest returns what the metadata service serves to the guest of the VM with an ID. It must not block. known is
	// false if the agent does not know the VMs of the host yet: the metadata service then serves no guest. Without
	// Guest, guests have no SSH keys and no user data, and need session tokens.
	Guest func(vm string) (data GuestData, known bool)
	// Contact returns the time at which the agent sent the last heartbeat that a member has acknowledged. It returns false
	// before the first one. It must not block. After cloud.AddressLease without contact, the host withdraws the external
	// addresses that other hosts can take over. Without Contact, it never does.
	Contact func() (time.Time, bool)
	// Dir is a directory for the state of VPCs, which New makes. From it, a restarted agent serves DHCP, DNS and metadata
	// before the control plane has sent the VPCs. Without it, the state is not stored.
	Dir string
	// Parallel is the number of VPCs that are applied at a time. The default is 4.
	Parallel int
	Log      *slog.Logger // required

	// resync replaces resyncInterval, and lease replaces cloud.AddressLease, in tests.
	resync, lease time.Duration
}

// Networks keeps the VPCs of this host as the updates want them. Its methods may be called concurrently, except Close.
type Networks struct {
	o       Options
	plane   plane
	checker *health.Checker
	// migrations sets LooseTCP of VPCs, so that the TCP connections of VMs that were migrated to this host continue.
	migrations *netdev.Migrations
	slots      chan struct{} // has an element for each VPC that is being applied
	ctx        context.Context
	cancel     context.CancelFunc
	done       sync.WaitGroup

	mu       sync.RWMutex // guards the fields below and the workers' fields
	tables   tables
	workers  map[cloud.VPCID]*worker
	progress progress
	counts   Counts
	changed  chan struct{} // closed and replaced when a VPC was applied
	closed   bool
	contact  contact
	// restored are the VPCs that are served from files because no update with them was applied yet.
	restored map[cloud.VPCID]*restoredVPC
	unsaved  map[cloud.VPCID]bool // the files of these VPCs may differ from the state in force

	saveSoon chan struct{} // capacity 1; has an element if unsaved is not empty
}

// New returns Networks that has received no update. It starts the servers of stored VPCs and changes nothing else on
// the host.
func New(o Options) (*Networks, error) {
	n := newNetworks(o, nil)
	p, err := newKernelPlane(o, n)
	if err != nil {
		return nil, fmt.Errorf("open networks: %w", err)
	}
	n.plane = p
	if o.Dir == "" {
		return n, nil
	}
	if err := n.restore(); err != nil {
		n.Close()
		return nil, fmt.Errorf("open networks: %w", err)
	}
	n.done.Go(n.store)
	return n, nil
}

func newNetworks(o Options, p plane) *Networks {
	if o.Parallel == 0 {
		o.Parallel = defaultParallel
	}
	if o.resync == 0 {
		o.resync = resyncInterval
	}
	if o.lease == 0 {
		o.lease = cloud.AddressLease
	}
	n := &Networks{
		o: o, plane: p, slots: make(chan struct{}, o.Parallel), workers: map[cloud.VPCID]*worker{},
		changed: make(chan struct{}), restored: map[cloud.VPCID]*restoredVPC{}, unsaved: map[cloud.VPCID]bool{},
		saveSoon: make(chan struct{}, 1),
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.checker = health.New(n.o.Log, n.recheck)
	n.migrations = netdev.NewMigrations(looseWindow, time.Now)
	return n
}

// Close stops the DHCP, DNS and metadata servers and waits for work in progress. It leaves devices and packet filters
// as they are, so guests keep their connections.
func (n *Networks) Close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
	n.cancel()
	n.checker.Close()
	n.done.Wait()
	n.plane.close()
}

// Apply begins to apply an update and returns without waiting for it. The caller must not change the update afterwards.
// Updates other than snapshots are ignored before the first snapshot.
func (n *Networks) Apply(u cloud.NetworkUpdate) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed || !u.Snapshot && n.tables.vpcs == nil {
		return
	}
	touched := n.tables.apply(&u)
	seq := n.progress.add(u.Stream, u.Revision)
	if u.Snapshot {
		n.contact.snapshot = u.Began
		if n.o.Contact != nil && !n.contact.watched {
			n.contact.watched = true
			n.done.Go(func() { n.watchContact(time.Now()) })
		}
		for _, id := range n.orphans() {
			touched[id] = true
		}
		for id := range n.workers {
			touched[id] = true
		}
	}
	for id := range touched {
		n.wake(id, seq)
	}
	n.acknowledge()
}

// orphans returns the VPCs on the host that have no worker. The caller holds mu.
func (n *Networks) orphans() []cloud.VPCID {
	ids, err := n.plane.list()
	if err != nil {
		n.o.Log.Warn("cannot list the VPCs on this host; unneeded ones stay until the next snapshot", "err", err)
		return nil
	}
	var out []cloud.VPCID
	for _, id := range ids {
		if n.workers[id] == nil {
			out = append(out, id)
		}
	}
	return out
}

// acknowledge calls Options.Acknowledge if the acknowledged revision or the failures changed. The caller holds mu.
func (n *Networks) acknowledge() {
	if ack, changed := n.progress.next(n.workers); changed {
		n.o.Acknowledge(ack)
	}
}

// applied returns the state of the VPC that is in force, if it contains the port. The error says what is missing.
// waiting is closed when another VPC was applied.
func (n *Networks) applied(id cloud.PortID) (w *worker, waiting <-chan struct{}, err error) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	p := n.tables.port(id)
	switch {
	case n.closed:
		return nil, n.changed, errClosed
	case n.tables.vpcs == nil:
		return nil, n.changed, errors.New("the control plane has not sent the networks of this host yet")
	case p == nil:
		return nil, n.changed, errors.New("the control plane has not sent the port to this host yet")
	case p.Node != n.tables.node && p.MigrationNode != n.tables.node:
		return nil, n.changed, fmt.Errorf("the port is bound to host %q", p.Node)
	}
	w = n.workers[p.VPC]
	if w != nil && w.inForce != nil && w.ports[id] {
		return w, n.changed, nil
	}
	if w != nil && w.err != nil {
		return nil, n.changed, w.err
	}
	return nil, n.changed, fmt.Errorf("VPC %s is being applied", p.VPC)
}

var errClosed = errors.New("the agent is stopping")
