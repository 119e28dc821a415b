// Package qcow2 validates and creates disk images in QEMU's QCOW2 format, in pure Go. It treats every image as
// untrusted.
//
// The control plane validates images that tenants upload, and the agent validates its own copy before QEMU opens it:
// [Inspect] accepts only a stand-alone image in which every pointer lies inside the file. The agent creates a VM's
// disks with [Create]. They are empty and name no backing file, because QEMU receives the backing chain as open file
// descriptors.
//
// The layout follows QEMU's docs/interop/qcow2.txt. The package imports of Trivet only shared/mutant, opens no files
// and runs no program. Callers translate its errors into responses to tenants.
//
// Decisions:
//   - Rejected although legal: a backing file, an external data file, encryption (each makes QEMU read data that is not
//     in the file), internal snapshots and persistent bitmaps (tables that a plain image does not need and that Inspect
//     would have to validate too), and images marked dirty or corrupt (QEMU would have to repair them, but a base image
//     is only ever opened read-only). `qemu-img convert -O qcow2` makes an acceptable image of any of them.
//   - Accepted: versions 2 and 3, zlib and zstd clusters, extended L2 entries, every legal cluster size.
//   - Reference counts are not verified. Only writers use them, and base images are never written.
//   - Unknown header extensions are skipped and unknown incompatible features are rejected, as the format requires.
package qcow2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Limits of an image. The first four are limits of QEMU (block/qcow2.h), which does not open an image that exceeds
// them. MinClusterBits and MaxClusterBits are the log2 of the cluster size in bytes. maxL1Bytes and maxRefTable are the
// maximum sizes of the L1 table and the refcount table, in bytes.
const (
	MinClusterBits = 9
	MaxClusterBits = 21
	maxL1Bytes     = 32 << 20
	maxRefTable    = 8 << 20

	// MaxVirtualSize is the largest virtual size of a disk that Trivet supports, in bytes.
	MaxVirtualSize = 64 << 40

	// maxWalk is the maximum total size of the L2 tables of an image that Inspect accepts, in bytes. At 64 KiB clusters
	// that is 8 TiB of allocated data.
	maxWalk = 1 << 30

	maxExtensions = 64
	sector        = 512
)

// ErrRefused is wrapped by each error of Inspect that is caused by the content of the image. The other errors of
// Inspect are read errors.
var ErrRefused = errors.New("qcow2 image refused")

// refuse returns an error that wraps ErrRefused. Its message is shown to the image's owner, so it must contain nothing
// about the host.
func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...))
}

// Info holds the properties of an image that Inspect accepted.
type Info struct {
	Version     int    // 2 or 3
	VirtualSize uint64 // size of the disk in bytes, as the guest sees it; a multiple of 512, at most MaxVirtualSize
	ClusterBits int    // log2 of the cluster size in bytes
	Compression Compression
	ExtendedL2  bool
	// Allocated is the number of clusters of the virtual disk whose data is in the file.
	Allocated uint64
}

// Compression is the compression method of the compressed clusters of an image.
type Compression uint8

const (
	Zlib Compression = 0
	Zstd Compression = 1
)

// Bits of header3.Incompatible, the features without which an image cannot be read:
const (
	bitDirty = 1 << iota
	bitCorrupt
	bitDataFile
	bitCompression
	bitExtendedL2
)

// Types of header extensions, as in QEMU's docs/interop/qcow2.txt.
const (
	extEnd      = 0x00000000
	extLUKS     = 0x0537be77
	extBitmaps  = 0x23852875
	extDataFile = 0x44415441
)

// header is the part of an image's header that versions 2 and 3 have in common. The fields are in the order on disk.
type header struct {
	Magic                 [4]byte
	Version               uint32
	BackingOffset         uint64
	BackingSize           uint32
	ClusterBits           uint32
	Size                  uint64
	Crypt                 uint32
	L1Size                uint32
	L1Offset              uint64
	RefcountTableOffset   uint64
	RefcountTableClusters uint32
	Snapshots             uint32
	SnapshotsOffset       uint64
}

// header3 is the part of the header that follows header in an image of version 3.
type header3 struct {
	Incompatible, Compatible, Autoclear uint64
	RefcountOrder, HeaderLength         uint32
}

const (
	header2Length = 72
	header3Length = 104
)

// Inspect validates the image in r, which is size bytes long. It returns an error that wraps [ErrRefused] if the image
// needs another file or a key, or if one of its tables or clusters lies outside the file.
//
// Inspect reads the header, the L1 table and each L2 table once, and never guest data. That is at most 1 GiB of L2
// tables and 34 MiB for the rest, in reads of at most 2 MiB. To limit the time, pass a reader that returns an error
// after a deadline.
func Inspect(r io.ReaderAt, size int64) (Info, error) {
	if size < header2Length {
		return Info{}, refuse("the file has %d bytes, which is too short for a header", size)
	}
	first := make([]byte, min(size, 1<<MaxClusterBits))
	if _, err := r.ReadAt(first, 0); err != nil && !(errors.Is(err, io.EOF) && int64(len(first)) == size) {
		return Info{}, fmt.Errorf("read header: %w", err)
	}
	img, err := parse(first, uint64(size), false)
	if err != nil {
		return Info{}, err
	}
	if err := img.walk(r); err != nil {
		return Info{}, err
	}
	return img.info, nil
}

// image holds those values of a validated header that are needed to read the L1 and L2 tables.
type image struct {
	info     Info
	fileSize uint64
	cluster  uint64 // bytes
	l1Offset uint64
	l1Used   uint64 // L1 entries that the virtual size needs
	l1Size   uint64 // entries of the L1 table
	l2Span   uint64 // bytes of the disk that one L2 table maps
}

// parse validates the header of an image. first is the beginning of the file. It must contain the complete first
// cluster, or the complete file if the file is shorter than a cluster. If encrypted is true, parse accepts an image
// with LUKS encryption.
func parse(first []byte, fileSize uint64, encrypted bool) (*image, error) {
	var h header
	if err := binary.Read(bytes.NewReader(first), binary.BigEndian, &h); err != nil {
		return nil, refuse("the header is cut short")
	}
	if string(h.Magic[:]) != Magic {
		return nil, refuse("it does not begin with the QCOW2 magic")
	}
	if h.Version != 2 && h.Version != 3 {
		return nil, refuse("version %d is not known, only 2 and 3", h.Version)
	}
	if h.ClusterBits < MinClusterBits || h.ClusterBits > MaxClusterBits {
		return nil, refuse("cluster bits are %d, not within %d to %d", h.ClusterBits, MinClusterBits, MaxClusterBits)
	}
	if (h.BackingOffset != 0 || h.BackingSize != 0) && !mutant.On(mutant.AcceptBackingFile) {
		return nil, refuse("it has a backing file; flatten it with `qemu-img convert -O qcow2`")
	}
	if h.Crypt != 0 && !encrypted && !mutant.On(mutant.AcceptEncrypted) {
		return nil, refuse("it is encrypted")
	}
	if h.Snapshots != 0 {
		return nil, refuse("it has %d internal snapshots; drop them with `qemu-img convert -O qcow2`", h.Snapshots)
	}
	img := &image{fileSize: fileSize, cluster: 1 << h.ClusterBits, l1Offset: h.L1Offset, l1Size: uint64(h.L1Size)}
	img.info = Info{Version: int(h.Version), VirtualSize: h.Size, ClusterBits: int(h.ClusterBits)}

	length := uint64(header2Length)
	if h.Version == 3 {
		var err error
		if length, err = img.parse3(first); err != nil {
			return nil, err
		}
	}
	if err := extensions(first, length, img.cluster, encrypted); err != nil {
		return nil, err
	}
	if err := img.geometry(h); err != nil {
		return nil, err
	}
	return img, nil
}

// parse3 validates the header fields that only version 3 has, and returns the header's length in bytes.
func (img *image) parse3(first []byte) (uint64, error) {
	var h header3
	if err := binary.Read(bytes.NewReader(first[header2Length:]), binary.BigEndian, &h); err != nil {
		return 0, refuse("the header is cut short")
	}
	length := uint64(h.HeaderLength)
	if length < header3Length || length%8 != 0 || length > img.cluster || length > uint64(len(first)) {
		return 0, refuse("the header's length is %d", length)
	}
	if h.RefcountOrder > 6 {
		return 0, refuse("the refcount order is %d, not within 0 to 6", h.RefcountOrder)
	}
	if mutant.On(mutant.AcceptDataFile) {
		h.Incompatible &^= bitDataFile
	}
	switch {
	case h.Incompatible&bitDataFile != 0:
		return 0, refuse("its data is in another file; flatten it with `qemu-img convert -O qcow2`")
	case h.Incompatible&bitDirty != 0:
		return 0, refuse("it was not closed properly; repair it with `qemu-img check -r all`")
	case h.Incompatible&bitCorrupt != 0:
		return 0, refuse("it is marked corrupt; repair it with `qemu-img check -r all`")
	case h.Incompatible&^(bitCompression|bitExtendedL2) != 0:
		return 0, refuse("it needs unknown features (bits %#x)", h.Incompatible&^(bitCompression|bitExtendedL2))
	}
	if length > header3Length {
		img.info.Compression = Compression(first[header3Length])
	}
	switch {
	case img.info.Compression > Zstd:
		return 0, refuse("compression type %d is not known", img.info.Compression)
	case (img.info.Compression != Zlib) != (h.Incompatible&bitCompression != 0):
		return 0, refuse("its compression type and its feature bits contradict each other")
	}
	if h.Incompatible&bitExtendedL2 != 0 {
		if img.info.ClusterBits < 14 {
			return 0, refuse("extended L2 entries need clusters of 16 KiB or more")
		}
		img.info.ExtendedL2 = true
	}
	return length, nil
}

// extensions validates the header extensions, which must end inside the first cluster.
func extensions(first []byte, at, cluster uint64, encrypted bool) error {
	end := min(cluster, uint64(len(first)))
	for n := 0; ; n++ {
		if n == maxExtensions {
			return refuse("it has more than %d header extensions", maxExtensions)
		}
		if at+8 > end {
			// Images of old programs may have no end marker. Their extensions end with the first cluster.
			return nil
		}
		kind, length := binary.BigEndian.Uint32(first[at:]), uint64(binary.BigEndian.Uint32(first[at+4:]))
		at += 8
		switch kind {
		case extEnd:
			return nil
		case extLUKS:
			if !encrypted && !mutant.On(mutant.AcceptEncrypted) {
				return refuse("it is encrypted")
			}
		case extDataFile:
			if !mutant.On(mutant.AcceptDataFile) {
				return refuse("its data is in another file; flatten it with `qemu-img convert -O qcow2`")
			}
		case extBitmaps:
			return refuse("it has persistent bitmaps; drop them with `qemu-img convert -O qcow2`")
		}
		if length > end-at {
			return refuse("header extension %#08x reaches out of the first cluster", kind)
		}
		at += (length + 7) &^ 7
	}
}

// geometry validates the virtual size, and the sizes and offsets of the L1 table and the refcount table.
func (img *image) geometry(h header) error {
	switch {
	case h.Size == 0:
		return refuse("its virtual size is 0")
	case h.Size%sector != 0:
		return refuse("its virtual size, %d bytes, is not a multiple of %d", h.Size, sector)
	case h.Size > MaxVirtualSize:
		return refuse("its virtual size, %d bytes, exceeds 64 TiB", h.Size)
	}
	img.l2Span = img.cluster / img.entrySize() * img.cluster
	img.l1Used = (h.Size + img.l2Span - 1) / img.l2Span
	if img.l1Size*8 > maxL1Bytes {
		return refuse("its L1 table has %d entries, more than QEMU reads", img.l1Size)
	}
	if img.l1Size < img.l1Used {
		return refuse("its L1 table has %d entries, but its virtual size needs %d", img.l1Size, img.l1Used)
	}
	if err := img.table("L1 table", img.l1Offset, img.l1Size*8); err != nil {
		return err
	}
	refBytes := uint64(h.RefcountTableClusters) * img.cluster
	if refBytes == 0 || refBytes > maxRefTable {
		return refuse("its refcount table has %d clusters", h.RefcountTableClusters)
	}
	return img.table("refcount table", h.RefcountTableOffset, refBytes)
}

func (img *image) entrySize() uint64 {
	if img.info.ExtendedL2 {
		return 16
	}
	return 8
}

// table returns an error if a table of length bytes at offset is not completely inside the file, does not begin at a
// cluster boundary, or begins in the first cluster, which contains the header.
func (img *image) table(name string, offset, length uint64) error {
	switch {
	case offset%img.cluster != 0:
		return refuse("the %s at %#x is not aligned to a cluster", name, offset)
	case offset == 0:
		return refuse("the %s lies on the header", name)
	case offset > img.fileSize || length > img.fileSize-offset:
		return refuse("the %s at %#x reaches out of the file", name, offset)
	}
	return nil
}

// VirtualSize returns the size of the virtual disk, in bytes. first must contain at least the first 32 bytes of the
// image. It returns false if first is not the beginning of a QCOW2 image. It validates nothing else, so use it only for
// images that Create made.
func VirtualSize(first []byte) (uint64, bool) {
	if len(first) < 32 || !IsQCOW2(first) {
		return 0, false
	}
	return binary.BigEndian.Uint64(first[24:]), true
}
