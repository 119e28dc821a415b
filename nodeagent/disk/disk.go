// Package disk makes the disks of a host's VMs, and holds the images they are made from.
//
// [Images] is the host's cache: one file an image, named by the SHA-256 of its bytes, fetched once and never written
// again. A VM's disk is a QCOW2 file of its own, empty at first: over an image it is an overlay, over nothing a blank
// disk. [Build] makes them, [Open] opens a disk and what is beneath it for QEMU, which gets descriptors and no paths.
//
// The package knows files, checksums and sizes. It must not know QEMU, the control plane or a VM's life: where the bytes
// of an image come from is a function, and which VM a directory belongs to is its caller's business.
//
// # Layout
//
//	<images>/<sha256>            0444: complete and verified
//	<images>/<sha256>.part       0600: as far as it got
//	<disks>/<disk id>.qcow2      0600, owned by the VM's uid
//	<disks>/<disk id>.json       what it was made as: its size, and the image beneath it
//
// # Decisions
//
//   - An overlay has no name of a backing file in it: QEMU would open whatever the file said. What lies beneath is in
//     the .json, written before the overlay, so that no disk is without it. A host can therefore tell from itself which
//     images it needs ([List]), whether or not the control plane is there.
//   - An image's checksum is verified when it arrives, before it gets its name. Later uses check only that it is a
//     regular read-only file of the right size: hashing takes half a second for each gigabyte, on each start of a VM.
//     A file that is complete was synced before it was renamed, so a crash leaves a whole one or a .part.
//   - An image that claims to be QCOW2 is examined here again before QEMU opens it, although the control plane did: the
//     host that would suffer judges for itself.
//   - Building again what is there does nothing. What is there but differs (other size, other image) is an error and
//     stays as it is: nothing here ever overwrites or shrinks a disk.
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

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// ErrRefused is wrapped by errors that another attempt will not heal: the disk as wanted cannot be.
var ErrRefused = errors.New("disk cannot be made")

var validID = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,31}$`)

// Disk is one disk of a VM as wanted, and as it was made.
type Disk struct {
	ID    string `json:"id"`    // as the limits of disk ids say; unique in the VM
	Size  uint64 `json:"size"`  // bytes the guest sees
	Image *Image `json:"image"` // beneath it; nil is a blank disk
}

// Build makes those of the disks that are not there yet, in dir, for a QEMU that runs as uid, fetching images that are
// missing. An error that wraps [ErrRefused] is final.
func Build(ctx context.Context, images *Images, dir string, uid int, disks []Disk) error {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make disks: %w", err)
	}
	if err := syncDir(filepath.Dir(dir)); err != nil {
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
	if err := same(dir, d); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if _, err := os.Lstat(path(dir, d.ID)); err == nil {
		return fmt.Errorf("%w: it exists, but nothing says as what", ErrRefused)
	}
	if d.Image != nil {
		if err := images.Hold(ctx, *d.Image); err != nil {
			return err
		}
		size, err := images.virtualSize(ctx, *d.Image)
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
	if err := create(notePath(dir, d.ID), func(f *os.File) error {
		_, err := f.Write(note)
		return err
	}); err != nil {
		return err
	}
	return create(path(dir, d.ID), func(f *os.File) error {
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

// same returns nil if the disk is there as wanted, an error that wraps fs.ErrNotExist if it is not there.
func same(dir string, want Disk) error {
	have, err := read(dir, want.ID)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path(dir, want.ID), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	first := make([]byte, 32)
	n, err := f.ReadAt(first, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	size, ok := qcow2.VirtualSize(first[:n])
	switch {
	case !ok:
		return fmt.Errorf("%w: a file that is no QCOW2 is in its place", ErrRefused)
	case size != want.Size:
		return fmt.Errorf("%w: it exists with %d bytes and not %d", ErrRefused, size, want.Size)
	case (have.Image == nil) != (want.Image == nil) || have.Image != nil && *have.Image != *want.Image:
		return fmt.Errorf("%w: it exists over another image", ErrRefused)
	}
	return nil
}

// List tells what disks exist in dir, in the order of their ids; none if there is no dir.
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

// Chain is a disk, opened, from the top down. Base is nil for a blank disk.
type Chain struct {
	Overlay *os.File // read and write; QCOW2
	Base    *os.File // read only
	Format  qcow2.Format
}

// Open opens a disk that Build made, and its image, which must be held.
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

// Close closes what is open.
func (c Chain) Close() {
	for _, f := range []*os.File{c.Overlay, c.Base} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Remove removes all disks in dir, and dir. That they are not there is no error. The images stay.
func Remove(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove disks: %w", err)
	}
	return syncDir(filepath.Dir(dir))
}

func path(dir, id string) string     { return filepath.Join(dir, id+".qcow2") }
func notePath(dir, id string) string { return filepath.Join(dir, id+".json") }

// create makes a file whole or not at all: under another name first, synced, then renamed.
func create(path string, fill func(*os.File) error) (err error) {
	next := path + ".new"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(next, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(next)
		}
	}()
	if err := fill(f); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	if err := os.Rename(next, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
