package qemu

import (
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// TestReceivesChannels checks which versions of QEMU receive memory over several connections.
func TestReceivesChannels(t *testing.T) {
	for version, want := range map[string]bool{"7.1.0": false, "7.2.0": true, "7.2.22": true, "8.0.4": true, "8.1.3": true, "8.2.2": false,
		"9.0.0": false, "10.0.2": false, "": false, "7": false, "x.y": false} {
		require.Equal(t, want, ReceivesChannels(version), version)
	}
}

// relayChannels connects each connection of the source's QEMU to the target's QEMU, in their order. It returns a
// function that returns the number of connections, and one that closes the first connection.
func (m *migration) relayChannels() (count func() int, closeMain func()) {
	t := m.source.T
	dir, err := os.Open(m.source.home.Sockets())
	require.NoError(t, err)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: socketPath(dir, "memory.sock")})
	require.NoError(t, err)
	require.NoError(t, dir.Close())
	l.SetUnlinkOnClose(false)
	uid := m.source.home.UID()
	require.NoError(t, os.Lchown(filepath.Join(m.source.home.Sockets(), "memory.sock"), uid, uid))
	var mu sync.Mutex
	var all []net.Conn
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := m.dialMemory()
			if err != nil {
				_ = near.Close()
				continue
			}
			mu.Lock()
			all = append(all, near)
			mu.Unlock()
			for _, way := range [][2]net.Conn{{near, far}, {far, near}} {
				tasks.Go(func() {
					_, _ = io.Copy(way[0], way[1])
					_ = way[0].(*net.UnixConn).CloseWrite()
				})
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		for _, conn := range all {
			_ = conn.Close()
		}
		_ = m.to.Kill(m.target.ctx)
		tasks.Wait()
	})
	count = func() int { mu.Lock(); defer mu.Unlock(); return len(all) }
	return count, func() { mu.Lock(); defer mu.Unlock(); _ = all[0].(*net.UnixConn).CloseRead(); _ = all[0].Close() }
}

// dialMemory connects to the target's QEMU.
func (m *migration) dialMemory() (net.Conn, error) {
	dir, err := os.Open(m.sockets)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return net.Dial("unix", socketPath(dir, "memory.sock"))
}

// TestMigrateOverChannels moves a guest whose memory is sent over several connections: while the guest is stopped, and
// while it runs.
func TestMigrateOverChannels(t *testing.T) {
	for _, running := range []bool{false, true} {
		m := newMigrationOver(t, MemoryChannels)
		require.True(t, m.from.SendsChannels())
		connections, _ := m.relayChannels()
		m.mirrored()
		require.NoError(t, m.from.CheckEnded(m.source.ctx))
		to := Route{Channels: MemoryChannels, Socket: "memory.sock"}
		if running {
			require.NoError(t, m.from.SendRunning(m.source.ctx, 0, to))
			m.status(m.from, "active")
			m.running()
			require.NoError(t, m.from.StopGuest(m.source.ctx))
		} else {
			require.NoError(t, m.from.SendState(m.source.ctx, 0, to))
		}
		m.status(m.from, "pre-switchover")
		require.Equal(t, MemoryChannels+1, connections())
		s, err := m.from.Migration(m.source.ctx)
		require.NoError(t, err)
		require.Positive(t, s.Memory.SentByChannels)
		require.Less(t, s.Memory.SentByChannels, s.Memory.Sent)
		require.NoError(t, m.from.EndMirrors(m.source.ctx))
		require.NoError(t, m.from.HandOver(m.source.ctx))
		m.status(m.from, "completed")
		m.status(m.to, "completed")
		require.NoError(t, m.to.EndIncoming(m.target.ctx))
		require.NoError(t, m.to.ResumeMigrated(m.target.ctx, nil))
		m.target.writes()
		require.NoError(t, m.from.CheckEnded(m.source.ctx))
		require.NoError(t, m.to.CheckEnded(m.target.ctx))
	}
}

// TestMainChannelCloses closes the main connection before the switchover. The guest continues at the source, and can be
// migrated again: over one connection, from the same process.
func TestMainChannelCloses(t *testing.T) {
	m := newMigrationOver(t, MemoryChannels)
	_, closeMain := m.relayChannels()
	m.mirrored()
	require.NoError(t, m.from.SendState(m.source.ctx, 0, Route{Channels: MemoryChannels, Socket: "memory.sock"}))
	m.status(m.from, "pre-switchover")
	closeMain()
	require.NoError(t, m.from.StopSending(m.source.ctx))
	require.NoError(t, m.from.CancelMigration(m.source.ctx))
	require.NoError(t, m.from.ResumeMigrated(m.source.ctx, nil))
	m.source.writes()
	require.NoError(t, m.from.CheckEnded(m.source.ctx))

	again := migrationTo(m.source, newLab(t), m.from, m.given)
	again.paused()
	s, err := m.from.Migration(m.source.ctx)
	require.NoError(t, err)
	require.Zero(t, s.Memory.SentByChannels)
	require.NoError(t, again.from.HandOver(again.source.ctx))
	again.status(again.to, "completed")
}

// TestSocketsAreReadOnly checks that QEMU finds sockets in Home.Sockets, and that it can create none.
func TestSocketsAreReadOnly(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	p := l.launch(s, files)
	info, err := os.Stat(l.home.Sockets())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o711), info.Mode().Perm())
	require.NoError(t, os.WriteFile(filepath.Join(l.home.Sockets(), "file"), nil, 0o600))
	seen, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", p.record.PID) + socketsDir)
	require.NoError(t, err)
	require.Len(t, seen, 1)
	require.ErrorIs(t, os.WriteFile(fmt.Sprintf("/proc/%d/root", p.record.PID)+socketsDir+"/other", nil, 0o600), unix.EROFS)
}
