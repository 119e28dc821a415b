package vdisk

import (
	"encoding/binary"
)

// Values of a VHD.
const (
	vhdFixed        = 2
	vhdDynamic      = 3
	vhdDifferencing = 4
	vhdUnused       = 1<<32 - 1 // an entry of the block allocation table without a block
	vhdHeaderSize   = 1024
)

// vhdFooter is the last sector of a VHD. The fields are in the order on disk, big endian.
type vhdFooter struct {
	Cookie                     [8]byte
	Features, Version          uint32
	DataOffset                 uint64
	Time, Creator, CreatorVers uint32
	CreatorOS                  uint32
	OriginalSize, CurrentSize  uint64
	Geometry, Type, Checksum   uint32
}

// vhdHeader is the header of a dynamic VHD.
type vhdHeader struct {
	Cookie                  [8]byte
	DataOffset, TableOffset uint64
	Version, MaxEntries     uint32
	BlockSize, Checksum     uint32
}

func (d *Disk) openVHD(f *file) error {
	if f.size < 2*sector {
		return refuse("the file has %d bytes, which is too short for a VHD", f.size)
	}
	b, err := f.read("footer", f.size-sector, sector)
	if err != nil {
		return err
	}
	var footer vhdFooter
	if _, err := binary.Decode(b, binary.BigEndian, &footer); err != nil {
		return err
	}
	switch {
	case string(footer.Cookie[:]) != "conectix":
		return refuse("it has no VHD footer: it is another format, or truncated")
	case footer.Checksum != vhdChecksum(b, 64):
		return refuse("the checksum of its footer is wrong")
	case footer.Version>>16 != 1:
		return refuse("version %d.%d of VHD is not supported", footer.Version>>16, footer.Version&0xffff)
	case footer.CurrentSize > 1<<46:
		return refuse("a virtual size of %d bytes is not possible", footer.CurrentSize)
	}
	d.size = footer.CurrentSize
	switch footer.Type {
	case vhdFixed:
		if d.size > f.size-sector {
			return refuse("a fixed disk of %d bytes has only %d bytes of data", d.size, f.size-sector)
		}
		d.blocks = []block{{length: d.size}}
		return nil
	case vhdDynamic:
		return d.openDynamicVHD(f, footer.DataOffset)
	case vhdDifferencing:
		return refuse("it needs a parent image")
	}
	return refuse("type %d of VHD is not supported", footer.Type)
}

// openDynamicVHD reads the header of a dynamic VHD, which is at an offset, and appends to d.blocks each block in the
// VHD's table.
func (d *Disk) openDynamicVHD(f *file, at uint64) error {
	b, err := f.read("header", at, vhdHeaderSize)
	if err != nil {
		return err
	}
	var h vhdHeader
	if _, err := binary.Decode(b, binary.BigEndian, &h); err != nil {
		return err
	}
	size := uint64(h.BlockSize)
	switch {
	case string(h.Cookie[:]) != "cxsparse":
		return refuse("it has no header of a dynamic VHD")
	case h.Checksum != vhdChecksum(b, 36):
		return refuse("the checksum of its header is wrong")
	case size < 4096 || size > 256<<20 || size&(size-1) != 0:
		return refuse("blocks of %d bytes are not possible", size)
	}
	count := (d.size + size - 1) / size
	if count > uint64(h.MaxEntries) {
		return refuse("its table has %d entries, but the disk %d blocks", h.MaxEntries, count)
	}
	table, err := f.read("block allocation table", h.TableOffset, count*4)
	if err != nil {
		return err
	}
	// In front of the data of a block is a bitmap of its sectors, which occupies whole sectors.
	bitmap := (size/sector/8 + sector - 1) / sector * sector
	for i := range count {
		entry := binary.BigEndian.Uint32(table[i*4:])
		if entry == vhdUnused {
			continue
		}
		at := sectors(uint64(entry))
		if at == 0 || at > f.size || bitmap > f.size-at {
			return refuse("a block lies outside the file")
		}
		b := block{offset: i * size, length: min(size, d.size-i*size), at: int64(at + bitmap), bitmap: int64(at)}
		if err := d.add(b); err != nil {
			return err
		}
	}
	return nil
}

// vhdChecksum returns the checksum of a footer or a header, whose own checksum is at an offset: the one's complement of
// the sum of all other bytes.
func vhdChecksum(b []byte, at int) uint32 {
	sum := uint32(0)
	for i, c := range b {
		if i < at || i >= at+4 {
			sum += uint32(c)
		}
	}
	return ^sum
}
