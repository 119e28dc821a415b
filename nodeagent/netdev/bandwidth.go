package netdev

import (
	"fmt"
	"hash/fnv"
	"maps"
	"regexp"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Two token buckets (tc-tbf(8)) limit the bandwidth of a port. The one on the port's device limits what the guest
// receives. Packets that the guest sends are redirected to an IFB device of the port, where the other token bucket
// delays them. From there they continue as if the port's device had just received them.
const (
	// maxMbps is the highest limit of a port. At most 4 GiB can be queued.
	maxMbps = 100_000
	// minBurst is the number of bytes of the largest packet that a guest can send (GSO).
	minBurst = 64 << 10
	// A burst has as many bytes as the rate permits in 1/burstsPerSecond (5 ms), but at least minBurst. The queue takes
	// as many bytes as the rate permits in 1/queuesPerSecond (50 ms), and a burst; further packets are dropped.
	burstsPerSecond, queuesPerSecond = 200, 20
)

// limiterName matches the names of IFB devices.
var limiterName = regexp.MustCompile(`^ifb-[0-9a-f]{8}$`)

// limiterOf returns the name of the IFB device of a port. It contains a hash, because IDs are longer than the names of
// devices may be. Two ports of a VPC with the same hash are an error of check.
func limiterOf(p *cloud.HostPort) string {
	h := fnv.New32a()
	h.Write([]byte(p.ID))
	return fmt.Sprintf("ifb-%08x", h.Sum32())
}

// bucket are the parameters of a token bucket. The zero value means that there is none.
type bucket struct {
	rate   uint64 // in bytes per second
	limit  uint32 // of the queue, in bytes
	buffer uint32 // time to send a burst, in ticks of the packet scheduler
}

func newBucket(mbps uint32) bucket {
	if mbps == 0 {
		return bucket{}
	}
	rate := uint64(mbps) * 1_000_000 / 8
	burst := max(minBurst, rate/burstsPerSecond)
	return bucket{rate: rate, limit: uint32(burst + rate/queuesPerSecond), buffer: netlink.Xmittime(rate, uint32(burst))}
}

// addLimit adds the bandwidth limit of a port to its device, and the IFB device.
func (w *state) addLimit(p *cloud.HostPort) {
	if p.Mbps == 0 {
		return
	}
	limiter := limiterOf(p)
	l := w.links[p.Device]
	l.bucket, l.redirect = newBucket(p.Mbps), limiter
	w.links[p.Device] = l
	w.links[limiter] = link{
		kind: limiterLink, up: true, alias: l.alias, bucket: l.bucket, settings: portSettings(limiter),
	}
}

// otherRedirect is the value of link.redirect if the filters at a device's ingress are not those of this package.
const otherRedirect = "?"

// readLimits reads the token buckets of ports and IFB devices, and the redirections of ports.
func (k *kernel) readLimits(have *state, names map[int]string) error {
	list, err := netspace.List("queueing disciplines", func() ([]netlink.Qdisc, error) { return k.vpc.QdiscList(nil) })
	if err != nil {
		return err
	}
	for _, q := range list {
		name := names[q.Attrs().LinkIndex]
		l := have.links[name]
		if l.kind != portLink && l.kind != limiterLink {
			continue
		}
		switch q.Attrs().Parent {
		case netlink.HANDLE_ROOT:
			if tbf, ok := q.(*netlink.Tbf); ok {
				l.bucket = bucket{tbf.Rate, tbf.Limit, tbf.Buffer}
			}
		case netlink.HANDLE_INGRESS:
			if l.redirect, err = k.readRedirect(q.Attrs().LinkIndex, names); err != nil {
				return err
			}
		}
		have.links[name] = l
	}
	return nil
}

// readRedirect returns the name of the device to which a device's only ingress filter redirects all packets, or
// otherRedirect.
func (k *kernel) readRedirect(index int, names map[int]string) (string, error) {
	device := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: index}}
	list, err := netspace.List("filters", func() ([]netlink.Filter, error) {
		return k.vpc.FilterList(device, netlink.HANDLE_MIN_INGRESS)
	})
	if err != nil {
		return "", err
	}
	var rules []*netlink.U32
	for _, f := range list {
		u32, ok := f.(*netlink.U32)
		if !ok {
			return otherRedirect, nil
		}
		if u32.Sel != nil { // others are hash tables
			rules = append(rules, u32)
		}
	}
	if len(rules) != 1 || len(rules[0].Actions) != 1 || rules[0].Protocol != unix.ETH_P_ALL {
		return otherRedirect, nil
	}
	for _, key := range rules[0].Sel.Keys {
		if key.Mask != 0 {
			return otherRedirect, nil
		}
	}
	mirred, ok := rules[0].Actions[0].(*netlink.MirredAction)
	if !ok || mirred.MirredAction != netlink.TCA_EGRESS_REDIR || names[mirred.Ifindex] == "" {
		return otherRedirect, nil
	}
	return names[mirred.Ifindex], nil
}

// limit changes the token bucket and the redirection of a device that exists.
func (p *planner) limit(name string, w, h link) {
	switch {
	case w.bucket == h.bucket:
	case w.bucket == bucket{}:
		p.add(deleteBucket{name})
	default:
		p.add(replaceBucket{name, w.bucket})
	}
	if w.redirect == h.redirect {
		return
	}
	if h.redirect != "" {
		p.add(deleteRedirect{name})
	}
	if w.redirect != "" {
		p.add(addRedirect{name, w.redirect})
	}
}

// forgetLimiter changes links that redirect to a deleted device.
func (s *state) forgetLimiter(limiter string) {
	for _, name := range slices.Collect(maps.Keys(s.links)) {
		if l := s.links[name]; l.redirect == limiter {
			l.redirect = otherRedirect
			s.links[name] = l
		}
	}
}

type (
	addLimiter    struct{ name string }
	replaceBucket struct {
		name string
		bucket
	}
	deleteBucket   struct{ name string }
	addRedirect    struct{ name, limiter string }
	deleteRedirect struct{ name string }
)

func (c addLimiter) target() string { return c.name }
func (c addLimiter) String() string { return fmt.Sprintf("ip link add %s type ifb", c.name) }
func (c addLimiter) apply(k *kernel) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = c.name
	return k.vpc.LinkAdd(&netlink.Ifb{LinkAttrs: attrs})
}

func (c replaceBucket) target() string { return c.name }
func (c replaceBucket) String() string {
	burst := netlink.Xmitsize(c.rate, c.buffer)
	return fmt.Sprintf("tc qdisc replace dev %s root tbf rate %dbps burst %d limit %d", c.name, c.rate, burst, c.limit)
}
func (c replaceBucket) apply(k *kernel) error {
	index, err := k.index(c.name)
	if err != nil {
		return err
	}
	return k.vpc.QdiscReplace(&netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Parent: netlink.HANDLE_ROOT},
		Rate:       c.rate, Limit: c.limit, Buffer: c.buffer,
	})
}

func (c deleteBucket) target() string { return c.name }
func (c deleteBucket) String() string { return fmt.Sprintf("tc qdisc delete dev %s root", c.name) }
func (c deleteBucket) apply(k *kernel) error {
	index, err := k.index(c.name)
	if err != nil {
		return err
	}
	return k.vpc.QdiscDel(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Parent: netlink.HANDLE_ROOT}})
}

func ingressOf(index int) *netlink.Ingress {
	return &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index, Parent: netlink.HANDLE_INGRESS, Handle: netlink.MakeHandle(0xffff, 0),
	}}
}

func (c addRedirect) target() string { return c.name }
func (c addRedirect) String() string {
	return fmt.Sprintf("tc qdisc add dev %s ingress; tc filter add dev %s ingress protocol all u32 match u32 0 0 "+
		"action mirred egress redirect dev %s", c.name, c.name, c.limiter)
}
func (c addRedirect) apply(k *kernel) error {
	index, err := k.index(c.name)
	if err != nil {
		return err
	}
	limiter, err := k.index(c.limiter)
	if err != nil {
		return err
	}
	if err := k.vpc.QdiscAdd(ingressOf(index)); err != nil {
		return err
	}
	return k.vpc.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: netlink.MakeHandle(0xffff, 0), Priority: 1, Protocol: unix.ETH_P_ALL,
		},
		Actions: []netlink.Action{netlink.NewMirredAction(limiter)}, // without a selector, for all packets
	})
}

func (c deleteRedirect) target() string { return c.name }
func (c deleteRedirect) String() string { return fmt.Sprintf("tc qdisc delete dev %s ingress", c.name) }
func (c deleteRedirect) apply(k *kernel) error {
	index, err := k.index(c.name)
	if err != nil {
		return err
	}
	return k.vpc.QdiscDel(ingressOf(index))
}
