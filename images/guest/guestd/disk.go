package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/trivet-cloud/trivet/images/guest"

	"golang.org/x/sys/unix"
)

const (
	dataDir   = "/data"
	dataLabel = "trivet-data" // the label that the build gives to the data partition
	chunk     = 64 << 10      // bytes per direct I/O
)

// mountData mounts the partition or disk that has the data label, if there is one.
func mountData() []error {
	names, err := os.ReadDir("/sys/class/block")
	if err != nil {
		return []error{fmt.Errorf("list block devices: %w", err)}
	}
	for _, e := range names {
		if strings.HasPrefix(e.Name(), "loop") || !isData("/dev/"+e.Name()) {
			continue
		}
		if err := unix.Mount("/dev/"+e.Name(), dataDir, "ext4", unix.MS_NOATIME, ""); err != nil {
			return []error{fmt.Errorf("mount %s on %s: %w", e.Name(), dataDir, err)}
		}
		return nil
	}
	return nil
}

// isData reports whether dev holds an ext4 file system with the data label. The superblock is at byte 1024, with magic
// 0xEF53 at +56 and a 16-byte label at +120. For a device that cannot be read (a drive without a disc) it returns
// false.
func isData(dev string) bool {
	f, err := os.Open(dev)
	if err != nil {
		return false
	}
	defer f.Close()
	var sb [136]byte
	if _, err := f.ReadAt(sb[:], 1024); err != nil {
		return false
	}
	label, _, _ := bytes.Cut(sb[120:136], []byte{0})
	return binary.LittleEndian.Uint16(sb[56:]) == 0xEF53 && string(label) == dataLabel
}

// extent is the range of a block device to which a command applies.
type extent struct {
	dev      string // name below /dev
	off, len int64  // bytes, multiples of guest.SectorSize
}

func (e extent) String() string { return fmt.Sprintf("dev=%s off=%d len=%d", e.dev, e.off, e.len) }

// write fills the extent with the seed's pattern, bypassing the page cache. It syncs the device and returns the SHA-256
// of the data.
func (e extent) write(seed string) (sum string, err error) {
	f, err := e.open(unix.O_WRONLY)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	h := sha256.New()
	err = e.each(func(buf []byte, off int64) error {
		guest.Pattern(buf, seed, off)
		h.Write(buf)
		_, err := f.WriteAt(buf, off)
		return err
	})
	if err != nil {
		return "", err
	}
	if err := f.Sync(); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// sum returns the SHA-256 of the extent, read from the device, bypassing the page cache.
func (e extent) sum() (string, error) {
	f, err := e.open(unix.O_RDONLY)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	err = e.each(func(buf []byte, off int64) error {
		if _, err := f.ReadAt(buf, off); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		h.Write(buf)
		return nil
	})
	if err != nil {
		return "", err
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// open opens the device for direct I/O and checks that the extent lies within it.
func (e extent) open(mode int) (*os.File, error) {
	if e.dev == "" || strings.ContainsAny(e.dev, "/.") {
		return nil, fmt.Errorf("%q is no device name", e.dev)
	}
	f, err := os.OpenFile("/dev/"+e.dev, mode|unix.O_DIRECT, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if info.Mode()&(os.ModeDevice|os.ModeCharDevice) != os.ModeDevice {
		return nil, errors.Join(fmt.Errorf("%s is no block device", e.dev), f.Close())
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if e.off > size || e.len > size-e.off {
		return nil, errors.Join(fmt.Errorf("%s ends at byte %d", e.dev, size), f.Close())
	}
	return f, nil
}

// each calls do for each chunk of the extent with a buffer aligned for direct I/O.
func (e extent) each(do func(buf []byte, off int64) error) error {
	buf, err := unix.Mmap(-1, 0, chunk, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("allocate buffer: %w", err)
	}
	defer func() { _ = unix.Munmap(buf) }() // cannot fail for a slice that Mmap returned
	for done := int64(0); done < e.len; {
		n := min(chunk, e.len-done)
		if err := do(buf[:n], e.off+done); err != nil {
			return err
		}
		done += n
	}
	return nil
}
