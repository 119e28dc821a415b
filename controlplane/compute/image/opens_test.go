package image

import (
	"encoding/binary"
	"errors"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// watchOpens records by fanotify(7) which files this process opens on the mounts of the root directory and of temporary
// directories. The returned function ends the recording and returns the paths. The test is skipped if the process may
// not use fanotify.
func watchOpens(t *testing.T) func() map[string]bool {
	t.Helper()
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK|unix.FAN_UNLIMITED_QUEUE, unix.O_RDONLY|unix.O_LARGEFILE|unix.O_CLOEXEC)
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip("fanotify: ", err)
	}
	for _, dir := range []string{"/", t.TempDir()} {
		require.NoError(t, unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_MOUNT, unix.FAN_OPEN, unix.AT_FDCWD, dir))
	}
	paths, end, done := map[string]bool{}, make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		buffer := make([]byte, 64<<10)
		for {
			n, err := unix.Read(fd, buffer)
			if n > 0 {
				readOpens(buffer[:n], paths)
				continue
			}
			select {
			case <-end:
				return
			default:
			}
			if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	stop := sync.OnceFunc(func() { close(end); <-done; _ = unix.Close(fd) })
	t.Cleanup(stop)
	return func() map[string]bool {
		stop()
		return paths
	}
}

// readOpens adds the paths of the events of this process to paths. An event is a struct fanotify_event_metadata, whose
// length is at offset 0, the descriptor of the file at offset 16, and the process at offset 20.
func readOpens(events []byte, paths map[string]bool) {
	for len(events) >= 24 {
		length := binary.NativeEndian.Uint32(events)
		fd, pid := int32(binary.NativeEndian.Uint32(events[16:])), binary.NativeEndian.Uint32(events[20:])
		if fd >= 0 {
			if path, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(fd))); err == nil && int(pid) == os.Getpid() {
				paths[path] = true
			}
			_ = unix.Close(int(fd))
		}
		events = events[length:]
	}
}

// TestWatchOpens checks that watchOpens sees the files that this process opens.
func TestWatchOpens(t *testing.T) {
	path := t.TempDir() + "/file"
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	opened := watchOpens(t)
	f, err := os.Open(path)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	require.Contains(t, opened(), path)
}
