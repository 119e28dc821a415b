// Package disk makes the disks of a host's VMs, and caches the images on which they are based.
//
// [Images] is the host's cache: one file per image, named by its SHA-256, fetched once and never modified. Each disk of
// a VM is a QCOW2 file, empty at first: an overlay over an image, or a blank disk. [Build] makes the disks. [Open]
// opens a disk and its image for QEMU, which receives descriptors and no paths.
//
// The package handles files, checksums and sizes. It does not depend on QEMU, the control plane or the VM life cycle: a
// function supplies the content of images, and the caller assigns directories to VMs.
//
// # Layout
//
//	<images>/<sha256>            0444: complete and verified; modified at its last use
//	<images>/<sha256>.part       0600: a partial fetch
//	<disks>/<disk id>.qcow2      0600, owned by the VM's uid
//	<disks>/<disk id>.json       the disk's original size and its image
//
// # Decisions
//
//   - An overlay names no backing file, because QEMU would open any file that the overlay names. The image is recorded
//     in the .json file, which is written before the overlay, so that no overlay exists without its .json file. The
//     host can therefore list the images that it needs ([List]) without the control plane.
//   - An image's checksum is verified after the fetch, before the file gets its final name. Later uses check only that
//     it is a regular read-only file of the right size: hashing would take half a second per gigabyte on each start of
//     a VM. A complete file is synced before it is renamed, so a crash leaves a complete file or a .part.
//   - A QCOW2 image is validated again before QEMU opens it, although the control plane validated it: the host does not
//     rely on that check.
//   - The cache has a limit in bytes ([Images.SetLimit]). Above the limit, [Images.Trim] and each fetch remove unused
//     images, least recently used first. The caller lists the used images ([Limit]). An image that Ensure uses after
//     Trim began is kept, because the caller's list may not contain the image yet.
//   - Building an existing disk does nothing. If the existing disk is larger or has another image, Build returns an
//     error and leaves it as it is: this package never overwrites or shrinks a disk.
//   - Only QEMU grows a disk, because a QCOW2 file needs larger tables too. [Size] tells the caller which disks QEMU must
//     grow.
package disk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// ErrRefused is wrapped by errors that a retry cannot fix: the requested disk cannot be made.
var ErrRefused = errors.New("disk cannot be made")

var validID = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// Disk describes one disk of a VM. It is the argument of Build, and the content of the disk's .json file.
type Disk struct {
	ID    string `json:"id"`    // 1 to 32 characters, see validID; unique in the VM
	Size  uint64 `json:"size"`  // bytes that the guest sees
	Image *Image `json:"image"` // backing image; nil for a blank disk
}

// Build creates those of the given disks that dir does not contain yet. Their files belong to uid, under which the VM's
// QEMU runs. It fetches their images if the cache does not have them. After an error that wraps [ErrRefused], another
// attempt fails the same way.
func Build(ctx context.Context, images *Images, dir string, uid int, disks []Disk) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make disks: %w", err)
	}
	if err := atomicfile.SyncDir(filepath.Dir(dir)); err != nil {
		return fmt.Errorf("make disks: %w", err)
	}
	if err := atomicfile.RemoveLeftovers(dir); err != nil {
		return fmt.Errorf("make disks: %w", err)
	}
	for _, d := range disks {
		if err := build(ctx, images, dir, uid, d); err != nil {
			return fmt.Errorf("make disk %q: %w", d.ID, err)
		}
	}
	return nil
}

func build(ctx context.Context, images *Images, dir string, uid int, d Disk) error {
	if err := d.validate(); err != nil {
		return err
	}
	if err := matches(dir, d); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := os.Lstat(path(dir, d.ID)); err == nil {
		return fmt.Errorf("%w: it exists without a description", ErrRefused)
	}
	if d.Image != nil {
		if err := images.Ensure(ctx, *d.Image); err != nil {
			return err
		}
		size, err := images.VirtualSize(ctx, *d.Image)
		if err != nil {
			return err
		}
		if size > d.Size {
			return fmt.Errorf("%w: its image has %d bytes, which do not fit in %d", ErrRefused, size, d.Size)
		}
	}
	note, err := json.Marshal(d)
	if err != nil {
		return err
	}
	if err := atomicfile.WriteFile(notePath(dir, d.ID), note, 0o600); err != nil {
		return err
	}
	return atomicfile.Write(path(dir, d.ID), 0o600, func(f *os.File) error {
		if _, err := qcow2.Create(f, d.Size); err != nil {
			return err
		}
		return f.Chown(uid, uid)
	})
}

func (d Disk) validate() error {
	switch {
	case !validID.MatchString(d.ID):
		return fmt.Errorf("%w: its id is not one", ErrRefused)
	case d.Size == 0 || d.Size%512 != 0 || d.Size > qcow2.MaxVirtualSize:
		return fmt.Errorf("%w: a size of %d bytes is not possible", ErrRefused, d.Size)
	case d.Image != nil:
		return d.Image.validate()
	}
	return nil
}

// matches returns nil if dir contains the disk with the requested image and at most the requested size. The error wraps
// fs.ErrNotExist if dir does not contain the disk, and ErrRefused if the disk in dir is larger or has another image.
func matches(dir string, want Disk) error {
	have, err := read(dir, want.ID)
	if err != nil {
		return err
	}
	size, err := virtualSize(dir, want.ID)
	switch {
	case err != nil:
		return err
	case size > want.Size:
		return fmt.Errorf("%w: the disk has %d bytes already, more than %d", ErrRefused, size, want.Size)
	case (have.Image == nil) != (want.Image == nil) || have.Image != nil && *have.Image != *want.Image:
		return fmt.Errorf("%w: the disk exists with another image", ErrRefused)
	}
	return nil
}

// Size returns the size in bytes that the guest sees of a disk that Build created. QEMU can write any size into the
// disk's file. Compare the result only with the desired size.
func Size(dir, id string) (uint64, error) {
	if !validID.MatchString(id) {
		return 0, fmt.Errorf("size of disk %q: invalid disk id", id)
	}
	size, err := virtualSize(dir, id)
	if err != nil {
		return 0, fmt.Errorf("size of disk %q: %w", id, err)
	}
	return size, nil
}

// virtualSize returns the size in the header of a disk's file. The error wraps ErrRefused if the file is no QCOW2.
func virtualSize(dir, id string) (uint64, error) {
	f, err := os.OpenFile(path(dir, id), os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	first := make([]byte, 32)
	n, err := f.ReadAt(first, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return 0, err
	}
	size, ok := qcow2.VirtualSize(first[:n])
	if !ok {
		return 0, fmt.Errorf("%w: the disk's file is not a QCOW2 file", ErrRefused)
	}
	return size, nil
}

// List returns the disks in dir, sorted by id; none if dir does not exist.
func List(dir string) ([]Disk, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list disks: %w", err)
	}
	var disks []Disk
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !validID.MatchString(id) {
			continue
		}
		d, err := read(dir, id)
		if err != nil {
			return nil, fmt.Errorf("list disks: %w", err)
		}
		disks = append(disks, d)
	}
	slices.SortFunc(disks, func(a, b Disk) int { return strings.Compare(a.ID, b.ID) })
	return disks, nil
}

func read(dir, id string) (Disk, error) {
	text, err := os.ReadFile(notePath(dir, id))
	if err != nil {
		return Disk{}, err
	}
	var d Disk
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&d); err != nil {
		return Disk{}, fmt.Errorf("read %s: %w", notePath(dir, id), err)
	}
	return d, nil
}

// Chain holds the open files of a disk. Base is nil for a blank disk.
type Chain struct {
	Overlay *os.File // read and write; QCOW2
	Base    *os.File // read only
	Format  qcow2.Format
}

// Open opens a disk that Build created, and its image, which must be in the cache.
func Open(images *Images, dir, id string) (Chain, error) {
	if !validID.MatchString(id) {
		return Chain{}, fmt.Errorf("open disk %q: its id is not one", id)
	}
	d, err := read(dir, id)
	if err != nil {
		return Chain{}, fmt.Errorf("open disk %q: %w", id, err)
	}
	var c Chain
	if d.Image != nil {
		c.Format = d.Image.Format
		if c.Base, err = images.Open(*d.Image); err != nil {
			return Chain{}, fmt.Errorf("open disk %q: %w", id, err)
		}
	}
	if c.Overlay, err = os.OpenFile(path(dir, id), os.O_RDWR|syscall.O_NOFOLLOW, 0); err != nil {
		c.Close()
		return Chain{}, fmt.Errorf("open disk %q: %w", id, err)
	}
	return c, nil
}

// Close closes the files of the disk.
func (c Chain) Close() {
	for _, f := range []*os.File{c.Overlay, c.Base} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Remove removes all disks in dir, and dir itself. A missing dir is no error. The images are kept.
func Remove(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove disks: %w", err)
	}
	return atomicfile.SyncDir(filepath.Dir(dir))
}

// RemoveOne removes the disk with the given ID from dir. It returns nil if the disk or dir does not exist. The base
// image is kept.
func RemoveOne(dir, id string) error {
	for _, name := range []string{path(dir, id), notePath(dir, id)} {
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove disk %q: %w", id, err)
		}
	}
	return nil
}

func path(dir, id string) string     { return filepath.Join(dir, id+".qcow2") }
func notePath(dir, id string) string { return filepath.Join(dir, id+".json") }
