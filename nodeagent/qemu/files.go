package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/console"
)

// Files are the open files that a QEMU gets. The caller owns them, and may close them after Launch has returned.
type Files struct {
	Kernel, Initrd *os.File          // readable by all users; nil if the Spec has none
	Seed           *os.File          // raw, open read-only; nil if the Spec has none
	CDROM          *os.File          // raw, open read-only; nil if the Spec has none
	Disks          map[string]Layers // by disk id
	// Taps are the taps of the network interfaces, by interface id: descriptors of /dev/net/tun that are attached to a
	// device, with IFF_VNET_HDR.
	Taps map[string]*os.File
}

// Layers are the files and the keys of one disk. A disk with an RBD image has keys and no files.
type Layers struct {
	// Overlay is the disk's own file, in the format of the Spec. A disk without a base image has it too. It is open for
	// reading and writing, or read-only if the disk is read-only.
	Overlay *os.File
	Base    *os.File // in the format of the Spec; open read-only; nil if there is no base image
	// Size is the disk's virtual size in bytes, from the assignment. The size in the overlay's header is not used,
	// because QEMU could change it.
	Size uint64
	Keys
	// Confirm is called by PlugDisk after QEMU has opened the disk, and before the guest gets it. If Confirm returns an
	// error, the guest does not get the disk. Launch does not call it: the caller can check before Resume. It may be
	// nil.
	Confirm func(context.Context) error
}

// keys returns the keys of the encrypted disks and RBD images, by disk id.
func (f Files) keys() map[string]Keys {
	keys := map[string]Keys{}
	for id, l := range f.Disks {
		if len(l.Key) > 0 || len(l.User) > 0 {
			keys[id] = l.Keys
		}
	}
	return keys
}

// check returns an error if the files are not those of the disk d.
func (l Layers) check(d Disk) error {
	if d.Encrypted && len(l.Key) == 0 {
		return fmt.Errorf("disk %s: %w", d.ID, errNoKey)
	}
	if d.RBD != nil {
		if l.Overlay != nil || l.Base != nil || !validRBDKey.Match(l.User) {
			return fmt.Errorf("disk %s has files, or no key of its Ceph user", d.ID)
		}
		return nil
	}
	if l.Overlay == nil || (l.Base != nil) != (d.Base != "") {
		return fmt.Errorf("the files for disk %s do not match the spec", d.ID)
	}
	if err := checkOpenMode(l.Overlay, !d.ReadOnly); err != nil {
		return fmt.Errorf("the overlay of disk %s %w", d.ID, err)
	}
	if l.Base != nil {
		if err := checkOpenMode(l.Base, false); err != nil {
			return fmt.Errorf("the image beneath disk %s %w", d.ID, err)
		}
	}
	return nil
}

// inOrder returns the files of all disks in the order of s.Disks, for each disk the overlay before the base image. The
// seed, the taps and the image of the CD-ROM drive follow. It returns an error if the files do not match s.
func (f Files) inOrder(s Spec) ([]*os.File, error) {
	if (f.Kernel != nil) != s.Kernel || (f.Initrd != nil) != s.Initrd || (f.Seed != nil) != s.Seed ||
		(f.CDROM != nil) != (s.CDROM != "") {
		return nil, errors.New("the files for kernel, initrd, seed and CD-ROM do not match the spec")
	}
	var out []*os.File
	for _, d := range s.Disks {
		l := f.Disks[d.ID]
		if err := l.check(d); err != nil {
			return nil, err
		}
		if d.RBD != nil {
			continue
		}
		out = append(out, l.Overlay)
		if l.Base != nil {
			out = append(out, l.Base)
		}
	}
	if f.Seed != nil {
		if err := checkOpenMode(f.Seed, false); err != nil {
			return nil, fmt.Errorf("the seed %w", err)
		}
		out = append(out, f.Seed)
	}
	taps, err := f.tapsInOrder(s)
	if err != nil {
		return nil, err
	}
	cdrom, err := f.cdromFile(s)
	return slices.Concat(out, taps, cdrom), err
}

// minFileBytes is the smallest file size limit of a QEMU, in bytes. It applies to the logs of a guest without large
// disks. It is twice console.Longest, so that the log of a normal guest is trimmed before it reaches the limit.
const minFileBytes = 2 * console.Longest

// fileSizeLimit returns QEMU's file size limit (RLIMIT_FSIZE) in bytes. The limit applies to each file that QEMU
// writes: the overlays of its disks, and its two logs while no agent trims them. So it limits how much of the host's
// disk a compromised QEMU can fill.
//
// A QCOW2 file with clusters of 64 KiB has 1/6554 of its virtual size in tables. A sixteenth and 64 MiB leave room for
// clusters that a crash leaked. A write beyond the limit fails with EFBIG, which stops the guest as a full disk does.
// The limit belongs to the process: PlugDisk and ResizeDisk raise it (see raiseFileLimit in filelimit.go). The limit
// also applies to files in memory, such as a memfd for guest memory, but the command line of this package creates none.
func (f Files) fileSizeLimit() uint64 {
	most := uint64(minFileBytes)
	for _, l := range f.Disks {
		most = max(most, diskFileLimit(l.Size))
	}
	return most
}

// checkOpenMode returns an error if f is open in the wrong mode. If write is true, f must be open for reading and
// writing, otherwise for reading only.
func checkOpenMode(f *os.File, write bool) error {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return os.NewSyscallError("fcntl", err)
	}
	switch mode := flags & unix.O_ACCMODE; {
	case write && mode != unix.O_RDWR:
		return errors.New("is not open for reading and writing")
	case !write && mode != unix.O_RDONLY:
		return errors.New("is not open for reading alone")
	}
	return nil
}
