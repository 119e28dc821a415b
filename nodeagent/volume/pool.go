// Package volume keeps the volumes of a host as files in storage pools, which are directories of the host.
//
// An [RBDPool] keeps volumes as RBD images in a pool of a Ceph cluster instead, which all hosts share. An RBDPool
// stores the record of a volume as an object in the cluster, and replaces the object atomically. The rules for
// generations are the same as for a Pool. An RBDPool has no locks. Instead, it does not open an image that a client of
// the cluster has open, nor a new generation before the content of the last generation is recorded as complete.
//
// A [Pool] makes, grows, deletes and lists volumes, and opens them for QEMU, which receives descriptors and no paths. A
// blank volume is normally a sparse raw file. A volume that was made from an image is a QCOW2 overlay whose backing
// file is the image, like the disks of package disk.
//
// The package handles files, sizes, generations and locks. It does not depend on QEMU, the control plane or the life
// cycle of VMs.
//
// # Layout
//
//	<pool>/pool.json             the pool's format and random id
//	<pool>/pool.lock             locked while a program changes the pool
//	<pool>/<volume id>.json      the volume's size, image, state and attachment
//	<pool>/<volume id>.raw       0600: the content of a blank volume, or of one that Flatten has made independent
//	<pool>/<volume id>.qcow2     0600: the content of a volume made from an image, or of a blank or encrypted one
//	<pool>/<volume id>.deleted   an empty file of a shared pool: the volume was deleted
//	<pool>/<volume id>.<snapshot id>.snapshot.json            the state and instant of a snapshot
//	<pool>/<volume id>.<snapshot id>.snapshot.raw or .qcow2   0600: the content of the snapshot
//
// # Decisions
//
//   - The only part of a file's name that comes from a request is the volume's id, a UUID. Files are opened beneath the
//     directory that was open at the start, without following links and without leaving its file system. A file with
//     two hard links is refused.
//   - A raw file is the fastest format, and grows by truncation. An overlay of an image must be QCOW2. Only QEMU, in
//     its sandbox, changes the tables of a volume's QCOW2 file: [Pool.Resize] only records the new size of such a
//     volume, and the caller grows the file with QEMU's block_resize before the guest's CPUs run.
//   - An encrypted volume is a QCOW2 file with LUKS encryption. QEMU writes its header ([Options.Format]), because this
//     package has no cryptography. The record says that the volume is encrypted; the pool never has its key. If an
//     encrypted volume was made from an image, only the overlay is encrypted, because many volumes share the image's
//     file. An encrypted RBD volume is an RBD image with a LUKS header ([Encrypter]). It is never a clone of a base
//     image, because the content of base images is not encrypted.
//   - A snapshot of an encrypted volume is encrypted with the volume's key. If QEMU has the volume open, QEMU copies it
//     to a file with a LUKS header of its own. Otherwise the file is copied byte by byte, without the key.
//   - [Pool.Open] writes the generation of the attachment to the record and syncs the record before it returns a
//     descriptor. Open refuses a lower generation than the recorded one, and the same generation for another VM. Two
//     hosts that share a pool see the same record.
//   - Open locks the volume's file with a lock of its open file description (fcntl(2), F_OFD_SETLK). QEMU's descriptor
//     is a duplicate, so the lock lasts until QEMU has closed the volume or has ended, even if the agent ends before. A
//     second Open fails with [ErrInUse], or with [ErrElsewhere] if another host of a shared pool opened the volume.
//   - Hosts that share a pool change it one at a time: each change locks pool.lock. The file system must have such
//     locks between hosts. If it ends the locks of a host that does not reach it, it must also refuse the later writes
//     of this host through the descriptors that had the locks. OpenPool checks what can be checked on one host. A host
//     that was cut off may be in the middle of a change. It therefore writes to pool.lock before it replaces a record,
//     and writes files of new content only as new inodes. Before it makes such a file the file of a volume, it reads
//     the record again. The next host that locks the pool removes the temporary files of the host that was cut off, so
//     that a delayed rename cannot put an old record in the place of a newer one.
//   - During a migration of a VM, the QEMU processes of two hosts have a volume open. The process of the target, which
//     [Pool.OpenStandby] gives the file, does not write. Each of the two processes has locked another byte of the file;
//     everybody else needs both bytes, so no third process gets the volume at any time. [Pool.Activate] records the
//     generation of the target. Afterwards no host can open the volume with the generation of the source. After a
//     failed migration, [Pool.TakeBack] gives the source a higher generation, when the target has closed the file. In
//     an RBDPool, the record has the addresses of both processes, and TakeBack makes the Ceph cluster refuse the requests
//     of the target's process.
//   - [Pool.Release] records that the content of a generation is complete and durable. Release first takes the same
//     lock, which is possible only after QEMU has closed the file, and then syncs the file. [Pool.Detach] does the
//     same, and also ends the generation: the volume cannot be opened at this generation again.
//   - The record is written before the file of a new volume, and removed after the file of a deleted one. The state in
//     the record shows whether a creation or a deletion was interrupted. If the record says that the volume is complete
//     and the file is missing, the methods return an error and make no new file.
//   - [Pool.Flatten] copies an overlay and its image to a raw file. Flatten then writes a record that names the raw
//     file, and removes the overlay last, so the volume is complete after a crash. While a guest uses the volume, the
//     guest's QEMU copies the image into the overlay instead, and [Pool.RecordFlattened] records the result. Flatten
//     and RecordFlattened are the only code of the agent that reads the tables of an overlay. Package qcow2 checks each
//     entry of the tables, because a guest that has taken over its QEMU may have written them.
//   - A snapshot is a file that does not depend on the volume's file. If no process has the volume open,
//     [SnapshotCopy.Copy] makes a reflink copy, or a sparse copy where the file system has no reflinks, and locks the
//     volume while it copies. If QEMU has the volume open, QEMU writes the snapshot's file. This file always has the
//     format QCOW2, because QEMU 7.2 would allocate the holes of a raw file.
//   - [RBDPool.Delete] adds the volume to a list of deleted volumes in the cluster before it removes anything. A host
//     that lost its connection may still have an old desired state that contains the volume. It reads the list after it
//     has made the record of the volume, and then removes the record again. Without the list, the RBD image that such a
//     host makes would never be removed. If the image is a clone, it would keep the snapshot from which it was made. A
//     shared pool has a file for each deleted volume instead of a list.
//   - The record of a snapshot is written before its file. If a record has the state Copying and there is no
//     [SnapshotCopy], the copy was interrupted. The caller must then call [Pool.FailSnapshot], and must not repeat the
//     copy, because the content of the volume has changed since.
//   - Before QEMU begins a copy, the pool reserves space for the copy (fallocate(2)). QEMU must copy each part of the
//     volume before the guest overwrites the part, so in a full pool the guest's writes would fail.
//   - A volume that is made from a snapshot gets a copy of the snapshot's file, and does not depend on the snapshot.
//   - The snapshots of an RBD volume are in the volume's record, which is replaced atomically. A host that was cut off
//     during a snapshot therefore cannot record the snapshot as complete after another host has recorded it as failed.
//     Each attempt uses a new name for the RBD snapshot. A volume that is made from a snapshot is a clone of the RBD
//     snapshot, until [RBDPool.Flatten] has copied the content. Until then, [RBDPool.DeleteSnapshot] fails with
//     ErrInUse.
//   - Files that belong to no record are reported by [Pool.List] and never removed or changed.
//   - The host stores the id of each pool. OpenPool fails if the directory contains another id or none, because the
//     file system of the pool may not be mounted.
package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

var (
	// ErrRefused is wrapped by errors that a retry cannot fix.
	ErrRefused = errors.New("not possible")

	// ErrNotFound means that the pool has no such volume.
	ErrNotFound = errors.New("the pool has no such volume")

	// ErrStale means that the pool has recorded a higher generation of the volume's attachment, or the same generation
	// for another VM.
	ErrStale = errors.New("the volume has been attached elsewhere since")

	// ErrInUse means that a process has the volume's file open.
	ErrInUse = errors.New("a process has the volume open")

	// ErrActivated means that the target of a migration has activated the volume, and may have written to it. The memory
	// that the guest had at the source then does not match the content of the volume any more.
	ErrActivated = errors.New("the target of the migration may have written to the volume")

	// ErrNoKey means that the volume is encrypted and the caller did not pass its key.
	ErrNoKey = errors.New("the volume is encrypted, and the control plane has not sent its key yet")
)

// Names of the files in a pool that belong to no volume.
const (
	markerName = "pool.json"
	lockName   = "pool.lock"
)

// Options are the settings of a Pool. All but Host, Shared and Format are required.
type Options struct {
	Name string
	// Host is the name of this host. It is written to the records of a shared pool, so that errors on other hosts can
	// name it. Host is required if Shared is true.
	Host string
	// Path is the pool's directory. It must exist, belong to the agent's user, and be writable by no other user.
	Path string
	// Shared means that other hosts use the directory too.
	Shared bool
	// State is the path of the file in which the host stores the pool's id.
	State string
	// Images is the cache of the images that volumes are based on.
	Images *disk.Images
	// Format returns a new file with the content of an empty encrypted volume: an empty QCOW2 image of size bytes with
	// LUKS encryption, for which key is the passphrase. The parameter id is the id of the volume. The caller closes the
	// file. If Format is nil, the pool cannot make encrypted volumes.
	Format func(ctx context.Context, id string, size uint64, key []byte) (*os.File, error)
}

// Pool is a storage pool. Its methods are safe for concurrent use.
type Pool struct {
	o    Options
	dir  *os.File
	lock *os.File
	busy chan struct{} // capacity 1; full while a method changes the pool
	// formatting has capacity 1, and is full while Options.Format runs. It limits the processor time that Format takes,
	// and prevents that two calls of Create format the same volume.
	formatting chan struct{}
	id         string // from pool.json
}

// marker is the content of pool.json, and of the file Options.State.
type marker struct {
	Version int    `json:"version"`
	ID      string `json:"id"`
}

const markerVersion = 1

// OpenPool opens a storage pool and checks its directory. If the directory is empty and the host has not used the pool
// before, OpenPool makes it a pool.
func OpenPool(ctx context.Context, o Options) (*Pool, error) {
	p := &Pool{o: o, busy: make(chan struct{}, 1), formatting: make(chan struct{}, 1)}
	if err := p.open(ctx); err != nil {
		p.Close()
		return nil, fmt.Errorf("storage pool %s: %w", o.Name, err)
	}
	return p, nil
}

func (p *Pool) open(ctx context.Context) error {
	fd, err := unix.Open(p.o.Path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return &fs.PathError{Op: "open", Path: p.o.Path, Err: err}
	}
	p.dir = os.NewFile(uintptr(fd), p.o.Path)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return &fs.PathError{Op: "stat", Path: p.o.Path, Err: err}
	}
	switch {
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("the directory %s belongs to uid %d, not to %d", p.o.Path, st.Uid, os.Geteuid())
	case st.Mode&0o022 != 0:
		return fmt.Errorf("other users can write to the directory %s (mode %04o)", p.o.Path, st.Mode&0o7777)
	}
	if p.lock, err = p.openFile(lockName, unix.O_RDWR|unix.O_CREAT); err != nil {
		return err
	}
	return p.change(ctx, func() error {
		// Temporary files are written only while the pool is locked, so no other host is writing one now.
		if err := atomicfile.RemoveLeftovers(p.path("")); err != nil {
			return err
		}
		if err := p.checkID(); err != nil || !p.o.Shared {
			return err
		}
		return p.checkShared()
	})
}

// checkID compares the id in the pool's directory with the id that the host has stored. If the host has stored no id,
// checkID stores the id of the directory. If the directory is empty, checkID first writes a new id to it.
func (p *Pool) checkID() error {
	stored, err := readMarker(p.o.State)
	known := err == nil
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	found, err := readMarker(p.path(markerName))
	p.id = found.ID
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	case err == nil && known && found.ID != stored.ID:
		return fmt.Errorf("the directory %s is another pool (%s) than this host used before (%s)", p.o.Path, found.ID, stored.ID)
	case err == nil && known:
		return nil
	case err == nil:
		return writeMarker(p.o.State, found)
	case known:
		return fmt.Errorf("the directory %s is not the pool that this host used before: is its file system mounted?", p.o.Path)
	}
	entries, err := os.ReadDir(p.path(""))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() != lockName && e.Name() != "lost+found" {
			return fmt.Errorf("the directory %s is not a pool, and not empty: it contains %s", p.o.Path, e.Name())
		}
	}
	made := marker{Version: markerVersion, ID: uuid.NewString()}
	if err := writeMarker(p.path(markerName), made); err != nil {
		return err
	}
	p.id = made.ID
	return writeMarker(p.o.State, made)
}

func readMarker(path string) (marker, error) {
	var m marker
	text, err := os.ReadFile(path)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("read %s: %w", path, err)
	}
	if m.Version != markerVersion {
		return m, fmt.Errorf("read %s: version %d is unknown to this agent", path, m.Version)
	}
	return m, nil
}

func writeMarker(path string, m marker) error {
	text, err := json.Marshal(m)
	if err != nil {
		return err
	}
	return atomicfile.WriteFile(path, append(text, '\n'), 0o600)
}

// Close closes the pool. Volumes that QEMU has open stay open.
func (p *Pool) Close() {
	for _, f := range []*os.File{p.lock, p.dir} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Name returns the name of the pool.
func (p *Pool) Name() string { return p.o.Name }

// ID returns the id of the pool, a UUID. Hosts that share a directory read the same id.
func (p *Pool) ID() string { return p.id }

// Path returns the pool's directory.
func (p *Pool) Path() string { return p.o.Path }

// Shared reports whether other hosts use the pool too.
func (p *Pool) Shared() bool { return p.o.Shared }

// Space is the size of a pool's file system in bytes.
type Space struct{ Total, Free uint64 }

// Space returns the size of the pool's file system.
func (p *Pool) Space() (Space, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(p.dir.Fd()), &st); err != nil {
		return Space{}, fmt.Errorf("read size of storage pool %s: %w", p.o.Name, err)
	}
	return Space{Total: st.Blocks * uint64(st.Bsize), Free: st.Bavail * uint64(st.Bsize)}, nil
}

// lockPause is the time between two attempts to lock a file that another program has locked.
const lockPause = 20 * time.Millisecond

// change calls f while no other method, agent or host changes the pool. It waits for its turn until ctx ends.
func (p *Pool) change(ctx context.Context, f func() error) error {
	select {
	case p.busy <- struct{}{}:
		defer func() { <-p.busy }()
	case <-ctx.Done():
		return ctx.Err()
	}
	for {
		err := setLock(p.lock, unix.F_WRLCK)
		if err == nil {
			break
		}
		if !errors.Is(err, ErrInUse) {
			return fmt.Errorf("lock %s: %w", lockName, err)
		}
		if err := sleep(ctx, lockPause); err != nil {
			return fmt.Errorf("lock %s: %w", lockName, err)
		}
	}
	err := p.removeLate()
	if err == nil {
		err = f()
	}
	return errors.Join(err, setLock(p.lock, unix.F_UNLCK))
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// path returns a path of a file in the open directory of the pool (in /proc/self/fd). The path stays valid if the
// directory is moved or hidden by a mount.
func (p *Pool) path(name string) string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", p.dir.Fd(), name)
}

var validID = regexp.MustCompile(`^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)

func checkID(id string) error {
	if !validID.MatchString(id) {
		return fmt.Errorf("%w: the id is not a UUID", ErrRefused)
	}
	return nil
}
