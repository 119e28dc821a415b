package qemu

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// network is a network namespace without a name, for taps. It ends with the test.
type network struct {
	*testing.T
	space netns.NsHandle
	links *netlink.Handle
}

// newNetwork makes a namespace on a thread of its own, which ends at once, so that no thread of the test stays in it.
func newNetwork(t *testing.T) *network {
	t.Helper()
	n := &network{T: t}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // it is never unlocked, so the thread ends with the goroutine
		var err error
		n.space, err = netns.New()
		made <- err
	}()
	require.NoError(t, <-made)
	t.Cleanup(func() { _ = n.space.Close() })
	var err error
	n.links, err = netlink.NewHandleAt(n.space)
	require.NoError(t, err)
	t.Cleanup(n.links.Close)
	return n
}

// tap makes a tap in the namespace, which exists as long as its descriptor is open in any process.
func (n *network) tap(name string) *os.File {
	n.Helper()
	type result struct {
		file *os.File
		err  error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // it is never unlocked, so the thread ends with the goroutine
		if err := netns.Set(n.space); err != nil {
			made <- result{nil, err}
			return
		}
		file, err := openTap(name)
		made <- result{file, err}
	}()
	r := <-made
	require.NoError(n, r.err)
	n.Cleanup(func() { _ = r.file.Close() })
	return r.file
}

func openTap(name string) (*os.File, error) {
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("make tap: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// exists reports whether the tap exists: some process has its descriptor open.
func (n *network) exists(name string) bool {
	_, err := n.links.LinkByName(name)
	return err == nil
}

func virtioNIC(id string, number byte) NIC {
	mac := net.HardwareAddr{2, 0, 0x5e, 0x10, 0, number}
	return NIC{ID: id, Model: VirtioNet, MAC: mac.String(), MTU: 1450, Slot: -1, Port: "port-" + id}
}

// openTaps returns the number of a process's descriptors of /dev/net/tun.
func openTaps(t *testing.T, pid int) int {
	t.Helper()
	names, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	taps := 0
	for _, name := range names {
		to, err := os.Readlink(filepath.Join(fmt.Sprintf("/proc/%d/fd", pid), name.Name()))
		if err == nil && to == "/dev/net/tun" {
			taps++
		}
	}
	return taps
}

// TestNICsOfStart starts a VM with an interface of each model. QEMU has their taps after the agent has closed its own
// copies, an agent that adopts QEMU finds the interfaces without opening anything, and the taps disappear with QEMU.
func TestNICsOfStart(t *testing.T) {
	l, n := newLab(t), newNetwork(t)
	s, files := l.bootable()
	s.NICs = []NIC{virtioNIC("a", 1), virtioNIC("b", 2)}
	s.NICs[1].Model = E1000
	_, err := l.launcher.Launch(l.ctx, l.home, s, files, 7, "test")
	require.ErrorContains(t, err, "network interface a has no tap")
	files.Taps = map[string]*os.File{"a": n.tap("tapa"), "b": n.tap("tapb")}
	p := l.launch(s, files)
	closeAll(files.Taps["a"], files.Taps["b"])
	require.Equal(t, 2, openTaps(t, p.Record().PID))
	require.True(t, n.exists("tapa"))
	require.True(t, n.exists("tapb"))
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")

	p.Close()
	p, err = l.launcher.Adopt(l.ctx, l.home)
	require.NoError(t, err)
	t.Cleanup(p.Close)
	nics, err := p.NICs(l.ctx)
	require.NoError(t, err)
	s.NICs[0].Slot, s.NICs[1].Slot = 0, 1
	require.Equal(t, []AttachedNIC{{s.NICs[0], true}, {s.NICs[1], true}}, nics)
	require.Equal(t, 2, openTaps(t, p.Record().PID))

	require.NoError(t, p.PowerOff(l.ctx))
	l.eventually(func() bool { return !n.exists("tapa") && !n.exists("tapb") }, "the taps disappear with QEMU")
}

// TestPlugNIC attaches interfaces to a running guest until no slot is free. It then removes one: the guest does not
// release the interface, because it has no operating system, until it is reset. After that the slot is free.
func TestPlugNIC(t *testing.T) {
	l, n := newLab(t), newNetwork(t)
	p := l.boot()
	before := openTaps(t, p.Record().PID)
	require.Zero(t, before)
	for i := range spareNICPorts {
		id := fmt.Sprintf("n%d", i)
		tap := n.tap(id)
		require.NoError(t, p.PlugNIC(l.ctx, virtioNIC(id, byte(i)), tap))
		require.NoError(t, tap.Close())
		require.True(t, n.exists(id))
	}
	tap := n.tap("late")
	require.ErrorIs(t, p.PlugNIC(l.ctx, virtioNIC("late", 9), tap), ErrNoPort)
	require.NoError(t, tap.Close())
	require.Equal(t, spareNICPorts, openTaps(t, p.Record().PID))

	var released []string
	release := func(n NIC) error { released = append(released, n.Port); return nil }
	require.ErrorIs(t, p.UnplugNIC(l.ctx, "n2", release), ErrNotReleased)
	require.Empty(t, released)
	require.True(t, n.exists("n2"), "an interface that the guest has not released keeps its tap")
	require.NoError(t, p.Reset(l.ctx))
	require.NoError(t, p.UnplugNIC(l.ctx, "n2", release))
	require.Equal(t, []string{"port-n2"}, released)
	l.eventually(func() bool { return !n.exists("n2") }, "the tap disappears with the interface")
	require.NoError(t, p.UnplugNIC(l.ctx, "n2", release), "a second removal has nothing to do")

	// The record names the present interfaces also for a later agent.
	r, err := l.home.Record()
	require.NoError(t, err)
	require.Equal(t, p.Record().Spec.NICs, r.Spec.NICs)
	require.Len(t, r.Spec.NICs, spareNICPorts-1)
	tap = n.tap("again")
	require.NoError(t, p.PlugNIC(l.ctx, virtioNIC("again", 9), tap))
	require.NoError(t, tap.Close())
	nics, err := p.NICs(l.ctx)
	require.NoError(t, err)
	require.Equal(t, "again", nics[2].ID)
	require.Equal(t, 2, nics[2].Slot)
	require.NoError(t, p.PowerOff(l.ctx))
}

// TestRefusedNIC checks that an interface that QEMU refuses leaves neither a backend nor an open tap in QEMU.
func TestRefusedNIC(t *testing.T) {
	l, n := newLab(t), newNetwork(t)
	p := l.boot()
	tap := n.tap("tap0")
	require.NoError(t, p.PlugNIC(l.ctx, virtioNIC("a", 1), tap))
	require.NoError(t, tap.Close())
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0) // it is not a tap
	require.NoError(t, err)
	defer null.Close()
	require.Error(t, p.PlugNIC(l.ctx, virtioNIC("b", 2), null))
	require.Len(t, p.Record().Spec.NICs, 1)
	require.Equal(t, 1, openTaps(t, p.Record().PID))
	tap = n.tap("tap1")
	require.NoError(t, p.PlugNIC(l.ctx, virtioNIC("b", 2), tap), "the name of the backend is free again")
	require.NoError(t, p.PowerOff(l.ctx))
}

func TestKeepNICSlots(t *testing.T) {
	first, err := keepNICSlots([]NIC{virtioNIC("a", 1), virtioNIC("b", 2), virtioNIC("c", 3)}, nil)
	require.NoError(t, err)
	require.Equal(t, []int{0, 1, 2}, slotsOf(first))
	// An interface keeps its slot when the one before it is removed, also with another model.
	c := virtioNIC("c", 3)
	c.Model = E1000
	next, err := keepNICSlots([]NIC{c, virtioNIC("new", 4), virtioNIC("b", 2)}, first)
	require.NoError(t, err)
	require.Equal(t, []int{2, 0, 1}, slotsOf(next))
	var many []NIC
	for i := range MaxNICs + 1 {
		many = append(many, virtioNIC(fmt.Sprintf("n%d", i), byte(i)))
	}
	_, err = keepNICSlots(many, nil)
	require.ErrorIs(t, err, ErrInvalid)
}

func slotsOf(nics []NIC) []int {
	var slots []int
	for _, n := range nics {
		slots = append(slots, n.Slot)
	}
	return slots
}
