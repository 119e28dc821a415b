package ipsec

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/netspace"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// algorithm is the kernel's name of AES-GCM for ESP, and icvBits the size of its integrity check value.
	algorithm = "rfc4106(gcm(aes))"
	icvBits   = 128
	// replayWindow is the number of packets that can arrive out of order before the oldest is dropped. 4096 is the
	// kernel's maximum.
	replayWindow = 4096
)

// kernel reads and writes policies and states over netlink. netlink.Handle lists and changes policies. States are
// listed and added with messages of this package, because netlink.XfrmState has no 64-bit sequence numbers.
type kernel struct {
	handle *netlink.Handle
	socket *nl.NetlinkSocket
}

func openKernel(namespace string) (k *kernel, err error) {
	ns := netns.None()
	if namespace != "" {
		if ns, err = netns.GetFromPath(namespace); err != nil {
			return nil, fmt.Errorf("open network namespace %s: %w", namespace, err)
		}
		defer ns.Close()
	}
	k = &kernel{}
	if k.handle, err = netlink.NewHandleAt(ns, unix.NETLINK_XFRM); err != nil {
		return nil, fmt.Errorf("open a netlink socket for IPsec: %w", err)
	}
	if k.socket, err = nl.GetNetlinkSocketAt(ns, netns.None(), unix.NETLINK_XFRM); err != nil {
		k.handle.Close()
		return nil, fmt.Errorf("open a netlink socket for IPsec: %w", err)
	}
	limit := unix.NsecToTimeval(requestTimeout.Nanoseconds())
	err = errors.Join(
		k.handle.SetSocketTimeout(requestTimeout), k.socket.SetSendTimeout(&limit), k.socket.SetReceiveTimeout(&limit),
	)
	if err != nil {
		k.close()
		return nil, fmt.Errorf("limit the time of netlink requests: %w", err)
	}
	return k, nil
}

func (k *kernel) close() {
	k.handle.Close()
	k.socket.Close()
}

// isMissing reports whether an error means that the kernel has no IPsec.
func isMissing(err error) bool {
	return errors.Is(err, unix.EPROTONOSUPPORT) || errors.Is(err, unix.EAFNOSUPPORT)
}

// request returns a netlink request without a body that uses the socket of k.
func (k *kernel) request(kind, flags int) *nl.NetlinkRequest {
	r := nl.NewNetlinkRequest(kind, flags)
	r.Sockets = map[int]*nl.SocketHandle{unix.NETLINK_XFRM: {Socket: k.socket}}
	return r
}

// read returns the policies and states with ReqID.
func (k *kernel) read(ctx context.Context) (s state, err error) {
	if err := ctx.Err(); err != nil {
		return s, err
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		list, err := netspace.List("policies of IPsec", func() ([]netlink.XfrmPolicy, error) {
			return k.handle.XfrmPolicyList(family)
		})
		if err != nil {
			return s, err
		}
		for _, p := range list {
			if len(p.Tmpls) > 0 && p.Tmpls[0].Reqid == ReqID {
				s.policies = append(s.policies, policyFrom(p))
			}
		}
	}
	messages, err := netspace.List("states of IPsec", func() ([][]byte, error) {
		return k.request(nl.XFRM_MSG_GETSA, unix.NLM_F_DUMP).Execute(unix.NETLINK_XFRM, nl.XFRM_MSG_NEWSA)
	})
	if err != nil {
		return s, err
	}
	s.states = map[stateID]presentState{}
	for _, m := range messages {
		id, present, own, err := parseState(m)
		if err != nil {
			return s, err
		}
		if own {
			s.states[id] = present
		}
	}
	return s, nil
}

// message returns the kernel's form of a policy.
func (p policy) message() *netlink.XfrmPolicy {
	host := &net.IPNet{IP: p.vtep.AsSlice(), Mask: net.CIDRMask(p.vtep.BitLen(), p.vtep.BitLen())}
	all := &net.IPNet{IP: make(net.IP, p.vtep.BitLen()/8), Mask: net.CIDRMask(0, p.vtep.BitLen())}
	m := &netlink.XfrmPolicy{
		Src: all, Dst: host, Proto: unix.IPPROTO_UDP, DstPort: Port, Dir: netlink.XFRM_DIR_IN,
		Tmpls: []netlink.XfrmPolicyTmpl{{
			Src: all.IP, Dst: all.IP, Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TRANSPORT, Reqid: ReqID,
		}},
	}
	if p.direction == out {
		m.Src, m.Dst, m.Dir = host, all, netlink.XFRM_DIR_OUT
	}
	if p.optional {
		m.Tmpls[0].Optional = 1
	}
	return m
}

// policyFrom returns the policy whose message is m, which has a template.
func policyFrom(m netlink.XfrmPolicy) presentPolicy {
	p := presentPolicy{policy: policy{direction: in}, index: m.Index}
	host := m.Dst
	if m.Dir == netlink.XFRM_DIR_OUT {
		p.direction, host = out, m.Src
	}
	vtep, ok := netip.AddrFromSlice(host.IP)
	if !ok {
		return p
	}
	p.vtep, p.optional = vtep.Unmap(), m.Tmpls[0].Optional != 0
	want, t := p.message(), m.Tmpls[0]
	p.selects = m.Src.String() == want.Src.String() && m.Dst.String() == want.Dst.String() && m.Dir == want.Dir &&
		m.Proto == want.Proto && m.DstPort == want.DstPort && m.SrcPort == 0 &&
		m.Ifindex == 0 && m.Ifid == 0 && m.Mark == nil
	p.differs = m.Action != want.Action || m.Priority != want.Priority || len(m.Tmpls) != 1 ||
		t.Proto != want.Tmpls[0].Proto || t.Mode != want.Tmpls[0].Mode || t.Spi != 0 ||
		!t.Src.IsUnspecified() || !t.Dst.IsUnspecified()
	return p
}

// Sizes and offsets of struct xfrm_replay_state_esn in linux/xfrm.h: bmp_len, oseq, seq, oseq_hi, seq_hi and
// replay_window, of 4 bytes each, and a bitmap.
const (
	esnSize    = 24
	esnSent    = 4
	esnSeen    = 8
	esnSentHi  = 12
	esnSeenHi  = 16
	esnWindow  = 20
	bitmapWord = 32
)

// parseState parses a message of the kernel. own is false for a state without ReqID, and for a state that the kernel
// has made itself because a policy requires one.
func parseState(m []byte) (id stateID, s presentState, own bool, err error) {
	if len(m) < nl.SizeofXfrmUsersaInfo {
		return id, s, false, errors.New("the kernel has sent a short state of IPsec")
	}
	info := nl.DeserializeXfrmUsersaInfo(m)
	id.spi = nl.Swap32(info.Id.Spi)
	if info.Reqid != ReqID || id.spi == 0 {
		return id, s, false, nil
	}
	id.destination, s.source = address(info.Id.Daddr, info.Family), address(info.Saddr, info.Family)
	attributes, err := nl.ParseRouteAttr(m[nl.SizeofXfrmUsersaInfo:])
	if err != nil {
		return id, s, false, fmt.Errorf("parse a state of IPsec: %w", err)
	}
	expected := info.Mode == uint8(netlink.XFRM_MODE_TRANSPORT) && info.Id.Proto == unix.IPPROTO_ESP &&
		info.Flags&nl.XFRM_STATE_ESN != 0
	for _, a := range attributes {
		switch a.Attr.Type {
		case nl.XFRMA_ALG_AEAD:
			algo := nl.DeserializeXfrmAlgoAEAD(a.Value)
			same := nl.BytesToString(algo.AlgName[:]) == algorithm && algo.AlgICVLen == icvBits
			if expected && same && len(algo.AlgKey) == len(s.key) {
				copy(s.key[:], algo.AlgKey)
			}
		case nl.XFRMA_REPLAY_ESN_VAL:
			if len(a.Value) >= esnSize {
				s.number = max(number(a.Value, esnSent, esnSentHi), number(a.Value, esnSeen, esnSeenHi))
			}
		}
	}
	return id, s, true, nil
}

// number returns a sequence number of struct xfrm_replay_state_esn whose halves have the given offsets.
func number(esn []byte, low, high int) uint64 {
	return uint64(binary.NativeEndian.Uint32(esn[high:]))<<32 | uint64(binary.NativeEndian.Uint32(esn[low:]))
}

func address(a nl.XfrmAddress, family uint16) netip.Addr {
	if family == unix.AF_INET {
		return netip.AddrFrom4([4]byte(a[:4]))
	}
	return netip.AddrFrom16(a)
}

// addPolicy adds a policy. If replace is true, it replaces the policy for the same packets.
type addPolicy struct {
	policy
	replace bool
}

func (c addPolicy) String() string {
	act := "add"
	if c.replace {
		act = "replace"
	}
	return fmt.Sprintf("%s the policy %s for VXLAN of %s", act, c.direction, c.vtep)
}

func (c addPolicy) apply(k *kernel) error {
	if c.replace {
		return k.handle.XfrmPolicyUpdate(c.message())
	}
	err := k.handle.XfrmPolicyAdd(c.message())
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("another program has a policy for the same packets: %w", err)
	}
	return err
}

// deletePolicy deletes a policy.
type deletePolicy struct{ presentPolicy }

func (c deletePolicy) String() string {
	return fmt.Sprintf("delete the policy %s with index %d", c.direction, c.index)
}

func (c deletePolicy) apply(k *kernel) error {
	dir := netlink.XFRM_DIR_IN
	if c.direction == out {
		dir = netlink.XFRM_DIR_OUT
	}
	return ignoreAbsent(k.handle.XfrmPolicyDel(&netlink.XfrmPolicy{Index: c.index, Dir: dir}))
}

// addState adds a state.
type addState struct {
	id     stateID
	source netip.Addr
	key    cloud.ESPKey
	out    bool
	// number is the sequence number that the state has reached.
	number uint64
}

func (c addState) String() string {
	text := fmt.Sprintf("add the state from %s to %s with SPI %#x", c.source, c.id.destination, c.id.spi)
	if c.number > 0 {
		text += fmt.Sprintf(" after number %d", c.number)
	}
	return text
}

func (c addState) apply(k *kernel) error {
	info := &nl.XfrmUsersaInfo{Reqid: ReqID, Mode: uint8(netlink.XFRM_MODE_TRANSPORT), Flags: nl.XFRM_STATE_ESN}
	info.Family = unix.AF_INET6
	if c.source.Is4() {
		info.Family = unix.AF_INET
	}
	info.Sel.Family = info.Family
	copy(info.Id.Daddr[:], c.id.destination.AsSlice())
	copy(info.Saddr[:], c.source.AsSlice())
	info.Id.Proto, info.Id.Spi = unix.IPPROTO_ESP, nl.Swap32(c.id.spi)
	info.Lft = nl.XfrmLifetimeCfg{
		SoftByteLimit: nl.XFRM_INF, HardByteLimit: nl.XFRM_INF, SoftPacketLimit: nl.XFRM_INF, HardPacketLimit: nl.XFRM_INF,
	}
	aead := nl.XfrmAlgoAEAD{AlgKeyLen: uint32(len(c.key)) * 8, AlgICVLen: icvBits, AlgKey: c.key[:]}
	copy(aead.AlgName[:], algorithm)

	esn := make([]byte, esnSize)
	low, high := esnSeen, esnSeenHi
	if c.out {
		low, high = esnSent, esnSentHi
	}
	binary.NativeEndian.PutUint32(esn, replayWindow/bitmapWord)
	binary.NativeEndian.PutUint32(esn[low:], uint32(c.number))
	binary.NativeEndian.PutUint32(esn[high:], uint32(c.number>>32))
	binary.NativeEndian.PutUint32(esn[esnWindow:], replayWindow)

	r := k.request(nl.XFRM_MSG_NEWSA, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	r.AddData(info)
	r.AddData(nl.NewRtAttr(nl.XFRMA_ALG_AEAD, aead.Serialize()))
	r.AddData(nl.NewRtAttr(nl.XFRMA_REPLAY_ESN_VAL, esn))
	_, err := r.Execute(unix.NETLINK_XFRM, 0)
	if errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("another program has a state with this SPI: %w", err)
	}
	return err
}

// deleteState deletes a state.
type deleteState struct {
	id     stateID
	source netip.Addr
}

func (c deleteState) String() string {
	return fmt.Sprintf("delete the state from %s to %s with SPI %#x", c.source, c.id.destination, c.id.spi)
}

// direction returns 1 for a state for received packets, and 0 for a state for sent packets. vtep is the host's address.
func (c deleteState) direction(vtep netip.Addr) int {
	if c.id.destination == vtep {
		return 1
	}
	return 0
}

func (c deleteState) apply(k *kernel) error {
	return ignoreAbsent(k.handle.XfrmStateDel(&netlink.XfrmState{
		Dst: c.id.destination.AsSlice(), Src: c.source.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Spi: int(c.id.spi),
	}))
}

// ignoreAbsent returns nil if there was nothing to delete.
func ignoreAbsent(err error) error {
	if netspace.Absent(err) {
		return nil
	}
	return err
}

// joinedText returns an error's text in one line.
func joinedText(err error) string { return strings.ReplaceAll(err.Error(), "\n", "; ") }
