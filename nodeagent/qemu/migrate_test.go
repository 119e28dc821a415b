package qemu

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// migration is a migration of a guest from the QEMU of the lab source to the QEMU of another lab.
type migration struct {
	source, target *lab
	from, to       *Process
	files          Files // of the target
	given          Files // of the source
	memory         *os.File
	sockets        string
}

// newMigration boots a guest with a disk over a base image and a blank disk, and starts the QEMU of the target.
func newMigration(t *testing.T) *migration { return newMigrationOver(t, 0) }

// newMigrationOver is like newMigration. The target receives the memory over the given number of channels.
func newMigrationOver(t *testing.T, channels int) *migration {
	t.Helper()
	source := newLab(t)
	s, files := source.bootable()
	source.disk(&s, &files, Disk{ID: "data", Bus: Virtio, Slot: -1, Cache: Writeback})
	p := source.launch(s, files)
	require.NoError(t, p.Resume(source.ctx))
	source.says("GUEST UP\n")
	return migrationOver(source, newLab(t), p, files, channels)
}

// migrationTo starts the QEMU of the target for a guest at the source. The parameter files has the guest's files.
func migrationTo(source, target *lab, from *Process, files Files) *migration {
	source.Helper()
	return migrationOver(source, target, from, files, 0)
}

// migrationOver is like migrationTo. The target receives the memory over the given number of channels.
func migrationOver(source, target *lab, from *Process, files Files, channels int) *migration {
	t := source.T
	t.Helper()
	m := &migration{source: source, target: target, from: from, given: files, sockets: t.TempDir()}
	text, err := m.from.Machine()
	require.NoError(t, err)
	spec, err := ParseMachine(text)
	require.NoError(t, err)
	require.Equal(t, m.from.Record().Spec.Disks, spec.Disks)
	var none Spec
	for _, d := range spec.Disks {
		m.target.disk(&none, &m.files, Disk{ID: d.ID, Base: d.Base})
		layers := m.files.Disks[d.ID]
		layers.Base = files.Disks[d.ID].Base
		m.files.Disks[d.ID] = layers
	}
	m.to, err = m.target.launcher.LaunchIncoming(m.target.ctx, m.target.home, spec, m.files, 7, "test")
	require.NoError(t, err)
	t.Cleanup(m.to.Close)
	argv := m.from.Record().Argv
	if m.from.Record().Incoming {
		argv = argv[:len(argv)-2] // without -incoming
	}
	require.Equal(t, argv, m.to.Record().Argv[:len(m.to.Record().Argv)-2])

	dir, err := os.Open(m.sockets)
	require.NoError(t, err)
	defer dir.Close()
	disks, err := listen(dir, "disks.sock")
	require.NoError(t, err)
	defer disks.Close()
	if channels > 0 {
		memory, err := listen(dir, "memory.sock")
		require.NoError(t, err)
		defer memory.Close()
		require.NoError(t, m.to.PrepareIncoming(m.target.ctx, disks, memory, channels))
		return m
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	theirs := os.NewFile(uintptr(pair[0]), "memory")
	defer theirs.Close()
	m.memory = os.NewFile(uintptr(pair[1]), "memory")
	require.NoError(t, m.to.PrepareIncoming(m.target.ctx, disks, theirs, 0))
	return m
}

// dial connects to the NBD server of the target.
func (m *migration) dial(context.Context, string) (*os.File, error) {
	dir, err := os.Open(m.sockets)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	conn, err := net.Dial("unix", socketPath(dir, "disks.sock"))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return conn.(*net.UnixConn).File()
}

// mirrored copies the disks.
func (m *migration) mirrored() {
	m.source.Helper()
	require.NoError(m.source, m.from.BeginMirrors(m.source.ctx, 0, m.dial))
	m.source.eventually(func() bool {
		s, err := m.from.Migration(m.source.ctx)
		require.NoError(m.source, err)
		for _, one := range s.Mirrors {
			require.Empty(m.source, one.Error)
			if !one.Ready {
				return false
			}
		}
		return len(s.Mirrors) == len(m.from.Record().Spec.Copies())
	}, "the disks are copied")
}

// status waits until QEMU reports a status of the migration.
func (m *migration) status(p *Process, status string) {
	m.source.Helper()
	m.source.eventually(func() bool {
		s, err := p.Migration(m.source.ctx)
		require.NoError(m.source, err)
		return s.Status == status
	}, "status %s", status)
}

// paused makes the source send the state, and waits until it has the status pre-switchover.
func (m *migration) paused() {
	m.source.Helper()
	m.mirrored()
	require.NoError(m.source, m.from.SendState(m.source.ctx, 0, Route{Stream: m.memory}))
	require.NoError(m.source, m.memory.Close())
	m.status(m.from, "pre-switchover")
	require.NoError(m.source, m.from.EndMirrors(m.source.ctx))
}

// sector returns the second sector of the disk root from a file. The guest writes this sector.
func sector(t *testing.T, f *os.File) string {
	t.Helper()
	raw := filepath.Join(t.TempDir(), "raw")
	out, err := runImg("convert", "-U", "--image-opts", "-O", "raw",
		fmt.Sprintf("driver=qcow2,file.driver=file,file.filename=%s", f.Name()), raw)
	require.NoError(t, err, "%s", out)
	data, err := os.ReadFile(raw)
	require.NoError(t, err)
	return string(data[512:1024])
}

// readopt closes a process and adopts it again, as a restarted agent does. It returns after the new Process has ended
// earlier copies.
func (l *lab) readopt(p *Process) *Process {
	l.Helper()
	p.Close()
	next, err := l.launcher.Adopt(l.ctx, l.home)
	require.NoError(l, err)
	l.Cleanup(next.Close)
	l.eventually(func() bool { return len(next.copiesLeft) == 0 && !next.Copying() }, "the agent has ended copies")
	return next
}

// writes checks that the guest runs and can write its disk: after it has read w, it writes its disk and prints W.
func (l *lab) writes() {
	l.Helper()
	before := l.printed("W")
	conn := l.types("w")
	defer conn.Close()
	l.eventually(func() bool { return l.printed("W") > before }, "the guest has written its disk")
}

// printed returns how often the console log of the guest has the text.
func (l *lab) printed(text string) int {
	tail, err := l.home.Console().Tail(1 << 20)
	if err != nil {
		return 0
	}
	return strings.Count(string(tail), text)
}

// TestMigrate moves a guest with two disks. The guest continues at the target with its disks, but only after
// ResumeMigrated: the end of the transfer, Resume and a new agent do not start it.
func TestMigrate(t *testing.T) {
	m := newMigration(t)
	m.source.writes()
	m.paused()
	require.NoError(t, m.from.HandOver(m.source.ctx))
	m.status(m.from, "completed")
	m.status(m.to, "completed")

	require.ErrorIs(t, m.to.Resume(m.target.ctx), ErrMigrating)
	require.ErrorIs(t, m.from.Resume(m.source.ctx), ErrMigrating)
	m.from, m.to = m.source.readopt(m.from), m.target.readopt(m.to)
	for _, p := range []*Process{m.from, m.to} {
		s, err := p.Status(m.source.ctx)
		require.NoError(t, err)
		require.False(t, s.Running, "a new agent resumed the guest")
	}

	require.NoError(t, m.to.EndIncoming(m.target.ctx))
	require.NoError(t, m.to.ResumeMigrated(m.target.ctx, nil))
	require.NoError(t, m.to.Announce(m.target.ctx))
	require.Equal(t, string(guest[:16]), sector(t, m.files.Disks["root"].Overlay)[:16])
	m.target.writes()
}

// TestMigrationCancelled cancels a migration before the switchover. The guest continues at the source, with its disks,
// and the QEMU of the target ends.
func TestMigrationCancelled(t *testing.T) {
	m := newMigration(t)
	m.paused()
	require.NoError(t, m.from.CancelMigration(m.source.ctx))
	require.ErrorIs(t, m.from.Resume(m.source.ctx), ErrMigrating)
	require.NoError(t, m.from.ResumeMigrated(m.source.ctx, nil))
	m.source.writes()
	require.Equal(t, Crashed, m.target.exited(m.to).Reason)
	names, _ := m.source.nodes(m.from)
	for _, n := range names {
		require.NotContains(t, n, mirrorPrefix)
	}
	require.NoError(t, m.from.CancelMigration(m.source.ctx))
}

// TestMigrationTargetDies kills the target's QEMU while disks are copied, and after the source has handed over the
// guest. The source continues the guest.
func TestMigrationTargetDies(t *testing.T) {
	for _, after := range []string{"mirrors", "switchover", "hand-over"} {
		t.Run(after, func(t *testing.T) {
			m := newMigration(t)
			switch after {
			case "mirrors":
				m.mirrored()
			default:
				m.paused()
			}
			require.NoError(t, m.to.Kill(m.target.ctx))
			if after == "hand-over" {
				require.NoError(t, m.from.HandOver(m.source.ctx))
				m.status(m.from, "failed")
				s, err := m.from.Status(m.source.ctx)
				require.NoError(t, err)
				require.False(t, s.Running, "QEMU continued the guest by itself")
			}
			require.NoError(t, m.from.CancelMigration(m.source.ctx))
			require.NoError(t, m.from.ResumeMigrated(m.source.ctx, nil))
			m.source.writes()
		})
	}
}

// TestRollback continues a guest at the source although the target has received its state.
func TestRollback(t *testing.T) {
	m := newMigration(t)
	m.paused()
	require.NoError(t, m.from.HandOver(m.source.ctx))
	m.status(m.from, "completed")
	require.NoError(t, m.to.Kill(m.target.ctx))
	require.NoError(t, m.from.CancelMigration(m.source.ctx))
	require.NoError(t, m.from.ResumeMigrated(m.source.ctx, nil))
	m.source.writes()
}

func runImg(args ...string) ([]byte, error) {
	return exec.Command("qemu-img", args...).CombinedOutput()
}

// TestMigrationBeforeConfigure queries the migration of a QEMU that waits for configure, as if the agent had been killed
// before. Without an answer, the QEMU of a target would count as unresponsive, and would not be ended.
func TestMigrationBeforeConfigure(t *testing.T) {
	path := filepath.Join(t.TempDir(), "qmp")
	c := exec.Command(testenv.Program(t, "qemu-system-x86_64"), "-nodefaults", "-display", "none", "-accel", "tcg", "-S",
		preconfig, "-incoming", "defer", "-qmp", "unix:"+path+",server=on,wait=off")
	require.NoError(t, c.Start())
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	socket := qmp.NewSocket(path)
	t.Cleanup(func() { _ = socket.Close() })
	var conn *qmp.Conn
	require.Eventually(t, func() (ok bool) {
		var err error
		conn, err = socket.Conn(t.Context())
		return err == nil
	}, 30*time.Second, 10*time.Millisecond)
	m, err := queryMigration(t.Context(), conn)
	require.NoError(t, err)
	require.Equal(t, Migration{}, m)
}
