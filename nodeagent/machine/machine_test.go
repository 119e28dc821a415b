package machine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestLife builds a VM, starts it, stops it by its power button, starts it again, powers it off and destroys it. It
// checks each report, and that no file of the VM remains.
func TestLife(t *testing.T) {
	l := newLab(t)
	want := l.vm(1)
	l.assign(want)
	o := l.sees(want, cloud.ObservedBuilt)
	require.Zero(t, o.PID)

	want = on(want)
	l.assign(want)
	o = l.sees(want, cloud.ObservedRunning)
	require.NotZero(t, o.PID)
	require.NotZero(t, o.StartedAt)
	require.EqualValues(t, 1, o.StartsDone)
	l.says(want.VmId, "GUEST UP", 1)

	want = off(want, within)
	l.assign(want)
	l.sees(want, cloud.ObservedStopping)
	o = l.sees(want, cloud.ObservedBuilt)
	require.Empty(t, o.LastError)
	require.Zero(t, o.PID)
	l.says(want.VmId, "BUTTON", 1)

	want = on(want)
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 2)
	want = off(want, 0)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)

	want = destroyed(on(want))
	l.assign(want)
	l.sees(want, cloud.ObservedAbsent)
	ids, err := l.List()
	require.NoError(t, err)
	require.Empty(t, ids)
	entries, err := os.ReadDir(filepath.Join(l.dir, "vms"))
	require.NoError(t, err)
	require.Empty(t, entries)
	require.Equal(t, Counts{Launches: 2, Builds: 1}, l.Counts())
	l.mu.Lock()
	defer l.mu.Unlock()
	steps := map[string]int{}
	for step, all := range l.durations {
		steps[step] = len(all)
		require.Positive(t, slices.Min(all), step)
		require.Less(t, slices.Max(all), within, step)
	}
	require.Equal(t, map[string]int{"launch": 2, "build": 1, "stop": 2}, steps)
}

// TestStopDuration checks that the duration of a stop begins when the VM should be off, and is reported once, when its
// process has ended. A VM whose guest ends by itself is not stopped.
func TestStopDuration(t *testing.T) {
	var stops []time.Duration
	v := &VM{set: &MachineSet{o: Options{OnStop: func(d time.Duration) { stops = append(stops, d) }}}, guest: Running}
	power := func(p agentv1.Power) { v.updateTimers(&agentv1.AssignedVm{Power: p}) }
	power(agentv1.Power_POWER_ON)
	v.guest = None
	power(agentv1.Power_POWER_ON)
	power(agentv1.Power_POWER_OFF)
	require.Empty(t, stops, "the guest ended by itself")

	v.guest = Running
	power(agentv1.Power_POWER_OFF)
	require.Empty(t, stops)
	v.offSince = v.offSince.Add(-time.Minute)
	v.guest = None
	power(agentv1.Power_POWER_OFF)
	power(agentv1.Power_POWER_OFF)
	require.Len(t, stops, 1)
	require.GreaterOrEqual(t, stops[0], time.Minute)
}

// TestDestroyRunning checks that a running VM can be destroyed: its process ends and nothing of it remains.
func TestDestroyRunning(t *testing.T) {
	l := newLab(t)
	want := on(l.vm(1))
	l.assign(want)
	pid := l.sees(want, cloud.ObservedRunning).PID
	want = destroyed(want)
	l.assign(want)
	l.sees(want, cloud.ObservedAbsent)
	require.ErrorIs(t, syscall.Kill(int(pid), 0), syscall.ESRCH)
	ids, err := l.List()
	require.NoError(t, err)
	require.Empty(t, ids)
}

// TestKilled checks that a kill -9 of a QEMU is reported with its cause, and that the VM is not started again until a
// start is requested.
func TestKilled(t *testing.T) {
	l := newLab(t)
	want := on(l.blank(1))
	l.assign(want)
	pid := l.sees(want, cloud.ObservedRunning).PID
	require.NoError(t, syscall.Kill(int(pid), syscall.SIGKILL))
	o := l.sees(want, cloud.ObservedEnded)
	require.Equal(t, cloud.ExitFailed, o.Exit)
	require.Contains(t, o.LastError, "signal 9")
	require.Zero(t, o.PID)
	require.EqualValues(t, 1, l.Counts().Deaths)

	l.assign(with(want, func(*agentv1.AssignedVm) {}))
	want = with(want, func(w *agentv1.AssignedVm) { w.Starts++ })
	l.assign(want)
	require.NotEqual(t, pid, l.sees(want, cloud.ObservedRunning).PID)
	require.EqualValues(t, 2, l.Counts().Launches)
}

// TestAdoption checks that a new agent adopts the running VMs, and that it distinguishes a VM that was killed while no
// agent ran from one whose guest powered itself off.
func TestAdoption(t *testing.T) {
	l := newLab(t)
	var wants []*agentv1.AssignedVm
	for n := range 4 {
		wants = append(wants, on(l.vm(n)))
	}
	l.assign(wants...)
	before := map[cloud.VMID]cloud.Observation{}
	for _, w := range wants {
		before[cloud.VMID(w.VmId)] = l.sees(w, cloud.ObservedRunning)
		l.says(w.VmId, "GUEST UP", 1)
	}
	l.stop()
	id := func(n int) cloud.VMID { return cloud.VMID(vmID(n)) }
	kill9(t, before[id(0)].PID)
	l.tell(vmID(1), "o")

	l.start()
	for n := 2; n < 4; n++ {
		// Without an assignment the VM is reported with generation 0.
		o := l.until(id(n), "adopted", func(o cloud.Observation) bool { return o.Observed == cloud.ObservedRunning })
		require.Zero(t, o.Generation)
		require.Equal(t, before[id(n)].PID, o.PID)
		require.Equal(t, before[id(n)].StartedAt, o.StartedAt)
		require.EqualValues(t, 1, o.StartsDone)
	}
	killed := l.until(id(0), "killed", func(o cloud.Observation) bool { return o.Observed == cloud.ObservedEnded })
	require.Equal(t, cloud.ExitFailed, killed.Exit)
	require.Contains(t, killed.LastError, "away")
	left := l.until(id(1), "off", func(o cloud.Observation) bool { return o.Observed == cloud.ObservedEnded })
	require.Equal(t, cloud.ExitGuest, left.Exit)

	l.assign(wants...)
	require.Equal(t, cloud.ExitFailed, l.sees(wants[0], cloud.ObservedEnded).Exit)
	require.Equal(t, cloud.ExitGuest, l.sees(wants[1], cloud.ObservedEnded).Exit)
	require.Equal(t, before[id(2)].PID, l.sees(wants[2], cloud.ObservedRunning).PID)
	// The kill of an adopted process is reported as failed.
	require.NoError(t, syscall.Kill(int(before[id(3)].PID), syscall.SIGKILL))
	require.Equal(t, cloud.ExitFailed, l.sees(wants[3], cloud.ObservedEnded).Exit)
	require.Zero(t, l.Counts().Launches)
}

// TestHostileMonitors replaces the monitors of four VMs by servers that send nothing, invalid messages, an endless
// line, and endless events, as an intruder in QEMU could. The agent must report for each VM that QEMU does not answer,
// and must still stop and start another VM.
func TestHostileMonitors(t *testing.T) {
	l := newLab(t)
	hostile := []struct{ greeting, more string }{
		{"", ""},
		{"SSH-2.0-OpenSSH_9.2\n", "\x00\xff\xfe{\n"},
		{`{"QMP": `, strings.Repeat("[", 64<<10)},
		{"{\"QMP\": {}}\n", strings.Repeat(`{"event": "STOP", "data": {}}`+"\n", 1000)},
	}
	var wants []*agentv1.AssignedVm
	for n := range len(hostile) + 1 {
		wants = append(wants, on(l.blank(n)))
	}
	l.assign(wants...)
	pids := map[int]uint32{}
	for n, w := range wants {
		pids[n] = l.sees(w, cloud.ObservedRunning).PID
	}
	l.stop()
	for n, h := range hostile {
		home, err := l.o.Homes.Open(vmID(n))
		require.NoError(t, err)
		for _, monitor := range []string{"work.sock", "inspect.sock"} {
			l.intrude(filepath.Join(filepath.Dir(home.Disks()), monitor), h.greeting, h.more)
		}
	}

	l.start()
	l.assign(wants...)
	for n := range hostile {
		o := l.until(cloud.VMID(vmID(n)), "a report that QEMU does not answer", func(o cloud.Observation) bool { return o.LastError == "QEMU does not answer" })
		require.Equal(t, pids[n], o.PID)
	}
	last := len(hostile)
	other := off(wants[last], 0)
	l.assign(append(wants[:last:last], other)...)
	l.sees(other, cloud.ObservedBuilt)
	other = on(other)
	l.assign(append(wants[:last:last], other)...)
	require.Empty(t, l.sees(other, cloud.ObservedRunning).LastError)
}

// intrude replaces the Unix socket at path by a server. The server sends each client the text greeting once, and then
// the text more endlessly.
func (l *lab) intrude(path, greeting, more string) {
	dir, err := os.Open(filepath.Dir(path))
	require.NoError(l, err)
	defer dir.Close()
	require.NoError(l, os.Remove(path))
	// A path in /proc/self/fd is used, because path is too long for a socket address.
	server, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path)))
	require.NoError(l, err)
	var clients sync.WaitGroup
	var mu sync.Mutex
	var open []net.Conn
	clients.Go(func() {
		for {
			c, err := server.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			clients.Go(func() { _, _ = io.Copy(io.Discard, c); c.Close() })
			clients.Go(func() {
				_, err := io.WriteString(c, greeting)
				for err == nil && more != "" {
					_, err = io.WriteString(c, more)
				}
			})
		}
	})
	l.Cleanup(func() {
		server.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		clients.Wait()
	})
}

// kill9 kills a QEMU and collects its exit status, because the test program is its parent although the agent has
// stopped.
func kill9(t *testing.T, pid uint32) {
	require.NoError(t, syscall.Kill(int(pid), syscall.SIGKILL))
	_, err := syscall.Wait4(int(pid), nil, 0, nil)
	require.NoError(t, err)
}

// tell writes a letter to a guest's serial port.
func (l *lab) tell(id, letter string) {
	home, err := l.o.Homes.Open(id)
	require.NoError(l, err)
	c := dialConsole(l.T, filepath.Dir(home.Disks()))
	defer c.Close()
	_, err = c.Write([]byte(letter))
	require.NoError(l, err)
}

// TestStartHappensOnce checks that a start counts as done if the agent ended after recording it: the next agent reports
// it as failed and does not execute it.
func TestStartHappensOnce(t *testing.T) {
	l := newLab(t)
	want := on(l.blank(1))
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	want = off(want, 0)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	l.stop()
	path := l.recordPath(cloud.VMID(want.VmId))
	r, _, err := readRecord(path)
	require.NoError(t, err)
	r.StartsDone, r.Live = 2, true
	r.Mark = r.startMark()
	require.NoError(t, r.write(path))

	l.start()
	want = on(want)
	l.assign(want)
	o := l.sees(want, cloud.ObservedEnded)
	require.Equal(t, cloud.ExitFailed, o.Exit)
	require.Contains(t, o.LastError, "restarted")
	require.EqualValues(t, 2, o.StartsDone)
	require.Zero(t, l.Counts().Launches)
}

// TestRebootAndReset checks that a reboot gives the VM a new process, and a reset does not. The next agent must execute
// neither of them again.
func TestRebootAndReset(t *testing.T) {
	l := newLab(t)
	want := on(l.vm(1))
	l.assign(want)
	first := l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 1)
	size := func(o cloud.Observation) []uint64 { return []uint64{o.LaunchGeneration, uint64(o.VCPUs), o.MemoryMiB} }
	require.Equal(t, []uint64{want.Generation, uint64(want.Vcpus), want.MemoryMib}, size(first))
	launched := size(first)
	want = with(want, func(w *agentv1.AssignedVm) { w.Vcpus, w.CoresPerSocket, w.MemoryMib = 2, 2, w.MemoryMib+16 })
	l.assign(want)
	require.Equal(t, launched, size(l.sees(want, cloud.ObservedRunning)), "a resize must not change the process")
	want = with(want, func(w *agentv1.AssignedVm) { w.Reboots++ })
	l.assign(want)
	rebooted := l.until(first.VM, "rebooted", func(o cloud.Observation) bool {
		return o.Observed == cloud.ObservedRunning && o.RebootsDone == 1
	})
	require.NotEqual(t, first.PID, rebooted.PID)
	require.EqualValues(t, 1, rebooted.StartsDone)
	require.Equal(t, []uint64{want.Generation, 2, want.MemoryMib}, size(rebooted), "the new process must have the new size")
	l.says(want.VmId, "BUTTON", 1)
	l.says(want.VmId, "GUEST UP", 2)
	want = with(want, func(w *agentv1.AssignedVm) { w.Resets++ })
	l.assign(want)
	reset := l.until(first.VM, "reset", func(o cloud.Observation) bool { return o.ResetsDone == 1 })
	require.Equal(t, rebooted.PID, reset.PID)
	l.says(want.VmId, "GUEST UP", 3)

	l.stop()
	l.start()
	want = with(want, func(*agentv1.AssignedVm) {})
	l.assign(want)
	again := l.sees(want, cloud.ObservedRunning)
	require.Equal(t, rebooted.PID, again.PID)
	require.Equal(t, size(rebooted), size(again), "the next agent must know the size of the process")
	require.EqualValues(t, 1, again.RebootsDone)
	require.EqualValues(t, 1, again.ResetsDone)
}

// TestRebootSurvivesAgentRestart checks that the next agent completes a reboot that an earlier agent began.
func TestRebootSurvivesAgentRestart(t *testing.T) {
	l := newLab(t)
	want := on(l.vm(1))
	l.assign(want)
	first := l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 1)
	l.stop()
	path := l.recordPath(cloud.VMID(want.VmId))
	r, _, err := readRecord(path)
	require.NoError(t, err)
	r.RebootsBegun = 1
	require.NoError(t, r.write(path))
	l.tell(want.VmId, "o") // the guest powers itself off while no agent runs
	l.start()
	want = with(want, func(w *agentv1.AssignedVm) { w.Reboots++ })
	l.assign(want)
	o := l.until(first.VM, "rebooted", func(o cloud.Observation) bool {
		return o.Observed == cloud.ObservedRunning && o.RebootsDone == 1
	})
	require.NotEqual(t, first.PID, o.PID)
}

// TestGraceEnds checks that a guest that ignores its power button is powered off after the grace period.
func TestGraceEnds(t *testing.T) {
	l := newLab(t)
	want := on(l.blank(1))
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	want = off(want, 300*1e6)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
}

// TestGuestPowersOff checks that a guest that powers itself off is reported as ended by the guest, and not counted in
// Deaths.
func TestGuestPowersOff(t *testing.T) {
	l := newLab(t)
	want := on(l.vm(1))
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 1)
	l.tell(want.VmId, "o")
	o := l.sees(want, cloud.ObservedEnded)
	require.Equal(t, cloud.ExitGuest, o.Exit)
	require.Empty(t, o.LastError)
	require.Zero(t, l.Counts().Deaths)
}

func TestGuestPanics(t *testing.T) {
	l := newLab(t)
	want := on(l.vm(1))
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 1)
	l.tell(want.VmId, "p")
	o := l.sees(want, cloud.ObservedEnded)
	require.Equal(t, cloud.ExitFailed, o.Exit)
	require.Contains(t, o.LastError, "panicked")
}

// TestBuildFails checks that a failed build is repeated, unless a repetition would fail the same way.
func TestBuildFails(t *testing.T) {
	l := newLab(t)
	away := errors.New("no member provides the image")
	l.fetchErr.Store(&away)
	want := on(l.vm(1))
	l.assign(want)
	l.until(cloud.VMID(want.VmId), "the reason why the disks are not built", func(o cloud.Observation) bool {
		return o.Observed == cloud.ObservedBuilding && strings.Contains(o.LastError, "no member provides the image")
	})
	l.fetchErr.Store(nil)
	o := l.sees(want, cloud.ObservedRunning)
	require.Empty(t, o.LastError)

	small := l.vm(2)
	small.Disks[0].SizeBytes = 512
	strange := l.vm(3)
	strange.CpuModel = "max,+evil"
	crowded := l.vm(4)
	for _, id := range []string{"a", "b", "c", "d", "e"} {
		crowded.Disks = append(crowded.Disks, &agentv1.AssignedDisk{
			Id: id, SizeBytes: 1 << 20, Bus: vmv1.DiskBus_DISK_BUS_IDE, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
		})
	}
	l.assign(want, small, strange, crowded)
	for _, w := range []*agentv1.AssignedVm{small, strange, crowded} {
		o := l.sees(w, cloud.ObservedBuildFailed)
		require.NotEmpty(t, o.LastError)
		require.NotContains(t, o.LastError, l.dir)
	}
	gone := destroyed(small)
	l.assign(want, gone, strange, crowded)
	l.sees(gone, cloud.ObservedAbsent)
}

// TestLaunchFails checks that a failed launch is reported without a path of the host, and that it is not repeated.
func TestLaunchFails(t *testing.T) {
	l := newLab(t)
	broken, err := exec.LookPath("false")
	require.NoError(t, err)
	want := l.blank(1)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	l.o.QEMU.Program = broken
	want = on(want)
	l.assign(want)
	o := l.sees(want, cloud.ObservedEnded)
	require.Equal(t, cloud.ExitFailed, o.Exit)
	require.NotEmpty(t, o.LastError)
	require.NotContains(t, o.LastError, "/")
	require.EqualValues(t, 1, o.StartsDone)
	require.Equal(t, uint64(1), l.Counts().LaunchFailures)
	l.o.QEMU.Program = l.program
	want = with(want, func(w *agentv1.AssignedVm) { w.Starts++ })
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
}

// TestProcessesWithoutRecord checks that processes in the control group of a VM without a record are reported, and that
// they are ended when the desired state is DESTROYED.
func TestProcessesWithoutRecord(t *testing.T) {
	l := newLab(t)
	l.stop()
	id := vmID(7)
	require.NoError(t, l.tree.Create(id, limits))
	sleeper := exec.Command("sleep", "600")
	require.NoError(t, sleeper.Start())
	t.Cleanup(func() { sleeper.Process.Kill(); sleeper.Wait() })
	for _, f := range l.tree.Entries(id) {
		require.NoError(t, os.WriteFile(f, []byte(itoa(sleeper.Process.Pid)), 0))
	}
	l.start()
	o := l.until(cloud.VMID(id), "reported", func(o cloud.Observation) bool { return o.Observed == cloud.ObservedRunning })
	require.EqualValues(t, sleeper.Process.Pid, o.PID)
	l.assign()
	want := destroyed(l.blank(7))
	l.assign(want)
	l.sees(want, cloud.ObservedAbsent)
	ids, err := l.List()
	require.NoError(t, err)
	require.Empty(t, ids)
}

// TestOrphan checks that a VM with desired state ORPHANED is powered off and that its disks are kept.
func TestOrphan(t *testing.T) {
	l := newLab(t)
	want := on(l.blank(1))
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	orphan := with(want, func(w *agentv1.AssignedVm) { w.Power = agentv1.Power_POWER_ORPHANED })
	l.assign(orphan)
	l.until(cloud.VMID(want.VmId), "kept", func(o cloud.Observation) bool {
		return o.Observed == cloud.ObservedBuilt && o.PID == 0 && strings.Contains(o.LastError, "kept")
	})
	home, err := l.o.Homes.Open(want.VmId)
	require.NoError(t, err)
	require.FileExists(t, filepath.Join(home.Disks(), "root.qcow2"))
}

// TestInterruptedDestroy checks that the next agent completes a removal that an earlier agent began.
func TestInterruptedDestroy(t *testing.T) {
	l := newLab(t)
	want := l.blank(1)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	l.stop()
	home, err := l.o.Homes.Open(want.VmId)
	require.NoError(t, err)
	require.NoError(t, os.Remove(filepath.Join(filepath.Dir(home.Disks()), "uid")))
	require.NoError(t, os.RemoveAll(home.Disks()))
	l.start()
	want = destroyed(want)
	l.assign(want)
	l.sees(want, cloud.ObservedAbsent)
	ids, err := l.List()
	require.NoError(t, err)
	require.Empty(t, ids)
}

func TestMeasure(t *testing.T) {
	l := newLab(t)
	want := on(l.vm(1))
	l.assign(want, l.blank(2))
	l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 1)
	figures := l.Measure(t.Context())
	require.Len(t, figures, 1)
	u := figures[cloud.VMID(want.VmId)]
	require.Positive(t, u.CPUPercent)
	require.Positive(t, u.MemoryMiB)
	require.Positive(t, u.DiskReadBytes)
	used, err := l.UsedImages()
	require.NoError(t, err)
	require.Equal(t, map[string]bool{l.sum(): true}, used)
	for _, s := range l.LastReports() {
		require.Equal(t, string(s.ID) == want.VmId, s.Usage != nil)
	}
}

func TestConsole(t *testing.T) {
	l := newLab(t)
	require.ErrorIs(t, l.Console(t.Context(), cloud.VMID(vmID(1)), 0, false, new(bytes.Buffer)), errNoConsole)
	require.ErrorIs(t, l.Console(t.Context(), "../../etc", 0, false, new(bytes.Buffer)), errNoConsole)
	want := on(l.vm(1))
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 1)
	var tail bytes.Buffer
	require.NoError(t, l.Console(t.Context(), cloud.VMID(want.VmId), 3, false, &tail))
	require.Len(t, tail.Bytes(), 3)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	enough := errors.New("enough")
	err := l.Console(ctx, cloud.VMID(want.VmId), 0, true, writer(func(p []byte) error {
		if strings.Contains(string(p), "UP") {
			return enough
		}
		return nil
	}))
	require.ErrorIs(t, err, enough)
}

type writer func([]byte) error

func (w writer) Write(p []byte) (int, error) { return len(p), w(p) }

// TestBrief checks that brief returns one line of at most maxBrief bytes without a path of the host.
func TestBrief(t *testing.T) {
	for in, want := range map[string]string{
		"make VM directory: mkdir /var/lib/trivet/vms: no space left on device": "make VM directory: mkdir (file): no space left on device",
		"a\nb\tc":                       "a b c",
		"read \"/etc/x\" and 3/4 of it": "read \"(file)\" and 3/4 of it",
		strings.Repeat("é", 400):        strings.Repeat("é", 150),
	} {
		require.Equal(t, want, brief(errors.New(in)))
	}
}
