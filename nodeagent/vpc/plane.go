package vpc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/balancer"
	"github.com/trivet-cloud/trivet/nodeagent/dhcp"
	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/metadata"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/peering"
	"github.com/trivet-cloud/trivet/nodeagent/resolver"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// closeTimeout limits the wait for answers to DNS queries of all VPCs when the agent stops.
const closeTimeout = 2 * time.Second

// plane changes the host's state. The worker of a VPC makes one call for the VPC at a time.
type plane interface {
	// path returns the path of a VPC's network namespace.
	path(id cloud.VPCID) string
	// list returns the VPCs that have something on the host.
	list() ([]cloud.VPCID, error)
	// apply makes the host's state of a VPC equal to w and returns the changes of the kernel's state. If last is nil, it
	// compares all of the kernel's state with w. Otherwise last is the state in force, and apply may assume that the
	// kernel has it. apply can be repeated, without last, after an error.
	apply(ctx context.Context, w, last *wanted) (writes []string, err error)
	// serve starts and updates the servers of a VPC, whose namespace exists, and changes nothing else.
	serve(ctx context.Context, w *wanted) error
	// remove deletes everything of a VPC.
	remove(ctx context.Context, id cloud.VPCID) error
	// openTap and attachVeth make the device of a port of a VPC that was applied. The device is down until activatePort
	// is called.
	openTap(ctx context.Context, w *wanted, port cloud.PortID) (*os.File, error)
	attachVeth(ctx context.Context, w *wanted, port cloud.PortID, e netdev.Endpoint) error
	// activatePort sets the device of a port up.
	activatePort(ctx context.Context, w *wanted, port cloud.PortID) error
	// detach deletes the device of a port.
	detach(ctx context.Context, id cloud.VPCID, port cloud.PortID) error
	// portCounters returns the counters of the ports that have a device, and counters those of the packet filter.
	portCounters(ctx context.Context, id cloud.VPCID) (map[cloud.PortID]cloud.PortCounters, error)
	counters(ctx context.Context, id cloud.VPCID) (firewall.Counters, error)
	// withdraw stops answering for external addresses that another host can take over, and returns them. After restore,
	// apply answers again for the addresses of its VPC.
	withdraw(ctx context.Context) ([]netip.Addr, error)
	restore()
	// close stops the servers and leaves everything else.
	close()
}

// packetFilter is the part of firewall.Firewall that kernelPlane uses.
type packetFilter interface {
	Set(ctx context.Context, ns netns.NsHandle, vpc cloud.HostVPC) (firewall.Result, error)
	Update(ctx context.Context, ns netns.NsHandle, vpc cloud.HostVPC) (firewall.Result, error)
	Forget(id cloud.VPCID)
	Counters(ctx context.Context, ns netns.NsHandle) (firewall.Counters, error)
}

// kernelPlane is the plane of a real host.
type kernelPlane struct {
	host      *netdev.Host
	filter    packetFilter
	forwarder *resolver.Forwarder
	metadata  *metadata.Server
	external  externalNetworks
	peerings  *peering.Links
	// connected makes the workers of VPCs apply them again, because the application of a peer has made new devices for
	// them.
	connected func([]cloud.VPCID)
	log       *slog.Logger

	mu      sync.Mutex // guards servers, but not what its elements contain
	servers map[cloud.VPCID]*servers
}

// servers are the DHCP and DNS servers of a VPC. Only the VPC's worker uses them and, before the worker starts,
// Networks.restore.
type servers struct {
	dhcp     map[string]*dhcp.Responder // by bridge
	resolver *resolver.Server
}

func newKernelPlane(o Options, n *Networks) (*kernelPlane, error) {
	// A key for each process: after a restart of the agent, guests ask for new tokens.
	key := make([]byte, 32)
	if _, err := rand.Read(key); err != nil {
		return nil, err
	}
	m, err := metadata.New(metadata.Options{Lookup: n.lookup, TokenKey: key, Log: o.Log})
	if err != nil {
		return nil, err
	}
	links, err := peering.New(o.Host.Path)
	if err != nil {
		return nil, err
	}
	return &kernelPlane{
		host: o.Host, filter: o.Firewall, forwarder: resolver.NewForwarder(o.Upstreams), metadata: m, log: o.Log,
		servers: map[cloud.VPCID]*servers{}, external: newExternalNetworks(o.Edge),
		peerings: links, connected: n.connected,
	}, nil
}

func (k *kernelPlane) path(id cloud.VPCID) string { return k.host.Path(id) }

func (k *kernelPlane) list() ([]cloud.VPCID, error) {
	ids, err := k.host.List()
	return removable(ids), err
}

// removable returns the IDs that are UUIDs, as all IDs of the control plane. A namespace with another name after the
// prefix was made by another program, so the first snapshot must not remove it.
func removable(ids []cloud.VPCID) []cloud.VPCID {
	return slices.DeleteFunc(ids, func(id cloud.VPCID) bool { return cloud.CheckUUID("id", string(id)) != nil })
}

// apply sets the ports up last, when their packet filter and servers are in force. It leaves out the steps that depend
// only on parts that are equal in w and last.
func (k *kernelPlane) apply(ctx context.Context, w, last *wanted) (writes []string, err error) {
	d := differenceOf(last, w)
	prepared, err := k.prepare(ctx, w, last, d)
	writes = describe(prepared.Changes)
	if err != nil {
		return writes, err
	}
	if mutant.On(mutant.ActivateEarly) {
		if _, err := k.host.Activate(ctx, w.HostVPC); err != nil {
			return writes, err
		}
	}
	ns, err := netns.GetFromPath(k.host.Path(w.ID))
	if err != nil {
		return writes, fmt.Errorf("open the namespace of VPC %s: %w", w.ID, err)
	}
	defer ns.Close()
	set := k.filter.Update
	if last == nil {
		set = k.filter.Set
	}
	filtered, err := set(ctx, ns, w.HostVPC)
	// Connections that no rule permits can also appear without a change by hand, so deleting them is no write.
	if n := filtered.Writes - filtered.Revoked; n > 0 {
		writes = append(writes, fmt.Sprintf("%d changes of the packet filter", n))
	}
	if err != nil {
		return writes, err
	}
	connected, err := k.connect(ctx, ns, w, d)
	writes = append(writes, connected...)
	if err != nil || !d.rest {
		return writes, err
	}
	activated, err := k.host.Activate(ctx, w.HostVPC)
	return append(writes, describe(activated.Changes)...), err
}

// prepare makes and changes the devices of a VPC and its entries for ports on other hosts.
func (k *kernelPlane) prepare(ctx context.Context, w, last *wanted, d difference) (netdev.Result, error) {
	switch {
	case d.rest:
		return k.host.Prepare(ctx, w.HostVPC)
	case d.remotes:
		return k.host.UpdateRemotes(ctx, w.HostVPC, last.HostVPC)
	}
	return netdev.Result{}, nil
}

// connect connects a VPC, whose packet filter is in force, with its peers and external networks, and starts and updates
// its servers and service IPs.
func (k *kernelPlane) connect(
	ctx context.Context, ns netns.NsHandle, w *wanted, d difference,
) (writes []string, err error) {
	if d.rest {
		peered, err := k.peerings.Set(ctx, &w.HostVPC)
		writes = append(writes, peered.Changes...)
		k.connected(peered.Connected)
		if err != nil {
			return writes, err
		}
	}
	external := edgeState(&w.HostVPC, k.host.Path(w.ID), k.external.connected)
	external.Withhold = w.Withhold
	connected, err := k.external.set(ctx, external)
	writes = append(writes, connected...)
	if err != nil {
		return writes, err
	}
	if d != (difference{}) {
		if err := k.serve(ctx, w); err != nil {
			return writes, err
		}
	}
	if d.rest || d.services {
		balanced, err := balancer.Set(ctx, ns, &w.HostVPC)
		return append(writes, balanced.Changes...), err
	}
	return writes, nil
}

func describe(changes []netdev.Change) []string {
	var out []string
	for _, c := range changes {
		out = append(out, c.String())
	}
	return out
}

// serve starts and updates the DHCP, DNS and metadata servers of a VPC.
func (k *kernelPlane) serve(ctx context.Context, w *wanted) error {
	namespace := k.host.Namespace(w.ID)
	s := k.serversOf(w.ID)
	ipv6 := false
	used := map[string]bool{}
	for _, subnet := range w.Subnets {
		ipv6 = ipv6 || subnet.CIDR6.IsValid()
		if len(subnet.Ports) == 0 {
			continue
		}
		bridge := netdev.Bridge(subnet.VNI)
		used[bridge] = true
		if s.dhcp[bridge] == nil {
			s.dhcp[bridge] = dhcp.New(namespace, bridge, k.log)
		}
		if err := s.dhcp[bridge].Set(dhcp.Subnet{HostSubnet: subnet, MTU: w.MTU, Domain: w.Domain}); err != nil {
			return fmt.Errorf("serve DHCP in subnet %s: %w", subnet.ID, err)
		}
	}
	for bridge, responder := range s.dhcp {
		if !used[bridge] {
			responder.Close()
			delete(s.dhcp, bridge)
		}
	}
	if s.resolver == nil {
		s.resolver = resolver.New(namespace, k.forwarder, k.log)
	}
	if err := s.resolver.Set(ctx, resolver.ViewOf(&w.HostVPC, w.Domain)); err != nil {
		return fmt.Errorf("serve DNS in VPC %s: %w", w.ID, err)
	}
	if err := k.metadata.Set(ctx, metadata.VPC{ID: w.ID, Namespace: namespace, IPv6: ipv6}); err != nil {
		return fmt.Errorf("serve metadata in VPC %s: %w", w.ID, err)
	}
	return nil
}

func (k *kernelPlane) serversOf(id cloud.VPCID) *servers {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.servers[id] == nil {
		k.servers[id] = &servers{dhcp: map[string]*dhcp.Responder{}}
	}
	return k.servers[id]
}

// remove closes the servers before it deletes the namespace, because an open socket keeps a namespace in existence.
func (k *kernelPlane) remove(ctx context.Context, id cloud.VPCID) error {
	k.metadata.Remove(id)
	s := k.serversOf(id)
	s.close(ctx)
	k.mu.Lock()
	delete(k.servers, id)
	k.mu.Unlock()
	k.filter.Forget(id)
	if err := errors.Join(k.peerings.Remove(ctx, id), k.external.remove(ctx, id)); err != nil {
		return err
	}
	return k.host.Remove(ctx, id)
}

func (s *servers) close(ctx context.Context) {
	if s.resolver != nil {
		s.resolver.Close(ctx)
		s.resolver = nil
	}
	for bridge, responder := range s.dhcp {
		responder.Close()
		delete(s.dhcp, bridge)
	}
}

func (k *kernelPlane) openTap(ctx context.Context, w *wanted, port cloud.PortID) (*os.File, error) {
	return k.host.OpenTap(ctx, w.HostVPC, port)
}

func (k *kernelPlane) attachVeth(ctx context.Context, w *wanted, port cloud.PortID, e netdev.Endpoint) error {
	return k.host.AttachVeth(ctx, w.HostVPC, port, e)
}

func (k *kernelPlane) activatePort(ctx context.Context, w *wanted, port cloud.PortID) error {
	return k.host.ActivatePort(ctx, w.HostVPC, port)
}

func (k *kernelPlane) detach(ctx context.Context, id cloud.VPCID, port cloud.PortID) error {
	err := k.host.Detach(ctx, id, port)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (k *kernelPlane) portCounters(
	ctx context.Context, id cloud.VPCID,
) (map[cloud.PortID]cloud.PortCounters, error) {
	return k.host.PortCounters(ctx, id)
}

func (k *kernelPlane) counters(ctx context.Context, id cloud.VPCID) (firewall.Counters, error) {
	ns, err := netns.GetFromPath(k.host.Path(id))
	if err != nil {
		return firewall.Counters{}, fmt.Errorf("open the namespace of VPC %s: %w", id, err)
	}
	defer ns.Close()
	return k.filter.Counters(ctx, ns)
}

func (k *kernelPlane) withdraw(ctx context.Context) ([]netip.Addr, error) {
	return k.external.withdraw(ctx)
}
func (k *kernelPlane) restore() { k.external.restore() }

func (k *kernelPlane) close() {
	k.metadata.Close()
	k.mu.Lock()
	defer k.mu.Unlock()
	// The agent must stop in a few seconds; queries that are not answered by then are lost.
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	for _, s := range k.servers {
		s.close(ctx)
	}
	clear(k.servers)
}
