package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// testTaps makes taps in a network namespace of the test. The name of a tap is that of its port.
type testTaps struct {
	space netns.NsHandle

	mu     sync.Mutex
	failed error                   // if set, OpenTap returns it
	opened int                     // number of successful calls of OpenTap
	open   map[cloud.PortID]string // ports that are open and not closed
}

func newTestTaps(t *testing.T) *testTaps {
	t.Helper()
	taps := &testTaps{open: map[cloud.PortID]string{}}
	require.NoError(t, onThread(func() (err error) {
		taps.space, err = netns.New()
		return err
	}))
	t.Cleanup(func() { _ = taps.space.Close() })
	return taps
}

// onThread calls f on a thread that ends with the call, so that f may change the thread's namespace.
func onThread(f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // it is never unlocked, so the thread ends with the goroutine
		done <- f()
	}()
	return <-done
}

func (taps *testTaps) OpenTap(_ context.Context, port cloud.PortID) (*os.File, error) {
	taps.mu.Lock()
	defer taps.mu.Unlock()
	if taps.failed != nil {
		return nil, taps.failed
	}
	var file *os.File
	err := onThread(func() error {
		if err := netns.Set(taps.space); err != nil {
			return err
		}
		request, err := unix.NewIfreq(string(port))
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
			_ = unix.Close(fd)
			return err
		}
		file = os.NewFile(uintptr(fd), string(port))
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("open tap %s: %w", port, err)
	}
	taps.opened++
	taps.open[port] = "open"
	return file, nil
}

func (taps *testTaps) CloseTap(_ context.Context, port cloud.PortID) error {
	taps.mu.Lock()
	defer taps.mu.Unlock()
	delete(taps.open, port)
	return nil
}

// PortCounters returns the counters of the taps that exist.
func (taps *testTaps) PortCounters(context.Context) map[cloud.PortID]cloud.PortCounters {
	out := map[cloud.PortID]cloud.PortCounters{}
	handle, err := netlink.NewHandleAt(taps.space)
	if err != nil {
		return nil
	}
	defer handle.Close()
	for _, port := range taps.ports() {
		if l, err := handle.LinkByName(string(port)); err == nil {
			s := l.Attrs().Statistics
			out[port] = cloud.PortCounters{ReceivedBytes: s.TxBytes, SentBytes: s.RxBytes}
		}
	}
	return out
}

func (taps *testTaps) fail(err error) {
	taps.mu.Lock()
	defer taps.mu.Unlock()
	taps.failed = err
}

func (taps *testTaps) ports() []cloud.PortID {
	taps.mu.Lock()
	defer taps.mu.Unlock()
	return slices.Sorted(maps.Keys(taps.open))
}

func (taps *testTaps) count() int {
	taps.mu.Lock()
	defer taps.mu.Unlock()
	return taps.opened
}

func nic(id string, number int) *agentv1.AssignedNic {
	return &agentv1.AssignedNic{Id: id, PortId: "tap-" + id, VpcId: "v", MacAddress: fmt.Sprintf("02:00:5e:10:00:%02x", number),
		Model: vmv1.NicModel_NIC_MODEL_VIRTIO_NET, Mtu: 1450}
}

// networked returns a lab whose host has a network.
func networked(t *testing.T) (*lab, *testTaps) {
	t.Helper()
	l, taps := newLab(t), newTestTaps(t)
	l.stop()
	l.taps = taps
	l.start()
	return l, taps
}

func (l *lab) seesNICs(want *agentv1.AssignedVm, nics ...cloud.NICObservation) cloud.Observation {
	l.Helper()
	return l.until(cloud.VMID(want.VmId), fmt.Sprintf("NICs %+v of generation %d", nics, want.Generation), func(o cloud.Observation) bool {
		return o.Generation == want.Generation && slices.Equal(o.NICs, nics)
	})
}

func attached(id string) cloud.NICObservation { return cloud.NICObservation{ID: id, Attached: true} }

// TestNICs starts a VM whose port the network does not know at first. The start is repeated until the port is known. A
// new agent adopts the VM without opening a tap. The taps are closed when the guest has ended, also if no agent ran at
// that time, and when the VM is destroyed.
func TestNICs(t *testing.T) {
	l, taps := networked(t)
	taps.fail(errors.New("the port is not known yet"))
	want := on(l.vm(1))
	want.Nics = []*agentv1.AssignedNic{nic("a", 1), nic("b", 2)}
	want.Nics[1].Model = vmv1.NicModel_NIC_MODEL_E1000
	l.assign(want)
	o := l.until(cloud.VMID(want.VmId), "the reason", func(o cloud.Observation) bool { return o.LastError != "" })
	require.Equal(t, "connect network interface a to port tap-a: the port is not known yet", o.LastError)
	require.Equal(t, cloud.ObservedLaunching, o.Observed)
	require.Zero(t, o.StartsDone, "a start without its taps is not done")
	taps.fail(nil)
	l.sees(want, cloud.ObservedRunning)
	o = l.seesNICs(want, attached("a"), attached("b"))
	l.says(want.VmId, "GUEST UP", 1)
	require.Equal(t, 2, taps.count())

	l.stop()
	l.start()
	l.assign(want)
	adopted := l.seesNICs(want, attached("a"), attached("b"))
	require.Equal(t, o.PID, adopted.PID)
	require.Equal(t, 2, taps.count(), "an adopted guest keeps its taps")

	l.stop()
	kill9(t, o.PID)
	require.Equal(t, []cloud.PortID{"tap-a", "tap-b"}, taps.ports())
	l.start()
	l.assign(want)
	ended := l.sees(want, cloud.ObservedEnded)
	require.Empty(t, ended.NICs)
	require.Eventually(t, func() bool { return len(taps.ports()) == 0 }, within, 5*time.Millisecond, "the taps are closed")

	want = with(want, func(w *agentv1.AssignedVm) { w.Starts++; w.Nics = []*agentv1.AssignedNic{nic("c", 3)} })
	l.assign(want)
	l.seesNICs(want, attached("c"))
	require.Equal(t, []cloud.PortID{"tap-c"}, taps.ports())
	want = destroyed(want)
	l.assign(want)
	l.sees(want, cloud.ObservedAbsent)
	require.Empty(t, taps.ports())
}

// TestHostWithoutNetwork checks that a VM with a network interface reports why it cannot start on a host without
// networks.
func TestHostWithoutNetwork(t *testing.T) {
	l := newLab(t)
	want := on(l.blank(1))
	want.Nics = []*agentv1.AssignedNic{nic("a", 1)}
	l.assign(want)
	o := l.until(cloud.VMID(want.VmId), "the reason", func(o cloud.Observation) bool { return o.LastError != "" })
	require.Equal(t, errNoNetworks.Error(), o.LastError)
}

// TestHotPlug attaches a network interface to a running guest and detaches another. The guest has no operating system,
// so it releases the device only when it is reset: until then the interface is reported as attached with an error, and
// its port is not closed.
func TestHotPlug(t *testing.T) {
	l, taps := networked(t)
	want := on(l.vm(1))
	want.Nics = []*agentv1.AssignedNic{nic("a", 1)}
	l.assign(want)
	pid := l.seesNICs(want, attached("a")).PID
	l.says(want.VmId, "GUEST UP", 1)

	want = with(want, func(w *agentv1.AssignedVm) { w.Nics = append(slices.Clone(w.Nics), nic("b", 2)) })
	l.assign(want)
	l.seesNICs(want, attached("a"), attached("b"))
	require.Equal(t, []cloud.PortID{"tap-a", "tap-b"}, taps.ports())

	want = with(want, func(w *agentv1.AssignedVm) { w.Nics = w.Nics[1:] })
	l.assign(want)
	o := l.until(cloud.VMID(want.VmId), "the failure", func(o cloud.Observation) bool { return len(o.NICs) == 2 && o.NICs[0].Error != "" })
	require.True(t, o.NICs[0].Attached)
	require.Contains(t, o.NICs[0].Error, "detach network interface a: the guest does not release")
	require.Equal(t, []cloud.PortID{"tap-a", "tap-b"}, taps.ports())

	want = with(want, func(w *agentv1.AssignedVm) { w.Resets++ })
	l.assign(want)
	o = l.seesNICs(want, attached("b"))
	require.Equal(t, pid, o.PID)
	require.Equal(t, []cloud.PortID{"tap-b"}, taps.ports())
}

// TestSeed checks that a VM's seed is made when the VM is built, that QEMU has it open for reading only, and that a
// changed seed is used by the next start.
func TestSeed(t *testing.T) {
	l := newLab(t)
	want := l.vm(1)
	want.Seed = &agentv1.AssignedSeed{HostName: "web", UserData: []byte("#!/bin/sh\necho first\n")}
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	home, err := l.o.Homes.Open(want.VmId)
	require.NoError(t, err)
	first, err := os.ReadFile(home.Seed())
	require.NoError(t, err)
	require.Contains(t, string(first), "echo first")
	require.Contains(t, string(first), "web")
	st, err := os.Stat(home.Seed())
	require.NoError(t, err)
	require.EqualValues(t, 0o600, st.Mode().Perm())

	want = on(want)
	want.Seed = &agentv1.AssignedSeed{HostName: "web", UserData: []byte("#!/bin/sh\necho second\n")}
	l.assign(want)
	pid := l.sees(want, cloud.ObservedRunning).PID
	l.says(want.VmId, "GUEST UP", 1)
	second, err := os.ReadFile(home.Seed())
	require.NoError(t, err)
	require.Contains(t, string(second), "echo second")
	require.False(t, bytes.Contains(second, []byte("echo first")))
	modes := openModes(t, pid, home.Seed())
	require.NotEmpty(t, modes)
	require.NotContains(t, modes, "w")

	want = off(want, 0)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	want = on(want)
	want.Seed = nil
	l.assign(want)
	pid = l.sees(want, cloud.ObservedRunning).PID
	require.NoFileExists(t, home.Seed())
	require.Empty(t, openModes(t, pid, home.Seed()))

	bad := l.vm(2)
	bad.Seed = &agentv1.AssignedSeed{HostName: "not a name"}
	l.assign(want, bad)
	o := l.sees(bad, cloud.ObservedBuildFailed)
	require.Contains(t, o.LastError, "host name")
}

// openModes returns the modes in which a process has files with the name of path open: r for reading only, else w. QEMU
// may have several descriptors of one file.
func openModes(t *testing.T, pid uint32, path string) []string {
	t.Helper()
	names, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(t, err)
	var modes []string
	for _, n := range names {
		to, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, n.Name()))
		if err != nil || filepath.Base(to) != filepath.Base(path) {
			continue
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/%d/fdinfo/%s", pid, n.Name()))
		require.NoError(t, err)
		mode := "w"
		for line := range strings.Lines(string(info)) {
			if flags, ok := strings.CutPrefix(line, "flags:"); ok && strings.HasSuffix(strings.TrimSpace(flags), "0") {
				mode = "r"
			}
		}
		modes = append(modes, mode)
	}
	return modes
}
