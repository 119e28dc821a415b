package qemu

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/cgroup/cgrouptest"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// guest is a boot sector with a small program. It prints GUEST UP on the serial port, ends when its power button is
// pressed, and executes single letters that it reads from the serial port (see testdata/guest.s). To build it:
//
//	as --32 -o guest.o guest.s && ld -m elf_i386 -Ttext 0x7c00 --oformat binary -o guest.bin guest.o
//
//go:embed testdata/guest.bin
var guest []byte

// kernel is the real-mode part of a bzImage. It prints its command line and the size of its initrd, and powers off. To
// build it:
//
//	as --32 -o kernel.o kernel.s && ld -m elf_i386 -Ttext 0 --oformat binary -o kernel.bin kernel.o
//
//go:embed testdata/kernel.bin
var kernel []byte

const launcherCommand = "launch-guest"

// TestMain runs the launcher of QEMU, or the agent of TestAgentIsKilled, instead of the tests if the first argument
// requests it.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == launcherCommand {
		LauncherMain()
	}
	if len(os.Args) == 5 && os.Args[1] == agentCommand {
		fmt.Fprintln(os.Stderr, beAgent(os.Args[2], os.Args[3], os.Args[4]))
		os.Exit(1)
	}
	if err := cgrouptest.RemoveLeft("trivet-test-qemu"); err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(m.Run())
}

// lab is a host with the home of one VM. At the end of the test, all processes, control groups and files are removed.
type lab struct {
	*testing.T
	ctx      context.Context
	launcher *Launcher
	homes    *Homes
	home     *Home
	root     string // root of the cgroup tree
}

var labs atomic.Int64

// Maximum times of waits. They are reached only if a test fails. UEFI takes 20 seconds to boot on a busy host.
const (
	maxTest = 3 * time.Minute
	maxWait = 2 * time.Minute
)

const vmID = "00000000-0000-4000-8000-00000000000a"

func newLab(t *testing.T) *lab {
	t.Helper()
	if os.Getuid() != 0 {
		skip(t, "needs root")
	}
	program, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		skip(t, err.Error())
	}
	ctx, cancel := context.WithTimeout(context.Background(), maxTest)
	t.Cleanup(cancel)
	root := fmt.Sprintf("trivet-test-qemu-%d-%d", os.Getpid(), labs.Add(1))
	tree, err := cgroup.Open(root)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, errors.Join(cgrouptest.End(tree), tree.Close())) })
	homes, err := OpenHomes(filepath.Join(t.TempDir(), strings.Repeat("a-long-directory-", 6), "vms"), FirstUID, LastUID)
	require.NoError(t, err)
	home, err := homes.Claim(vmID)
	require.NoError(t, err)
	return &lab{T: t, ctx: ctx, homes: homes, home: home, root: root, launcher: &Launcher{
		Program:         program,
		LauncherCommand: []string{"/proc/self/exe", launcherCommand},
		Cgroups:         tree,
		CPUModels:       []string{"qemu64", "max"},
	}}
}

func skip(t *testing.T, why string) {
	t.Helper()
	if os.Getenv("CI") == "true" {
		t.Fatal(why)
	}
	t.Skip(why)
}

// spec returns a VM without disks: its firmware runs, but finds nothing to boot.
func spec() Spec {
	return Spec{ID: vmID, Machine: "pc-q35-7.2", Accel: TCG, CPUModel: "qemu64", VCPUs: 1, MemoryMiB: 64}
}

// disk creates the overlay of d and adds the disk to s and files. If d has a base image, disk also creates that image,
// with the boot sector guest at its beginning.
func (l *lab) disk(s *Spec, files *Files, d Disk) {
	l.Helper()
	dir := l.TempDir()
	image := filepath.Join(dir, "image")
	require.NoError(l, os.WriteFile(image, append(guest, make([]byte, 1<<20-len(guest))...), 0o444))
	overlay, err := os.Create(filepath.Join(dir, "overlay"))
	require.NoError(l, err)
	l.Cleanup(func() { _ = overlay.Close() })
	_, err = qcow2.Create(overlay, 1<<30)
	require.NoError(l, err)
	layers := Layers{Overlay: overlay, Size: 1 << 30}
	if d.Base == qcow2.QCOW2 {
		out, err := exec.Command("qemu-img", "convert", "-f", "raw", "-O", "qcow2", image, image+".qcow2").CombinedOutput()
		require.NoError(l, err, "%s", out)
		image += ".qcow2"
	}
	if d.Base != "" {
		layers.Base, err = os.Open(image)
		require.NoError(l, err)
		l.Cleanup(func() { _ = layers.Base.Close() })
	}
	if files.Disks == nil {
		files.Disks = map[string]Layers{}
	}
	files.Disks[d.ID] = layers
	s.Disks = append(s.Disks, d)
}

// bootable returns a Spec and the files of a VM that boots guest from a virtio disk.
func (l *lab) bootable() (Spec, Files) {
	s, files := spec(), Files{}
	l.disk(&s, &files, Disk{ID: "root", Bus: Virtio, Slot: -1, Cache: Writeback, Base: qcow2.Raw})
	return s, files
}

func (l *lab) launch(s Spec, files Files) *Process {
	l.Helper()
	p, err := l.launcher.Launch(l.ctx, l.home, s, files, 7, "test")
	require.NoError(l, err)
	l.Cleanup(p.Close)
	return p
}

// boot starts the VM of bootable and waits until its guest has printed GUEST UP.
func (l *lab) boot() *Process {
	l.Helper()
	s, files := l.bootable()
	p := l.launch(s, files)
	require.NoError(l, p.Resume(l.ctx))
	l.says("GUEST UP\n")
	return p
}

// says waits until the console log of the guest contains text.
func (l *lab) says(text string) {
	l.Helper()
	l.eventually(func() bool {
		tail, err := l.home.Console().Tail(1 << 20)
		return err == nil && strings.Contains(string(tail), text)
	}, "the guest says %q", text)
}

func (l *lab) eventually(condition func() bool, what string, args ...any) {
	l.Helper()
	require.Eventually(l, condition, maxWait, 2*time.Millisecond, append([]any{what}, args...)...)
}

func (l *lab) exited(p *Process) Exit {
	l.Helper()
	select {
	case <-p.Exited():
	case <-l.ctx.Done():
		l.Fatal("QEMU has not ended")
	}
	procs, err := l.launcher.Cgroups.Procs(vmID)
	require.NoError(l, err)
	require.Empty(l, procs)
	recorded, known, err := l.home.Exit()
	require.NoError(l, err)
	require.True(l, known)
	require.Equal(l, p.Exit(), recorded)
	return recorded
}
