package vdisk

import (
	"encoding/binary"
	"hash/crc32"

	"github.com/google/uuid"
)

// Values of a VHDX ([MS-VHDX] 2.2 to 2.6).
const (
	vhdxRegionTable    = 192 << 10
	vhdxRegionLength   = 64 << 10
	vhdxHeaderLength   = 4 << 10
	vhdxMetadataLength = 64 << 10
	vhdxMaxMetadata    = 1 << 20

	vhdxZero         = 2 // states of blocks
	vhdxUnmapped     = 3
	vhdxFullyPresent = 6

	vhdxHasParent = 2 // flag of the file parameters
)

// GUIDs of regions and metadata, as strings of RFC 4122.
var (
	vhdxRegionBAT      = uuid.MustParse("2dc27766-f623-4200-9d64-115e9bfd4a08")
	vhdxRegionMetadata = uuid.MustParse("8b7ca206-4790-4b9a-b8fe-575f050f886e")
	vhdxFileParameters = uuid.MustParse("caa16737-fa36-4d43-b3b6-33f0aa44e76b")
	vhdxDiskSize       = uuid.MustParse("2fa54224-cd1b-4876-b211-5dbed83bf4b8")
	vhdxLogicalSector  = uuid.MustParse("8141bf1d-a96f-4709-ba47-f233a8faab5f")
	vhdxParentLocator  = uuid.MustParse("a8d35f2d-b30b-454d-abf7-d3d84834ab0c")
)

// vhdxHeads are the offsets of the two headers. The one with the higher sequence number is valid.
var vhdxHeads = []uint64{64 << 10, 128 << 10}

func (d *Disk) openVHDX(f *file) error {
	if err := checkVHDXLog(f); err != nil {
		return err
	}
	regions, err := f.read("region table", vhdxRegionTable, vhdxRegionLength)
	if err != nil {
		return err
	}
	if string(regions[:4]) != "regi" || !vhdxChecksumValid(regions) {
		return refuse("its region table is damaged")
	}
	found := map[uuid.UUID][2]uint64{} // offset and length
	count := binary.LittleEndian.Uint32(regions[8:])
	for i := range min(uint64(count), (vhdxRegionLength-16)/32) {
		entry := regions[16+i*32:]
		id := guid(entry)
		if id != vhdxRegionBAT && id != vhdxRegionMetadata && binary.LittleEndian.Uint32(entry[28:])&1 != 0 {
			return refuse("it requires the unknown region %s", id)
		}
		found[id] = [2]uint64{binary.LittleEndian.Uint64(entry[16:]), uint64(binary.LittleEndian.Uint32(entry[24:]))}
	}
	metadata, ok := found[vhdxRegionMetadata]
	bat, ok2 := found[vhdxRegionBAT]
	if !ok || !ok2 {
		return refuse("it has no block allocation table or no metadata")
	}
	p, err := readVHDXMetadata(f, metadata[0], metadata[1])
	if err != nil {
		return err
	}
	d.size = p.size
	return d.readVHDXBlocks(f, p, bat[0], bat[1])
}

// checkVHDXLog returns an error if the image has a log. A program that was not ended properly leaves a log.
func checkVHDXLog(f *file) error {
	valid, sequence, hasLog := false, uint64(0), false
	for _, at := range vhdxHeads {
		h, err := f.read("header", at, vhdxHeaderLength)
		if err != nil {
			return err
		}
		if string(h[:4]) != "head" || !vhdxChecksumValid(h) {
			continue
		}
		if n := binary.LittleEndian.Uint64(h[8:]); !valid || n >= sequence {
			valid, sequence, hasLog = true, n, guid(h[48:]) != uuid.UUID{}
		}
	}
	if !valid {
		return refuse("both of its headers are damaged")
	}
	if hasLog {
		return refuse("it has a log, because it was not closed: open and close it with the program that made it")
	}
	return nil
}

// vhdxParameters are the properties of a disk in the metadata of a VHDX.
type vhdxParameters struct {
	size, block, logicalSector uint64
}

func readVHDXMetadata(f *file, at, length uint64) (p vhdxParameters, err error) {
	if length < vhdxMetadataLength {
		return p, refuse("its metadata region has %d bytes", length)
	}
	region, err := f.read("metadata region", at, min(length, vhdxMaxMetadata))
	if err != nil {
		return p, err
	}
	if string(region[:8]) != "metadata" {
		return p, refuse("its metadata is damaged")
	}
	for i := range min(int(binary.LittleEndian.Uint16(region[10:])), 2047) {
		entry := region[32+i*32:]
		id := guid(entry)
		offset, size := uint64(binary.LittleEndian.Uint32(entry[16:])), uint64(binary.LittleEndian.Uint32(entry[20:]))
		if offset > uint64(len(region)) || size > uint64(len(region))-offset {
			return p, refuse("an item of its metadata lies outside the metadata")
		}
		item := region[offset : offset+size]
		switch {
		case id == vhdxFileParameters && size >= 8:
			p.block = uint64(binary.LittleEndian.Uint32(item))
			if binary.LittleEndian.Uint32(item[4:])&vhdxHasParent != 0 {
				return p, refuse("it needs a parent image")
			}
		case id == vhdxDiskSize && size >= 8:
			p.size = binary.LittleEndian.Uint64(item)
		case id == vhdxLogicalSector && size >= 4:
			p.logicalSector = uint64(binary.LittleEndian.Uint32(item))
		case id == vhdxParentLocator:
			return p, refuse("it needs a parent image")
		}
	}
	switch {
	case p.block < 1<<20 || p.block > 256<<20 || p.block&(p.block-1) != 0:
		return p, refuse("blocks of %d bytes are not possible", p.block)
	case p.logicalSector != 512 && p.logicalSector != 4096:
		return p, refuse("logical sectors of %d bytes are not possible", p.logicalSector)
	case p.size > 1<<46:
		return p, refuse("a virtual size of %d bytes is not possible", p.size)
	}
	return p, nil
}

// readVHDXBlocks appends to d.blocks each block in the block allocation table, which is at an offset.
func (d *Disk) readVHDXBlocks(f *file, p vhdxParameters, at, length uint64) error {
	// After each ratio entries of blocks comes one entry of a bitmap, which only a disk with a parent uses.
	ratio := p.logicalSector << 23 / p.block
	count := (p.size + p.block - 1) / p.block
	entries := count + count/ratio
	if count > 0 && count%ratio == 0 {
		entries-- // the bitmap entry after the last blocks is not needed
	}
	if entries > length/8 {
		return refuse("its table has %d entries, but the disk %d blocks", length/8, count)
	}
	table, err := f.read("block allocation table", at, entries*8)
	if err != nil {
		return err
	}
	for i := range count {
		entry := binary.LittleEndian.Uint64(table[(i+i/ratio)*8:])
		switch state := entry & 7; {
		case state <= vhdxUnmapped: // reads as zeros
		case state != vhdxFullyPresent:
			return refuse("a block has the state %d", state)
		default:
			at := entry >> 20 << 20
			if at == 0 || at > f.size {
				return refuse("a block lies outside the file")
			}
			b := block{offset: i * p.block, length: min(p.block, p.size-i*p.block), at: int64(at)}
			if err := d.add(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// vhdxChecksumValid reports whether the CRC-32C at bytes 4 to 7 of a structure is that of its other bytes.
func vhdxChecksumValid(b []byte) bool {
	table := crc32.MakeTable(crc32.Castagnoli)
	sum := crc32.Update(0, table, b[:4])
	sum = crc32.Update(sum, table, make([]byte, 4))
	sum = crc32.Update(sum, table, b[8:])
	return sum == binary.LittleEndian.Uint32(b[4:])
}

// guid returns the GUID at the start of b, whose first three fields are little endian.
func guid(b []byte) uuid.UUID {
	var id uuid.UUID
	binary.BigEndian.PutUint32(id[0:], binary.LittleEndian.Uint32(b[0:]))
	binary.BigEndian.PutUint16(id[4:], binary.LittleEndian.Uint16(b[4:]))
	binary.BigEndian.PutUint16(id[6:], binary.LittleEndian.Uint16(b[6:]))
	copy(id[8:], b[8:16])
	return id
}
