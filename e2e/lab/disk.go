package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Disk is a small ext4 file system in a file, mounted over a directory, that a test can fill up and make fail. The
// calling process must run in its own mount namespace and must have called PrivateMounts, so that a mount that is not
// removed ends with the namespace.
type Disk struct {
	// At is the mount point; Image is the path of the file that holds the file system.
	At, Image string
}

// PrivateMounts makes all mounts of this process's mount namespace private, so that later mounts and unmounts do not
// propagate to other namespaces.
func PrivateMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	return nil
}

// NewDisk creates the file image with a file system of mib MiB and mounts it over the directory at. The root of the
// file system gets the owner and mode of that directory.
func NewDisk(at, image string, mib int) (d *Disk, err error) {
	info, err := os.Stat(at)
	if err != nil {
		return nil, err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, fmt.Errorf("%s has no owner", at)
	}
	d = &Disk{At: at, Image: image}
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return nil, err
	}
	if err := os.Truncate(image, int64(mib)<<20); err != nil {
		return nil, err
	}
	if err := tool("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1,nodiscard", image); err != nil {
		return nil, err
	}
	if err := d.mount(); err != nil {
		return nil, err
	}
	if err := errors.Join(os.Chown(at, int(owner.Uid), int(owner.Gid)), os.Chmod(at, info.Mode().Perm())); err != nil {
		return nil, errors.Join(err, d.Remove())
	}
	return d, nil
}

func (d *Disk) mount() error { return tool("mount", "-o", "loop", d.Image, d.At) }

// Free returns the free space of the file system in bytes.
func (d *Disk) Free() (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(d.At, &s); err != nil {
		return 0, fmt.Errorf("look for room on %s: %w", d.At, err)
	}
	return int64(s.Bavail) * s.Bsize, nil
}

// Fill appends zeros to a file, which must be on the disk, until the file system has less than 512 bytes left.
func (d *Disk) Fill(file string) error {
	f, err := os.OpenFile(file, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	for size := 1 << 20; size >= 512; size /= 2 {
		for err = nil; err == nil; {
			_, err = f.Write(make([]byte, size))
		}
		if !errors.Is(err, unix.ENOSPC) {
			return err
		}
	}
	return nil
}

// The ioctl that shuts down an ext4 file system at once (linux/fs/ext4/ext4.h), and the mode of it that completes the
// writes in flight first. In the other modes, an fdatasync that is in flight may return success although its data is
// lost (seen with Linux 6.18).
const (
	ext4Shutdown     = 0x8004587d // the kernel's EXT4_IOC_SHUTDOWN
	ext4GoingDefault = 0          // the kernel's EXT4_GOING_FLAGS_DEFAULT
)

// Fail makes all I/O on the disk fail with EIO until Repair is called.
func (d *Disk) Fail() error {
	f, err := os.Open(d.At)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.IoctlSetPointerInt(int(f.Fd()), ext4Shutdown, ext4GoingDefault); err != nil {
		return fmt.Errorf("fail the disk at %s: %w", d.At, err)
	}
	return nil
}

// Repair unmounts and mounts the disk, so that it works again after Fail. No process may have a file open on it.
func (d *Disk) Repair() error { return errors.Join(d.unmount(), d.mount()) }

// Grow enlarges the file system to mib MiB. No process may have a file open on it.
func (d *Disk) Grow(mib int) error {
	if err := d.unmount(); err != nil {
		return err
	}
	if err := os.Truncate(d.Image, int64(mib)<<20); err != nil {
		return err
	}
	// Exit code 1 of e2fsck means that it has corrected an inconsistency, which is no error here.
	err := tool("e2fsck", "-f", "-p", d.Image)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == 1 {
		err = nil
	}
	if err := errors.Join(err, tool("resize2fs", d.Image)); err != nil {
		return err
	}
	return d.mount()
}

// Remove unmounts the file system and deletes the file Image.
func (d *Disk) Remove() error { return errors.Join(d.unmount(), os.Remove(d.Image)) }

func (d *Disk) unmount() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	// Try repeatedly, because the last threads of a killed program may still be exiting in the kernel.
	return Until(ctx, d.At+" is unmounted", func(context.Context) error {
		if err := unix.Unmount(d.At, 0); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL means that nothing is mounted
			return err
		}
		return nil
	})
}

// tool runs a program from PATH, for at most 20 seconds. Its error contains the program's output.
func tool(name string, args ...string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// Flip inverts the lowest bit of the byte at an offset in a file, to simulate corruption.
func Flip(path string, offset int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	var b [1]byte
	if _, err := f.ReadAt(b[:], offset); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	b[0] ^= 1
	_, err = f.WriteAt(b[:], offset)
	return err
}
