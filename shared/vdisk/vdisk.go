// Package vdisk reads disk images in the formats of other hypervisors, in pure Go, to convert them to QCOW2. It treats
// every image as untrusted. [Open] checks the tables of an image, and [Disk.Read] passes its data to a function.
//
// The API has the image formats VMDK and VHD. This package supports these variants of them:
//
//   - VMDK (VMware's "Virtual Disk Format 5.0"): one file of the types monolithicSparse and streamOptimized.
//   - VHD (Microsoft's "Virtual Hard Disk Image Format Specification"): fixed and dynamic disks.
//   - VHDX (Microsoft's [MS-VHDX]): fixed and dynamic disks.
//
// Decisions:
//
//   - An image cannot make the package read another file. Images that need another file (a VMDK descriptor without
//     data, several extents, a parent) are refused, and so are images that were not closed (a VHDX with a log).
//   - No two blocks of an image may share bytes of the file, because otherwise a small file could expand to a disk of
//     any size. Compressed data can grow by a factor of 1,000; [Options.MaxData] limits it.
//   - A block that is in no table reads as zeros. An image with a table or a block outside the file is refused.
//   - The checksums of headers are verified where QEMU verifies them. Data has no checksums in these formats.
//
// The package opens no files and runs no program. Callers convert the package's errors to responses for tenants.
package vdisk

import (
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

const (
	sector = 512

	// maxTable is the largest table that Open reads, in bytes. A VMDK of 64 TiB with the usual grains of 64 KiB has 4
	// GiB of tables, of which Open reads only those of ranges with data.
	maxTable = 256 << 20

	// maxTables is the largest number of bytes of all tables of an image together.
	maxTables = 1 << 30

	// maxBlocks is the largest number of blocks with data. With the usual grains (the blocks of a VMDK) of 64 KiB, this
	// is 128 GiB of data.
	maxBlocks = 1 << 21

	// maxPiece is the largest number of bytes that Read passes to its function.
	maxPiece = 1 << 20
)

// ErrRefused is wrapped by each error that is caused by the content of the image. Other errors are read errors.
var ErrRefused = errors.New("disk image refused")

// refuse returns an error that wraps ErrRefused. Its message is shown to the image's owner, so it must contain nothing
// about the host.
func refuse(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrRefused, fmt.Sprintf(format, args...))
}

// Options configure Open.
type Options struct {
	// MaxData limits the bytes that Read passes to its function. Required.
	MaxData uint64
}

// block is a range of the disk whose data is in the file.
type block struct {
	offset uint64 // on the disk, in bytes
	length uint64
	at     int64 // in the file
	// stored is the number of bytes in the file, if it differs from length: the block is compressed.
	stored uint64
	// bitmap is the offset in the file of a bitmap with a bit for each sector, or 0. A sector whose bit is 0 is zero.
	bitmap int64
}

// Disk is an opened image.
type Disk struct {
	r       io.ReaderAt
	size    uint64
	blocks  []block // in the order of their offsets
	options Options
	tables  uint64 // bytes of tables that were read
}

// Open checks the image in r, which has size bytes and was detected to have format. The format is VMDK, VHD or VHDX; a
// fixed VHD, which has a footer only, is detected as Raw by package qcow2. To limit the time, pass a reader that
// returns an error after a deadline.
func Open(r io.ReaderAt, size int64, format qcow2.Format, o Options) (*Disk, error) {
	d := &Disk{r: r, options: o}
	file := &file{r, uint64(size)}
	var err error
	switch format {
	case qcow2.VMDK:
		err = d.openVMDK(file)
	case qcow2.VHD, qcow2.Raw:
		err = d.openVHD(file)
	case qcow2.VHDX:
		err = d.openVHDX(file)
	default:
		return nil, refuse("the format %s cannot be converted", format)
	}
	if err != nil {
		return nil, err
	}
	return d, d.check(file)
}

// Size returns the size of the disk in bytes: a multiple of 512, above 0 and at most qcow2.MaxVirtualSize.
func (d *Disk) Size() uint64 { return d.size }

// Units divides the disk into ranges of unit bytes, and returns the number of ranges of which Read passes at least one
// byte.
func (d *Disk) Units(unit uint64) uint64 {
	count, next := uint64(0), uint64(0) // next is the first range that was not counted
	for i := range d.blocks {
		b := &d.blocks[i]
		first, end := max(b.offset/unit, next), (b.offset+b.length+unit-1)/unit
		if end > first {
			count, next = count+end-first, end
		}
	}
	return count
}

// check returns an error unless the size is possible and the blocks lie in the file and do not overlap there. Callers
// have checked the order of the blocks' offsets.
func (d *Disk) check(f *file) error {
	if d.size == 0 || d.size%sector != 0 || d.size > qcow2.MaxVirtualSize {
		return refuse("a virtual size of %d bytes is not possible", d.size)
	}
	inFile := slices.Clone(d.blocks)
	slices.SortFunc(inFile, func(a, b block) int {
		if a.at < b.at {
			return -1
		}
		return 1
	})
	end, total := int64(0), uint64(0) // end of the block before, in the file
	for _, b := range inFile {
		stored := b.length
		if b.stored != 0 {
			stored = b.stored
		}
		if b.at < end {
			return refuse("two blocks share bytes of the file")
		}
		if uint64(b.at) > f.size || stored > f.size-uint64(b.at) {
			return refuse("a block lies outside the file")
		}
		end = b.at + int64(stored)
		if total += b.length; total > d.options.MaxData {
			return refuse("it has more than %d bytes of data", d.options.MaxData)
		}
	}
	return nil
}

// Read calls write with the data of the disk, in the order of the offsets, in pieces of at most 1 MiB. Bytes that Read
// does not pass are zero. The data is valid until write returns. If write returns an error, Read ends and returns this
// error.
func (d *Disk) Read(write func(offset uint64, data []byte) error) error {
	buffer := make([]byte, maxPiece)
	for i := range d.blocks {
		b := &d.blocks[i]
		var err error
		switch {
		case b.stored != 0:
			err = d.readCompressed(b, write)
		default:
			err = d.readPlain(b, buffer, write)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// readPlain passes a block that is not compressed.
func (d *Disk) readPlain(b *block, buffer []byte, write func(uint64, []byte) error) error {
	var bitmap []byte
	if b.bitmap != 0 {
		bitmap = make([]byte, (b.length/sector+7)/8)
		if _, err := d.r.ReadAt(bitmap, b.bitmap); err != nil {
			return fmt.Errorf("read bitmap: %w", err)
		}
	}
	for done := uint64(0); done < b.length; done += maxPiece {
		piece := buffer[:min(b.length-done, maxPiece)]
		if _, err := d.r.ReadAt(piece, b.at+int64(done)); err != nil {
			return fmt.Errorf("read block: %w", err)
		}
		if bitmap != nil {
			clearUnused(piece, bitmap, done/sector)
		}
		// The last block can be longer than the disk.
		piece = piece[:min(uint64(len(piece)), d.size-min(d.size, b.offset+done))]
		if len(piece) == 0 {
			return nil
		}
		if err := write(b.offset+done, piece); err != nil {
			return err
		}
	}
	return nil
}

// clearUnused clears the sectors of data whose bit in a bitmap is 0. The first sector of data is number first.
func clearUnused(data, bitmap []byte, first uint64) {
	for i := uint64(0); i*sector < uint64(len(data)); i++ {
		n := first + i
		if bitmap[n/8]&(0x80>>(n%8)) == 0 {
			clear(data[i*sector : (i+1)*sector])
		}
	}
}

// add appends a block.
func (d *Disk) add(b block) error {
	if len(d.blocks) == maxBlocks {
		return refuse("it has more than %d blocks with data", maxBlocks)
	}
	d.blocks = append(d.blocks, b)
	return nil
}

// file is a file of a known size.
type file struct {
	r    io.ReaderAt
	size uint64
}

// read returns length bytes at an offset. It refuses the image if these bytes are outside the file, or are more than
// maxTable. The parameter what names the bytes in the error.
func (f *file) read(what string, at, length uint64) ([]byte, error) {
	if at > f.size || length > f.size-at {
		return nil, refuse("the %s lies outside the file", what)
	}
	if length > maxTable {
		return nil, refuse("the %s is larger than %d MiB", what, maxTable>>20)
	}
	b := make([]byte, length)
	if _, err := f.r.ReadAt(b, int64(at)); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", what, err)
	}
	return b, nil
}
