package volume

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ErrElsewhere means that another host of a shared pool has the volume open, or had it open and its locks have not
// expired yet. ErrElsewhere wraps [ErrInUse].
var ErrElsewhere error = elsewhereError{}

type elsewhereError struct{}

func (elsewhereError) Error() string { return "another host has the volume open" }

func (elsewhereError) Unwrap() error { return ErrInUse }

// elsewhere returns err, except in this case: err wraps ErrInUse, and, according to the record r, another host was the
// last to open the volume and has not closed it. The result then names this host and the VM, and wraps ErrElsewhere.
func (p *Pool) elsewhere(err error, r record) error {
	if !errors.Is(err, ErrInUse) || r.Host == "" || r.Host == p.o.Host || r.Flushed >= r.Attachment.Generation {
		return err
	}
	return fmt.Errorf("%w: host %s opened it for VM %s", ErrElsewhere, r.Host, r.Attachment.VM)
}

// checkShared returns an error if the file system of a shared pool lacks what the pool needs. It cannot check whether
// locks apply between hosts, except by the mount options of known file systems.
func (p *Pool) checkShared() error {
	fsType, options, err := mountOf(int(p.dir.Fd()))
	if err != nil {
		return fmt.Errorf("read the mount of %s: %w", p.o.Path, err)
	}
	if err := checkMount(fsType, options); err != nil {
		return fmt.Errorf("the file system of %s cannot be shared: %w", p.o.Path, err)
	}
	if err := p.testLocks(); err != nil {
		return fmt.Errorf("the file system of %s cannot be shared: %w", p.o.Path, err)
	}
	return nil
}

// mountOf returns the type and the options of the mount that contains an open file (proc(5), /proc/pid/mountinfo).
func mountOf(fd int) (fsType string, options []string, err error) {
	info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", fd))
	if err != nil {
		return "", nil, err
	}
	id := ""
	for line := range strings.Lines(string(info)) {
		if text, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			id = strings.TrimSpace(text)
		}
	}
	mounts, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", nil, err
	}
	defer mounts.Close()
	for lines := bufio.NewScanner(mounts); lines.Scan(); {
		own, file, ok := strings.Cut(lines.Text(), " - ")
		fields, rest := strings.Fields(own), strings.Fields(file)
		if ok && len(fields) > 5 && len(rest) > 2 && fields[0] == id {
			return rest[0], append(strings.Split(fields[5], ","), strings.Split(rest[2], ",")...), nil
		}
	}
	return "", nil, fmt.Errorf("no mount has the id %q", id)
}

// checkMount returns an error if a file system of this type with these mount options is known to have no locks between
// hosts, or not to end the writes of a host whose locks have expired.
func checkMount(fsType string, options []string) error {
	for _, o := range []string{"nolock", "local_lock=all", "local_lock=posix", "localflocks", "lockproto=lock_nolock", "nobrl"} {
		if slices.Contains(options, o) {
			return fmt.Errorf("its mount option %s makes locks local to each host", o)
		}
	}
	if fsType == "nfs" {
		// NFS 4 has the type nfs4. The server of an earlier version does not know when a client has lost its locks.
		return errors.New("NFS before version 4 does not end the locks of a host that is lost: mount it with vers=4.1 or later")
	}
	return nil
}

// testLocks checks with a temporary file that two open file descriptions cannot lock the same byte, that the lock of a
// closed one ends, and that a file can be replaced by a rename.
func (p *Pool) testLocks() (err error) {
	// RemoveLeftovers removes a file of this name if the program is killed.
	name := fmt.Sprintf(".test%019d", time.Now().UnixNano())
	defer func() {
		if removeErr := p.removeFile(name); err == nil {
			err = removeErr
		}
	}()
	for _, content := range []string{"first", "second"} {
		if err := atomicfile.WriteFile(p.path(name), []byte(content), 0o600); err != nil {
			return fmt.Errorf("replace a file: %w", err)
		}
		have, err := os.ReadFile(p.path(name))
		if err != nil {
			return fmt.Errorf("read a file that was replaced by a rename: %w", err)
		}
		if string(have) != content {
			return errors.New("a file that was replaced by a rename has its earlier content")
		}
	}
	first, err := p.openFile(name, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer first.Close()
	second, err := p.openFile(name, unix.O_RDWR)
	if err != nil {
		return err
	}
	defer second.Close()
	if err := setLock(first, unix.F_WRLCK); err != nil {
		return fmt.Errorf("it has no locks of open file descriptions: %w", err)
	}
	if err := setLock(second, unix.F_WRLCK); err == nil {
		return errors.New("two open file descriptions can lock the same byte")
	} else if !errors.Is(err, ErrInUse) {
		return fmt.Errorf("lock a byte that another open file description has locked: %w", err)
	}
	if err := first.Close(); err != nil {
		return err
	}
	if err := setLock(second, unix.F_WRLCK); err != nil {
		return fmt.Errorf("the lock of a closed file does not end: %w", err)
	}
	return nil
}

// confirmLock returns an error if the file system has ended the lock of pool.lock, because this host did not reach the
// file system for some time. Another host may have changed the pool since. The file system reports the end of the lock
// as an error of a write (NFS 4, CephFS). The content of pool.lock is the name of the host that has written last.
func (p *Pool) confirmLock() error {
	if !p.o.Shared || mutant.On(mutant.WriteWithoutLock) {
		return nil
	}
	_, err := p.lock.WriteAt(p.lockText(), 0)
	if err == nil {
		err = p.lock.Sync()
	}
	if err != nil {
		return fmt.Errorf("the lock of the pool was lost: %w", err)
	}
	return nil
}

// lockText returns the content that this host writes to pool.lock before it replaces a record: the name of the host.
func (p *Pool) lockText() []byte { return fmt.Appendf(nil, "%-64.63s\n", p.o.Host) }

// removeLate removes the temporary files of another host, if another host was the last to replace a record of a shared
// pool. The file system may have ended the lock of that host between its last write to pool.lock and the rename of the
// temporary file to a record. A hard mount of NFS repeats the rename until the server answers, possibly after this host
// has replaced the same record. Without the temporary file, the late rename fails. The caller must have locked the
// pool.
func (p *Pool) removeLate() error {
	if !p.o.Shared || mutant.On(mutant.KeepLateRecord) {
		return nil
	}
	own := p.lockText()
	have := make([]byte, len(own))
	n, err := p.lock.ReadAt(have, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read %s: %w", lockName, err)
	}
	if bytes.Equal(have[:n], own) {
		return nil
	}
	return atomicfile.RemoveLeftovers(p.path(""))
}
