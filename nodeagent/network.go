package main

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"

	"github.com/trivet-cloud/trivet/nodeagent/balancer"
	"github.com/trivet-cloud/trivet/nodeagent/edge"
	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/machine"
	"github.com/trivet-cloud/trivet/nodeagent/metrics"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/vpc"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// networks are the VPCs of this host.
type networks struct {
	// description describes the host's network to the control plane. It is nil if the host has no underlay address,
	// without which the control plane does not accept the description.
	description *agentv1.HostNetwork
	// vpcs is nil if the host cannot have VPCs.
	vpcs *vpc.Networks
	host *netdev.Host
	edge *edge.Edge // nil without external networks
	// encryption is nil on a host that does not encrypt, or whose kernel has no IPsec.
	encryption *encryption
	// watch ends the agent when the underlay changes.
	watch *underlayWatch
	// assigned are the VPCs that the control plane has sent to a host that cannot have VPCs.
	assigned map[cloud.VPCID]bool
	networkCalls
	// prefix starts the names of network namespaces.
	prefix string
}

// networkCalls are the functions that the networks of the host call. They must not block.
type networkCalls struct {
	// ack receives the acknowledgments of updates. report receives the health of backends of service IPs.
	ack    func(cloud.NetworkAck)
	report func([]cloud.BackendHealth)
	// guest returns what the metadata service sends to the guest of a VM. It returns known false until the host knows
	// its VMs.
	guest func(vm string) (data vpc.GuestData, known bool)
	// contact returns the time of the last contact to the control plane. It is not called before the first update.
	contact func() (time.Time, bool)
}

// openNetworks finds the underlay and checks what the host lacks for VPCs. A host that lacks something runs VMs without
// network interfaces, so openNetworks returns no error: the description of the result names what is missing.
func openNetworks(ctx context.Context, c *Config, calls networkCalls, log *slog.Logger) *networks {
	n := &networks{networkCalls: calls, prefix: c.Network.Prefix, watch: &underlayWatch{config: c, log: log}}
	u, err := findUnderlay(ctx, c)
	if err != nil {
		log.Warn("this host has no VPCs", "err", err)
		n.watch.missing = true
		return n
	}
	n.watch.used = u
	n.description = &agentv1.HostNetwork{
		Vtep: u.vtep.String(), UnderlayMtu: u.mtu, ExternalNetworks: slices.Sorted(maps.Keys(c.External)),
	}
	missing, err := netdev.MissingFeatures(ctx)
	if err != nil {
		missing = append(missing, err.Error())
	}
	missing = append(missing, firewall.MissingFeatures(ctx)...)
	missing = append(missing, balancer.MissingFeatures(ctx)...)
	if c.Network.Encrypt {
		missing = append(missing, n.openEncryption(ctx, u.vtep, log)...)
	} else {
		stopEncryption(ctx, log)
	}
	if len(missing) == 0 {
		if err := n.open(ctx, u, c, log); err != nil {
			missing = append(missing, err.Error())
		}
	}
	n.description.Missing = missing
	if len(missing) > 0 {
		log.Warn("this host has no VPCs", "missing", missing)
	} else {
		log.Info("underlay", "vtep", u.vtep, "mtu", u.mtu, "device", u.device)
	}
	return n
}

func (n *networks) open(ctx context.Context, u underlay, c *Config, log *slog.Logger) error {
	denied := []netip.Prefix{netip.PrefixFrom(u.vtep, u.vtep.BitLen())}
	members, err := memberAddresses(ctx, c.ControlPlane)
	if err != nil {
		log.Warn("cannot resolve all members of the control plane; until it sends their addresses, guests with NAT can reach them",
			"err", err)
	}
	for _, a := range members {
		denied = append(denied, netip.PrefixFrom(a, a.BitLen()))
	}
	filter, err := firewall.New(firewall.Options{
		Trusted: []string{"vx*"}, Denied: denied,
	})
	if err != nil {
		return err
	}
	mtu, acknowledge := int(u.mtu), n.ack
	if n.encryption != nil {
		mtu, acknowledge = mtu-cloud.ESPOverhead, n.encryption.acknowledge
	}
	if n.host, err = netdev.New(netdev.Options{VTEP: u.vtep, Device: u.device, MTU: mtu, Prefix: n.prefix}); err != nil {
		return err
	}
	if len(c.External) > 0 {
		if missing := edge.MissingFeatures(ctx); len(missing) > 0 {
			return errors.New("external networks: " + strings.Join(missing, ", "))
		}
		options := edge.Options{Prefix: n.prefix, External: map[string]edge.External{}}
		for name, e := range c.External {
			if options.External[name], err = e.connection(); err != nil {
				return err
			}
		}
		if n.edge, err = edge.New(options); err != nil {
			return err
		}
	}
	upstreams := &hostResolvers{path: "/etc/resolv.conf"}
	n.vpcs, err = vpc.New(vpc.Options{
		VTEP: u.vtep, Host: n.host, Firewall: filter, Edge: n.edge, Upstreams: upstreams.list, Acknowledge: acknowledge,
		Report: n.report, Guest: n.guest, Contact: n.contact, Log: log,
		Dir: filepath.Join(c.DataDir, "networks"),
	})
	return err
}

// Apply passes an update to the VPCs. On a host that cannot have VPCs it reports all VPCs as failed, also those that an
// earlier update contained: the control plane sets the ports of a VPC that is not reported to ACTIVE.
func (n *networks) Apply(u cloud.NetworkUpdate) {
	if n.vpcs != nil {
		if n.encryption != nil {
			n.encryption.apply(u)
		}
		n.vpcs.Apply(u)
		return
	}
	if u.Snapshot || n.assigned == nil {
		n.assigned = map[cloud.VPCID]bool{}
	}
	for _, id := range u.Deleted {
		delete(n.assigned, cloud.VPCID(id))
	}
	for i := range u.VPCs {
		n.assigned[u.VPCs[i].ID] = true
	}
	a := cloud.NetworkAck{Stream: u.Stream, Revision: u.Revision}
	for _, id := range slices.Sorted(maps.Keys(n.assigned)) {
		a.Failures = append(a.Failures, cloud.VPCFailure{VPC: id, Error: "this host cannot have VPCs"})
	}
	n.ack(a)
}

// taps returns what opens the taps of guests, or nil if the host cannot have VPCs.
func (n *networks) taps() machine.Taps {
	if n.vpcs == nil {
		return nil
	}
	return n.vpcs
}

func (n *networks) close() {
	if n.vpcs != nil {
		n.vpcs.Close()
	}
	if n.edge != nil {
		n.edge.Close()
	}
	if n.host != nil {
		n.host.Close()
	}
	if n.encryption != nil {
		n.encryption.close()
	}
}

// metrics returns the values of the VPCs' metrics.
func (n *networks) metrics() metrics.Networks {
	if n.vpcs == nil {
		return metrics.Networks{}
	}
	counts := n.vpcs.Counts()
	out := metrics.Networks{
		Applied: counts.Applied, Failures: counts.Failures, Repairs: counts.Repairs, Writes: counts.Writes,
		ApplyTime: counts.ApplyTime,
	}
	for _, s := range n.vpcs.Status() {
		v := metrics.VPC{ID: s.ID, Ports: s.Ports, Rules: s.Rules, Failed: s.Failed}
		if s.Counters != nil {
			v.Filter = filterMetrics(s.Counters)
		}
		out.VPCs = append(out.VPCs, v)
	}
	return out
}

func filterMetrics(c *firewall.Counters) *metrics.Filter {
	d := &c.Drops
	return &metrics.Filter{
		Drops: []metrics.Drop{
			{Reason: "spoof", Packets: d.Spoof}, {Reason: "unassigned", Packets: d.Unassigned},
			{Reason: "group", Packets: d.Group}, {Reason: "invalid", Packets: d.Invalid},
			{Reason: "closed", Packets: d.Closed}, {Reason: "denied", Packets: d.Denied}, {Reason: "full", Packets: d.Full},
		},
		Connections: c.Connections, ConnectionLimit: c.ConnectionLimit,
	}
}

// hostResolvers are the resolvers in a file such as /etc/resolv.conf, which is read again at most every ten seconds.
type hostResolvers struct {
	path string

	mu   sync.Mutex // guards the fields below
	read time.Time
	all  []netip.AddrPort
}

func (r *hostResolvers) list() []netip.AddrPort {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.read) < 10*time.Second {
		return r.all
	}
	r.read = time.Now()
	config, err := dns.ClientConfigFromFile(r.path)
	if err != nil {
		return r.all // those of the last successful read
	}
	r.all = nil
	for _, server := range config.Servers {
		if addr, err := netip.ParseAddrPort(net.JoinHostPort(server, config.Port)); err == nil {
			r.all = append(r.all, addr)
		}
	}
	return r.all
}
