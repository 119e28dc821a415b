package qemu

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func itoa(n int) string { return strconv.Itoa(n) }

func uuid(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012x", n) }

func openHomes(t *testing.T, first, last int) *Homes {
	t.Helper()
	h, err := OpenHomes(filepath.Join(t.TempDir(), "vms"), first, last)
	require.NoError(t, err)
	return h
}

// TestUIDOfAProcessIsNotReused removes the directory of a VM while a process still runs under the VM's uid. No other VM
// gets the uid until the process has ended.
func TestUIDOfAProcessIsNotReused(t *testing.T) {
	if os.Getuid() != 0 {
		skip(t, "needs root")
	}
	const only = 715_517
	h := openHomes(t, only, only)
	home, err := h.Claim(uuid(1))
	require.NoError(t, err)
	process := exec.Command("sleep", "600")
	process.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: only, Gid: only}, Pdeathsig: syscall.SIGKILL}
	require.NoError(t, process.Start())
	end := sync.OnceFunc(func() { _ = process.Process.Kill(); _ = process.Wait() })
	t.Cleanup(end)
	require.NoError(t, home.Remove())
	_, err = h.Claim(uuid(2))
	require.Error(t, err, "a process still runs under this uid")
	require.ErrorContains(t, err, "all uids from 715517 to 715517 are taken")
	end()
	next, err := h.Claim(uuid(2))
	require.NoError(t, err)
	require.Equal(t, only, next.UID())
}

func TestHomes(t *testing.T) {
	h := openHomes(t, 700_000, 700_009)
	uids := map[int]bool{}
	for i := range 10 {
		home, err := h.Claim(uuid(i))
		require.NoError(t, err)
		require.GreaterOrEqual(t, home.UID(), 700_000)
		require.LessOrEqual(t, home.UID(), 700_009)
		require.False(t, uids[home.UID()], "two homes have the same uid")
		uids[home.UID()] = true

		again, err := h.Claim(uuid(i))
		require.NoError(t, err)
		require.Equal(t, home, again)
		opened, err := h.Open(uuid(i))
		require.NoError(t, err)
		require.Equal(t, home, opened)
	}
	_, err := h.Claim(uuid(10))
	require.ErrorContains(t, err, "all uids from 700000 to 700009 are taken")
	ids, err := h.List()
	require.NoError(t, err)
	require.Len(t, ids, 10, "a failed call must leave no record")

	home, err := h.Open(uuid(3))
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(home.Disks(), "deep"), 0o700))
	require.NoError(t, home.Remove())
	require.NoError(t, home.Remove())
	_, err = h.Open(uuid(3))
	require.ErrorIs(t, err, fs.ErrNotExist)
	next, err := h.Claim(uuid(10))
	require.NoError(t, err)
	require.Equal(t, home.UID(), next.UID(), "the new home must get the only free uid")
}

func TestHomesRefuse(t *testing.T) {
	for _, r := range [][2]int{{0, 10}, {500, 2000}, {3000, 2000}, {1 << 31, 1 << 32}} {
		_, err := OpenHomes(t.TempDir(), r[0], r[1])
		require.Error(t, err)
	}
	h := openHomes(t, 700_000, 700_009)
	for _, id := range []string{"", "..", "../x", "web", "00000000-0000-4000-8000-00000000000A", uuid(1) + "/.."} {
		_, err := h.Claim(id)
		require.ErrorIs(t, err, ErrInvalid)
	}
	// This directory is what an agent leaves that ended before it wrote the uid.
	require.NoError(t, os.Mkdir(filepath.Join(h.dir, uuid(1)), 0o700))
	_, err := h.Open(uuid(1))
	require.ErrorIs(t, err, fs.ErrNotExist)
	home, err := h.Claim(uuid(1))
	require.NoError(t, err)
	_, err = home.Record()
	require.ErrorIs(t, err, ErrNotStarted)
	_, known, err := home.Exit()
	require.NoError(t, err)
	require.False(t, known)

	// A damaged record is an error, not a missing record.
	require.NoError(t, os.WriteFile(home.path("record.json"), []byte(`{"pid":`), 0o600))
	_, err = home.Record()
	require.Error(t, err)
	require.NotErrorIs(t, err, ErrNotStarted)
	require.NoError(t, os.WriteFile(home.path("uid"), []byte("0\n"), 0o600))
	_, err = h.Claim(uuid(1))
	require.ErrorContains(t, err, "does not contain a valid uid")
	_, err = h.Claim(uuid(2))
	require.Error(t, err, "no uid may be assigned while a damaged home may use it")
}

func TestUIDOfRunningProcessIsNotReused(t *testing.T) {
	if os.Getuid() != 0 {
		skip(t, "needs root")
	}
	const uid = 700_123
	cmd := exec.CommandContext(t.Context(), "/bin/sleep", "60")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	require.NoError(t, cmd.Start())
	h := openHomes(t, uid, uid)
	_, err := h.Claim(uuid(1))
	require.ErrorContains(t, err, "are taken")
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	_, err = h.Claim(uuid(1))
	require.NoError(t, err)
}

// TestBeginRemovesTemporaryFiles checks that begin removes the temporary file of an interrupted write, and that such a
// file is not read.
func TestBeginRemovesTemporaryFiles(t *testing.T) {
	home, err := openHomes(t, 700_000, 700_009).Claim(uuid(1))
	require.NoError(t, err)
	left := home.path(".exit.json1234567890123456789")
	require.NoError(t, os.WriteFile(left, []byte(`{"co`), 0o600))
	_, ended, err := home.Exit()
	require.NoError(t, err)
	require.False(t, ended)
	require.NoError(t, home.begin(Record{}))
	require.NoFileExists(t, left)
}
