package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"
	"slices"
)

// Bits of the entries of L1 and L2 tables. An offset occupies bits 9 to 55 in both.
const (
	offsetMask     = 0x00fffffffffffe00
	l1Reserved     = 0x7f000000000001ff
	l2Reserved     = 0x3f000000000001fe // reserved bits of the entry of an uncompressed cluster; bit 0 is flagZero
	flagZero       = 1 << 0
	flagCompressed = 1 << 62
)

// chunk is the number of bytes of the L1 table that l2Tables reads at a time.
const chunk = 64 << 10

// walk reads the L1 table and all L2 tables, and returns an error if an entry points outside the file.
//
// It also returns an error if two L1 entries point to the same L2 table. Otherwise a small file could make walk read
// the same table millions of times.
func (img *image) walk(r io.ReaderAt) error {
	tables, err := img.l2Tables(r)
	if err != nil {
		return err
	}
	if uint64(len(tables))*img.cluster > maxWalk {
		return refuse("it has %d L2 tables of %d bytes, more than are examined", len(tables), img.cluster)
	}
	buf := make([]byte, img.cluster)
	for _, at := range tables {
		if _, err := r.ReadAt(buf, int64(at)); err != nil {
			return fmt.Errorf("read L2 table at %#x: %w", at, err)
		}
		if err := img.l2(buf, at); err != nil {
			return err
		}
	}
	return nil
}

// l2Tables reads the L1 table and returns the file offsets of the L2 tables, in ascending order.
func (img *image) l2Tables(r io.ReaderAt) ([]uint64, error) {
	var tables []uint64
	buf := make([]byte, chunk)
	for done := uint64(0); done < img.l1Size*8; {
		part := buf[:min(chunk, img.l1Size*8-done)]
		if _, err := r.ReadAt(part, int64(img.l1Offset+done)); err != nil {
			return nil, fmt.Errorf("read L1 table: %w", err)
		}
		for i := 0; i < len(part); i += 8 {
			entry := binary.BigEndian.Uint64(part[i:])
			n := (done + uint64(i)) / 8
			if entry&l1Reserved != 0 {
				return nil, refuse("L1 entry %d has reserved bits set", n)
			}
			at := entry & offsetMask
			if at == 0 {
				continue
			}
			if err := img.table(fmt.Sprintf("L2 table of L1 entry %d", n), at, img.cluster); err != nil {
				return nil, err
			}
			tables = append(tables, at)
		}
		done += uint64(len(part))
	}
	slices.Sort(tables)
	for i := 1; i < len(tables); i++ {
		if tables[i] == tables[i-1] {
			return nil, refuse("two L1 entries share the L2 table at %#x", tables[i])
		}
	}
	return tables, nil
}

// l2 validates one L2 table. The table was read from the given file offset, which is used in errors.
func (img *image) l2(table []byte, at uint64) error {
	step := int(img.entrySize())
	for i := 0; i < len(table); i += step {
		entry := binary.BigEndian.Uint64(table[i:])
		if entry == 0 {
			continue
		}
		where := func() string { return fmt.Sprintf("entry %d of the L2 table at %#x", i/step, at) }
		if entry&flagCompressed != 0 {
			if err := img.compressed(entry, where); err != nil {
				return err
			}
			img.info.Allocated++
			continue
		}
		if entry&l2Reserved != 0 {
			return refuse("%s has reserved bits set", where())
		}
		if entry&flagZero != 0 && (img.info.Version == 2 || img.info.ExtendedL2) {
			return refuse("%s uses the zero flag, which this kind of image does not have", where())
		}
		data := entry & offsetMask
		if data == 0 {
			continue
		}
		// The last cluster of the file may be incomplete, so only the beginning of the cluster must be inside the file.
		if data%img.cluster != 0 || data >= img.fileSize {
			return refuse("%s leads to %#x, which is not a cluster of the file", where(), data)
		}
		img.info.Allocated++
	}
	return nil
}

// compressed validates the L2 entry of a compressed cluster. The entry contains an offset, which need not be aligned,
// and a number of sectors.
func (img *image) compressed(entry uint64, where func() string) error {
	shift := 62 - (img.info.ClusterBits - 8)
	offset := entry & (1<<shift - 1)
	sectors := entry&(flagCompressed-1)>>shift + 1
	length := sectors*sector - offset%sector
	// Compressed data can end within the last sector of the file, so that sector may be incomplete.
	roof := (img.fileSize + sector - 1) / sector * sector
	if offset >= img.fileSize || length > roof-offset {
		return refuse("%s leads to compressed data at %#x, outside the file", where(), offset)
	}
	return nil
}
