package ipsec

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// forBoth runs a test with an underlay of IPv4 and of IPv6.
func forBoth(t *testing.T, test func(t *testing.T, l *lab)) {
	t.Helper()
	if !withESP(t) {
		return
	}
	t.Run("IPv4", func(t *testing.T) { test(t, newLab(t, false)) })
	t.Run("IPv6", func(t *testing.T) { test(t, newLab(t, true)) })
}

// exchange sends packets in both directions until one has arrived in each.
func exchange(t *testing.T, first, second *net.UDPConn) {
	t.Helper()
	require.True(t, arrives(first, second, patience), "a packet of host 1 arrives")
	require.True(t, arrives(second, first, patience), "a packet of host 2 arrives")
}

// TestESPOnTheWire checks that two hosts exchange the packets of VXLAN in ESP only, and that neither a second call nor
// a restarted agent writes anything. Then it removes the peers: the states disappear, and no packet passes.
func TestESPOnTheWire(t *testing.T) {
	forBoth(t, func(t *testing.T, l *lab) {
		a, b := l.hosts[0], l.hosts[1]
		require.Len(t, l.rotate(0, 5), 2+4, "two policies, one state to send and three to receive")
		require.Len(t, l.rotate(1, 5), 2+4)
		wire := b.capture()
		atA, atB := a.listen(a.inner), b.listen(b.inner)
		exchange(t, atA, atB)
		large := make([]byte, 8000) // in fragments
		_, err := atA.WriteToUDP(large, atB.LocalAddr().(*net.UDPAddr))
		require.NoError(t, err)
		require.NoError(t, atB.SetReadDeadline(time.Now().Add(patience)))
		for n := 0; n != len(large); {
			n, _, err = atB.ReadFromUDP(large)
			require.NoError(t, err)
		}
		wire.read()
		require.NotZero(t, wire.esp)
		require.NotZero(t, wire.sentESP)
		require.Zero(t, wire.bare+wire.sentBare, "frames with VXLAN on the wire")

		require.Empty(t, l.rotate(0, 5), "unchanged input causes no write")
		restarted, err := New(Options{VTEP: a.vtep, Namespace: a.path})
		require.NoError(t, err)
		a.ipsec.Close()
		a.ipsec = restarted
		writes, err := a.ipsec.Protect(t.Context())
		require.NoError(t, err)
		require.Empty(t, writes, "a restarted agent writes nothing")
		require.Empty(t, l.rotate(0, 5), "a restarted agent writes nothing")
		exchange(t, atA, atB)

		require.Len(t, a.set(), 4)
		require.False(t, arrives(atA, atB, time.Second), "a host sends without encryption to a host that is no peer")
		require.False(t, arrives(atB, atA, time.Second), "a packet of a host that is no peer arrives")
		wire.read()
		require.Zero(t, wire.bare, "frames with VXLAN on the wire")
	})
}

// TestESPRotation rotates the keys of two hosts several times while packets flow in both directions, in each order of
// the hosts, and checks that no packet is lost.
func TestESPRotation(t *testing.T) {
	forBoth(t, func(t *testing.T, l *lab) {
		a, b := l.hosts[0], l.hosts[1]
		l.rotate(0, 5)
		l.rotate(1, 5)
		atA, atB := a.listen(a.inner), b.listen(b.inner)
		exchange(t, atA, atB)
		first, second := startFlow(t, atA, atB), startFlow(t, atB, atA)
		for i := range uint32(6) {
			order := []int{0, 1}
			if i%2 == 1 {
				order = []int{1, 0}
			}
			for _, host := range order {
				require.Len(t, l.rotate(host, 6+i), 4, "one state for each direction is added and one deleted")
				time.Sleep(50 * time.Millisecond) // packets between hosts with different epochs
			}
		}
		first.stop()
		second.stop()
	})
}

// flow is a stream of numbered packets between two hosts.
type flow struct {
	t    *testing.T
	ends chan struct{}
	work sync.WaitGroup
	sent atomic.Uint64
	got  map[uint64]bool
	to   *net.UDPConn
}

func startFlow(t *testing.T, from, to *net.UDPConn) *flow {
	t.Helper()
	f := &flow{t: t, ends: make(chan struct{}), got: map[uint64]bool{}, to: to}
	require.NoError(t, to.SetReadDeadline(time.Time{}))
	f.work.Go(func() {
		tick := time.NewTicker(2 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
			case <-f.ends:
				return
			}
			packet := binary.BigEndian.AppendUint64(nil, f.sent.Load())
			if _, err := from.WriteToUDP(packet, to.LocalAddr().(*net.UDPAddr)); err != nil {
				t.Errorf("send packet %d: %v", f.sent.Load(), err)
				return
			}
			f.sent.Add(1)
		}
	})
	f.work.Go(func() {
		buffer := make([]byte, 64)
		for {
			n, _, err := to.ReadFromUDP(buffer)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			if n == 8 {
				f.got[binary.BigEndian.Uint64(buffer)] = true
			}
		}
	})
	return f
}

// stop ends the flow and fails the test if a packet was lost.
func (f *flow) stop() {
	f.t.Helper()
	close(f.ends)
	require.NoError(f.t, f.to.SetReadDeadline(time.Now().Add(2*time.Second)))
	f.work.Wait()
	f.t.Logf("%d packets sent, %d arrived", f.sent.Load(), len(f.got))
	require.NotZero(f.t, f.sent.Load())
	require.Len(f.t, f.got, int(f.sent.Load()), "packets were lost")
}

// TestESPDrift deletes each state and each policy of a host in turn, while packets of the state have been sent, and
// checks that one call restores the deleted state or policy and that packets arrive again. States and policies of other
// programs are left alone.
func TestESPDrift(t *testing.T) {
	forBoth(t, func(t *testing.T, l *lab) {
		a, b := l.hosts[0], l.hosts[1]
		foreign := addState{id: stateID{b.vtep, 0x7777}, source: a.vtep, key: keyOf(a.vtep, b.vtep, 99), out: true}
		addForeign(t, a, foreign)
		l.rotate(0, 5)
		l.rotate(1, 5)
		atA, atB := a.listen(a.inner), b.listen(b.inner)
		for range 20 {
			exchange(t, atA, atB)
		}
		require.Empty(t, l.rotate(0, 5), "sequence numbers are seen")
		have, err := a.ipsec.kernel.read(t.Context())
		require.NoError(t, err)
		require.Len(t, have.states, 4, "the state of another program does not count")
		for _, id := range sortedIDs(have.states) {
			require.NoError(t, deleteState{id, have.states[id].source}.apply(a.ipsec.kernel))
			writes := l.rotate(0, 5)
			require.Len(t, writes, 1)
			t.Log(writes[0])
			require.Empty(t, l.rotate(0, 5))
			exchange(t, atA, atB)
		}
		for _, p := range have.policies {
			require.NoError(t, deletePolicy{p}.apply(a.ipsec.kernel))
			require.Len(t, l.rotate(0, 5), 1)
			exchange(t, atA, atB)
		}
		_, err = Remove(t.Context(), a.path)
		require.NoError(t, err)
		a.in(func() error {
			list, err := netlink.XfrmStateList(unix.AF_UNSPEC)
			require.Len(t, list, 1, "the state of another program is still there")
			require.Equal(t, 0x7777, list[0].Spi)
			return err
		})
	})
}

// addForeign adds a state of another program.
func addForeign(t *testing.T, h *labHost, c addState) {
	t.Helper()
	h.in(func() error {
		return netlink.XfrmStateAdd(&netlink.XfrmState{
			Src: c.source.AsSlice(), Dst: c.id.destination.AsSlice(), Proto: netlink.XFRM_PROTO_ESP, Mode: netlink.XFRM_MODE_TRANSPORT,
			Spi: int(c.id.spi), Reqid: 7, ReplayWindow: 32,
			Aead: &netlink.XfrmStateAlgo{Name: algorithm, Key: c.key[:], ICVLen: icvBits},
		})
	})
}

// TestESPNewKeys checks that hosts whose keys have changed under the same SPI, as after the restart of one of them, use
// the new keys, and that packets with other keys do not arrive.
func TestESPNewKeys(t *testing.T) {
	if !withESP(t) {
		return
	}
	l := newLab(t, false)
	a, b := l.hosts[0], l.hosts[1]
	l.rotate(0, 5)
	l.rotate(1, 5)
	atA, atB := a.listen(a.inner), b.listen(b.inner)
	exchange(t, atA, atB)

	toB, toA := a.peerOf(b, 5), b.peerOf(a, 5)
	toB.Send.Key[30]++
	require.Len(t, a.set(toB), 2, "the state is replaced")
	require.False(t, arrives(atA, atB, time.Second), "a packet with another key arrives")
	toA.Receive[1].Key[30]++
	require.Len(t, b.set(toA), 2, "the state is replaced")
	exchange(t, atA, atB)
}
