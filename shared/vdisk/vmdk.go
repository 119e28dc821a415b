package vdisk

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
)

// Values of the header of a VMDK (SparseExtentHeader).
const (
	vmdkCompressed = 1 << 16 // flag: grains are compressed
	vmdkZeroGrain  = 1 << 2  // flag: grain 1 is a grain of zeros
	vmdkAtEnd      = 1<<64 - 1
	vmdkDeflate    = 1

	maxGrain      = 1 << 20 // bytes
	maxDescriptor = 1 << 20
	// grainMarker is the size of the marker in front of a compressed grain: its first sector and its size.
	grainMarker = 12
)

// vmdkHeader is SparseExtentHeader. The fields are in the order on disk. Offsets and sizes are in sectors.
type vmdkHeader struct {
	Magic                               [4]byte
	Version, Flags                      uint32
	Capacity, GrainSize                 uint64
	DescriptorOffset, DescriptorSize    uint64
	GrainsPerTable                      uint32
	RedundantDirectory, GrainDirectory  uint64
	Overhead                            uint64
	Unclean                             uint8
	NewLine, NoNewLine, NewLine1, NewL2 byte
	Compression                         uint16
}

func (d *Disk) openVMDK(f *file) error {
	h, err := readVMDKHeader(f, 0)
	if err != nil {
		return err
	}
	descriptorAt, descriptorSize := h.DescriptorOffset, h.DescriptorSize
	if h.GrainDirectory == vmdkAtEnd {
		// A streamOptimized image ends with a footer, which has the final header, and an end marker.
		if h, err = readVMDKHeader(f, f.size-min(f.size, 2*sector)); err != nil {
			return err
		}
	}
	if err := h.check(); err != nil {
		return err
	}
	if descriptorAt == 0 || descriptorSize > maxDescriptor/sector {
		return refuse("a VMDK of several files is not supported, nor one with a descriptor above 1 MiB")
	}
	descriptor, err := f.read("descriptor", sectors(descriptorAt), sectors(descriptorSize))
	if err != nil {
		return err
	}
	if err := checkDescriptor(string(bytes.TrimRight(descriptor, "\x00"))); err != nil {
		return err
	}
	d.size = sectors(h.Capacity)
	return d.readGrainTables(f, h)
}

func readVMDKHeader(f *file, at uint64) (*vmdkHeader, error) {
	b, err := f.read("header", at, min(sector, f.size-min(f.size, at)))
	if err != nil {
		return nil, err
	}
	b = append(b, make([]byte, sector-len(b))...) // a descriptor alone can be shorter than a header
	h := &vmdkHeader{}
	if _, err := binary.Decode(b, binary.LittleEndian, h); err != nil {
		return nil, err
	}
	if string(h.Magic[:]) != "KDMV" {
		return nil, refuse("a VMDK with the data in other files, or of VMware ESX, is not supported")
	}
	return h, nil
}

// check returns an error unless the header's values are among those that VMware's and QEMU's programs write.
func (h *vmdkHeader) check() error {
	grain := h.GrainSize
	switch {
	case h.Version < 1 || h.Version > 3:
		return refuse("version %d of VMDK is not supported", h.Version)
	case h.GrainDirectory == vmdkAtEnd:
		return refuse("its footer has no grain directory")
	case grain < 8 || grain > maxGrain/sector || grain&(grain-1) != 0:
		return refuse("grains of %d sectors are not possible", grain)
	case h.GrainsPerTable == 0 || h.GrainsPerTable > 1<<16:
		return refuse("%d grains in a table are not possible", h.GrainsPerTable)
	case h.Capacity > 1<<46/sector:
		return refuse("a virtual size of %d sectors is not possible", h.Capacity)
	case h.Flags&vmdkCompressed != 0 && h.Compression != vmdkDeflate:
		return refuse("compression %d is not supported", h.Compression)
	}
	return nil
}

var (
	createType = regexp.MustCompile(`(?m)^\s*createType\s*=\s*"([^"]*)"`)
	parentCID  = regexp.MustCompile(`(?m)^\s*parentCID\s*=\s*(\w+)`)
	extentLine = regexp.MustCompile(`(?m)^\s*(RW|RDONLY|NOACCESS)\s+\d+\s+(\w+)`)
)

// checkDescriptor returns an error unless the descriptor describes a disk that needs no other file.
func checkDescriptor(text string) error {
	kind := createType.FindStringSubmatch(text)
	if kind == nil || kind[1] != "monolithicSparse" && kind[1] != "streamOptimized" {
		return refuse("its type must be monolithicSparse or streamOptimized")
	}
	if m := parentCID.FindStringSubmatch(text); m != nil && !strings.EqualFold(m[1], "ffffffff") ||
		strings.Contains(text, "parentFileNameHint") {
		return refuse("it needs a parent image")
	}
	extents := extentLine.FindAllStringSubmatch(text, -1)
	if len(extents) != 1 || extents[0][2] != "SPARSE" {
		return refuse("it must have one extent of type SPARSE")
	}
	return nil
}

// readGrainTables appends to d.blocks a block for each grain with data in the file.
func (d *Disk) readGrainTables(f *file, h *vmdkHeader) error {
	grain := sectors(h.GrainSize)
	perTable := grain * uint64(h.GrainsPerTable)
	directory, err := f.read("grain directory", sectors(h.GrainDirectory), (d.size+perTable-1)/perTable*4)
	if err != nil {
		return err
	}
	for i := uint64(0); i*4 < uint64(len(directory)); i++ {
		at := binary.LittleEndian.Uint32(directory[i*4:])
		if at == 0 {
			continue
		}
		table, err := f.read("grain table", sectors(uint64(at)), uint64(h.GrainsPerTable)*4)
		if err != nil {
			return err
		}
		if d.tables += uint64(len(table)); d.tables > maxTables {
			return refuse("it has more than %d MiB of tables", maxTables>>20)
		}
		for j := uint64(0); j*4 < uint64(len(table)); j++ {
			at := binary.LittleEndian.Uint32(table[j*4:])
			offset := i*perTable + j*grain
			if at == 0 || at == 1 && h.Flags&vmdkZeroGrain != 0 || offset >= d.size {
				continue
			}
			b := block{offset: offset, length: min(grain, d.size-offset), at: int64(sectors(uint64(at)))}
			if h.Flags&vmdkCompressed != 0 {
				if b, err = compressedGrain(f, b, grain); err != nil {
					return err
				}
			}
			if err := d.add(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// compressedGrain returns the block of a compressed grain, whose marker is at b.at.
func compressedGrain(f *file, b block, grain uint64) (block, error) {
	marker, err := f.read("grain", uint64(b.at), grainMarker)
	if err != nil {
		return b, err
	}
	if lba := binary.LittleEndian.Uint64(marker); lba != b.offset/sector {
		return b, refuse("the grain of sector %d is marked as that of sector %d", b.offset/sector, lba)
	}
	b.stored = uint64(binary.LittleEndian.Uint32(marker[8:]))
	if b.stored == 0 || b.stored > 2*grain { // deflate makes data at most slightly longer
		return b, refuse("a grain has %d compressed bytes", b.stored)
	}
	b.at += grainMarker
	return b, nil
}

// readCompressed passes a compressed block.
func (d *Disk) readCompressed(b *block, write func(uint64, []byte) error) error {
	compressed := make([]byte, b.stored)
	if _, err := d.r.ReadAt(compressed, b.at); err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read block: %w", err)
	}
	z, err := zlib.NewReader(bytes.NewReader(compressed))
	if err == nil {
		data := make([]byte, b.length)
		if _, err = io.ReadFull(z, data); err == nil {
			return write(b.offset, data)
		}
	}
	return refuse("the block at offset %d cannot be decompressed: %v", b.offset, err)
}

// sectors returns the number of bytes of n sectors, or the largest uint64 if that number overflows.
func sectors(n uint64) uint64 {
	if n > (1<<64-1)/sector {
		return 1<<64 - 1
	}
	return n * sector
}
