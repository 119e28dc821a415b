package vdisk

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

// change modifies the bytes of a valid image so that the image must be refused.
type change struct {
	kind string
	want string
	edit func(b []byte) []byte
}

// put returns an edit that writes an integer of a size at an offset.
func put[T uint16 | uint32 | uint64](order binary.ByteOrder, at int, value T) func([]byte) []byte {
	return func(b []byte) []byte {
		if at < 0 {
			at += len(b)
		}
		_, _ = binary.Encode(b[at:], order, value)
		return b
	}
}

// replace returns an edit that replaces a text by one of the same length.
func replace(from, to string) func([]byte) []byte {
	return func(b []byte) []byte { return bytes.Replace(b, []byte(from), []byte(to), 1) }
}

// withVHDChecksums corrects the checksums of a dynamic VHD.
func withVHDChecksums(edit func([]byte) []byte) func([]byte) []byte {
	return func(b []byte) []byte {
		b = edit(b)
		footer, header := b[len(b)-512:], b[512:1536]
		binary.BigEndian.PutUint32(footer[64:], vhdChecksum(footer, 64))
		binary.BigEndian.PutUint32(header[36:], vhdChecksum(header, 36))
		return b
	}
}

var le, be = binary.LittleEndian, binary.BigEndian

// attacks lists changes of images that must be refused, each with a part of the expected reason.
var attacks = map[string]change{
	"VMDK of another version":          {"VMDK", "version 9", put(le, 4, uint32(9))},
	"VMDK of 2^63 bytes":               {"VMDK", "virtual size", put(le, 12, uint64(1)<<54)},
	"VMDK of 2^64-1 sectors":           {"VMDK", "virtual size", put(le, 12, ^uint64(0))},
	"VMDK with grains of 2^40 sectors": {"VMDK", "grains of", put(le, 20, uint64(1)<<40)},
	"VMDK with grains of 0 sectors":    {"VMDK", "grains of", put(le, 20, uint64(0))},
	"VMDK without descriptor":          {"VMDK", "several files", put(le, 28, uint64(0))},
	"VMDK, descriptor outside":         {"VMDK", "descriptor lies outside", put(le, 28, uint64(1)<<60)},
	"VMDK, huge descriptor":            {"VMDK", "above 1 MiB", put(le, 36, uint64(1)<<40)},
	"VMDK, tables of no grains":        {"VMDK", "0 grains", put(le, 44, uint32(0))},
	"VMDK, directory outside":          {"VMDK", "grain directory lies outside", put(le, 56, uint64(1)<<62)},
	"VMDK, directory at the end":       {"VMDK", "ESX", put(le, 56, ^uint64(0))},
	"VMDK, unknown compression":        {"VMDK, streamOptimized", "compression 7", put(le, 77, uint16(7))},
	"VMDK, parent":                     {"VMDK", "needs a parent", replace("parentCID=ffffffff", "parentCID=12345678")},
	"VMDK, other type":                 {"VMDK", "its type must be", replace("monolithicSparse", "monolithicFlat\"\n")},
	"VMDK, flat extent":                {"VMDK", "one extent of type SPARSE", replace("SPARSE", "FLAT  ")},
	"VMDK, two extents":                {"VMDK", "one extent of type SPARSE", replace("#DDB\n", "RW 1 SPARSE \"/etc/shadow\"\n")},
	"VMDK, all grains the same": {"VMDK", "share bytes", func(b []byte) []byte {
		return editGrains(b, func(at []uint32) { copy(at[1:], at[:len(at)-1]) })
	}},
	"VMDK, grain outside": {"VMDK", "lies outside", func(b []byte) []byte {
		return editGrains(b, func(at []uint32) { at[0] = 1 << 31 })
	}},
	"VMDK, table outside": {"VMDK", "grain table lies outside", func(b []byte) []byte {
		return put(le, int(le.Uint64(b[56:]))*512, uint32(1)<<31)(b)
	}},
	"VMDK, truncated":   {"VMDK", "outside", func(b []byte) []byte { return b[:len(b)-70000] }},
	"VMDK, header only": {"VMDK", "outside", func(b []byte) []byte { return b[:512] }},
	"VMDK, empty":       {"VMDK", "data in other files", func([]byte) []byte { return nil }},

	"VHD without footer":      {"VHD, dynamic", "no VHD footer", func(b []byte) []byte { return b[:len(b)-512] }},
	"VHD, damaged footer":     {"VHD, dynamic", "checksum of its footer", put(be, -100, uint32(9))},
	"VHD of 2^63 bytes":       {"VHD, dynamic", "virtual size", withVHDChecksums(put(be, -512+48, uint64(1)<<63))},
	"VHD of 1 byte":           {"VHD, dynamic", "virtual size", withVHDChecksums(put(be, -512+48, uint64(1)))},
	"VHD of 0 bytes":          {"VHD, dynamic", "virtual size", withVHDChecksums(put(be, -512+48, uint64(0)))},
	"VHD, parent":             {"VHD, dynamic", "needs a parent", withVHDChecksums(put(be, -512+60, uint32(4)))},
	"VHD, unknown type":       {"VHD, dynamic", "type 9", withVHDChecksums(put(be, -512+60, uint32(9)))},
	"VHD, header outside":     {"VHD, dynamic", "header lies outside", withVHDChecksums(put(be, -512+16, uint64(1)<<62))},
	"VHD, damaged header":     {"VHD, dynamic", "checksum of its header", put(be, 512+40, uint32(9))},
	"VHD, blocks of 0 bytes":  {"VHD, dynamic", "blocks of 0", withVHDChecksums(put(be, 512+32, uint32(0)))},
	"VHD, table outside":      {"VHD, dynamic", "allocation table lies outside", withVHDChecksums(put(be, 512+16, uint64(1)<<62))},
	"VHD, short table":        {"VHD, dynamic", "its table has 0 entries", withVHDChecksums(put(be, 512+28, uint32(0)))},
	"VHD, block outside":      {"VHD, dynamic", "lies outside", put(be, 1536, uint32(1)<<31)},
	"VHD, blocks that share":  {"VHD, dynamic", "share bytes", func(b []byte) []byte { copy(b[1540:1544], b[1536:1540]); return b }},
	"VHD, fixed, truncated":   {"VHD, fixed", "has only", func(b []byte) []byte { return b[4096:] }},
	"VHD, neither":            {"VHD, fixed", "no VHD footer", func(b []byte) []byte { return b[:4096] }},
	"VHD, almost nothing":     {"VHD, fixed", "too short", func(b []byte) []byte { return b[:10] }},
	"VHDX, damaged headers":   {"VHDX, dynamic", "both of its headers", func(b []byte) []byte { b[64<<10+9]++; b[128<<10+9]++; return b }},
	"VHDX, damaged regions":   {"VHDX, dynamic", "region table is damaged", func(b []byte) []byte { b[192<<10+9]++; return b }},
	"VHDX, header only":       {"VHDX, dynamic", "outside the file", func(b []byte) []byte { return b[:70000] }},
	"VHDX, log":               {"VHDX, dynamic", "it was not closed", withVHDXHeaders(func(h []byte) { h[48] = 1 })},
	"VHDX, parent":            {"VHDX, dynamic", "needs a parent", editVHDXItem(0, put(le, 4, uint32(2)))},
	"VHDX, blocks of 0 bytes": {"VHDX, dynamic", "blocks of 0", editVHDXItem(0, put(le, 0, uint32(0)))},
	"VHDX of 2^63 bytes":      {"VHDX, dynamic", "virtual size", editVHDXItem(1, put(le, 0, uint64(1)<<63))},
	"VHDX of 0 bytes":         {"VHDX, dynamic", "virtual size", editVHDXItem(1, put(le, 0, uint64(0)))},
	"VHDX of 1 byte":          {"VHDX, dynamic", "virtual size", editVHDXItem(1, put(le, 0, uint64(1)))},
	"VHDX, block outside":     {"VHDX, small blocks", "lies outside", editVHDXTable(0, 1<<60|6)},
	"VHDX, block at 0":        {"VHDX, small blocks", "lies outside", editVHDXTable(0, 6)},
	"VHDX, partial block":     {"VHDX, small blocks", "the state 7", editVHDXTable(0, 7)},
}

// editGrains changes the first grain table of a VMDK, as far as grains are in the file.
func editGrains(b []byte, edit func(at []uint32)) []byte {
	table := b[le.Uint32(b[le.Uint64(b[56:])*512:])*512:]
	var at []uint32
	for le.Uint32(table[len(at)*4:]) != 0 {
		at = append(at, le.Uint32(table[len(at)*4:]))
	}
	edit(at)
	_, _ = binary.Encode(table, le, at)
	return b
}

// withVHDXHeaders changes both headers, and corrects their checksums.
func withVHDXHeaders(edit func(h []byte)) func([]byte) []byte {
	return func(b []byte) []byte {
		for _, at := range vhdxHeads {
			h := b[at : at+vhdxHeaderLength]
			edit(h)
			putVHDXChecksum(h)
		}
		return b
	}
}

// editVHDXItem changes the content of an item of the metadata.
func editVHDXItem(number int, edit func([]byte) []byte) func([]byte) []byte {
	return func(b []byte) []byte {
		metadata := b[vhdxRegion(b, vhdxRegionMetadata.String()):]
		edit(metadata[le.Uint32(metadata[32+number*32+16:]):])
		return b
	}
}

// editVHDXTable changes an entry of the block allocation table.
func editVHDXTable(number int, entry uint64) func([]byte) []byte {
	return func(b []byte) []byte { return put(le, int(vhdxRegion(b, vhdxRegionBAT.String()))+number*8, entry)(b) }
}

// vhdxRegion returns the offset of a region.
func vhdxRegion(b []byte, id string) uint64 {
	for entry := b[vhdxRegionTable+16:]; ; entry = entry[32:] {
		if guid(entry).String() == id {
			return le.Uint64(entry[16:])
		}
	}
}

// TestAttacks requires that damaged and hostile images are refused with a reason.
func TestAttacks(t *testing.T) {
	made := map[string][]byte{}
	for name, attack := range attacks {
		t.Run(name, func(t *testing.T) {
			if made[attack.kind] == nil {
				data, err := os.ReadFile(makeImage(t, attack.kind, bytes.Repeat([]byte{7}, 5<<20)))
				require.NoError(t, err)
				made[attack.kind] = data
			}
			data := attack.edit(bytes.Clone(made[attack.kind]))
			d, err := Open(bytes.NewReader(data), int64(len(data)), images[attack.kind].format, Options{MaxData: 1 << 30})
			if err == nil {
				err = d.Read(func(uint64, []byte) error { return nil })
			}
			require.ErrorIs(t, err, ErrRefused)
			require.ErrorContains(t, err, attack.want)
		})
	}
}

// putVHDXChecksum corrects the checksum of a structure of a VHDX.
func putVHDXChecksum(b []byte) {
	le.PutUint32(b[4:], 0)
	le.PutUint32(b[4:], crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)))
}
