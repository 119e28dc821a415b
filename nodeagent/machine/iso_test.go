package machine

import (
	"bytes"
	"encoding/binary"
)

// isoImage returns an ISO 9660 image with one file, HELLO.TXT. Its boot record makes a BIOS load the boot sector of 512
// bytes (El Torito, without emulation of a disk).
func isoImage(boot []byte, hello string) []byte {
	const sector = 2048
	const pvd, bootRecord, terminator, catalog, root, bootImage, file, end = 16, 17, 18, 19, 20, 21, 22, 23
	iso := make([]byte, end*sector)
	at := func(n int) []byte { return iso[n*sector : (n+1)*sector] }
	both32 := func(b []byte, v uint32) { binary.LittleEndian.PutUint32(b, v); binary.BigEndian.PutUint32(b[4:], v) }
	both16 := func(b []byte, v uint16) { binary.LittleEndian.PutUint16(b, v); binary.BigEndian.PutUint16(b[2:], v) }
	record := func(name string, extent, size uint32, flags byte) []byte {
		b := make([]byte, (33+len(name)+1)&^1)
		b[0], b[25], b[32] = byte(len(b)), flags, byte(len(name))
		both32(b[2:], extent)
		both32(b[10:], size)
		both16(b[28:], 1)
		copy(b[33:], name)
		return b
	}
	header := func(n int, kind byte) []byte {
		b := at(n)
		b[0], b[6] = kind, 1
		copy(b[1:], "CD001")
		return b
	}

	p := header(pvd, 1)
	copy(p[8:], bytes.Repeat([]byte(" "), 64))
	copy(p[40:], "TRIVET")
	both32(p[80:], end)
	both16(p[120:], 1)
	both16(p[124:], 1)
	both16(p[128:], sector)
	copy(p[156:], record("\x00", root, sector, 2))
	p[881] = 1
	b := header(bootRecord, 0)
	copy(b[7:], "EL TORITO SPECIFICATION")
	binary.LittleEndian.PutUint32(b[71:], catalog)
	header(terminator, 255)

	c := at(catalog)
	c[0], c[30], c[31] = 1, 0x55, 0xaa // a boot catalog for x86; the sum of its 16-bit words is 0
	binary.LittleEndian.PutUint16(c[28:], 0x10000-1-0xaa55)
	c[32] = 0x88 // bootable
	binary.LittleEndian.PutUint16(c[38:], 1)
	binary.LittleEndian.PutUint32(c[40:], bootImage)
	copy(at(bootImage), boot)

	copy(at(root), bytes.Join([][]byte{record("\x00", root, sector, 2), record("\x01", root, sector, 2),
		record("HELLO.TXT;1", file, uint32(len(hello)), 0)}, nil))
	copy(at(file), hello)
	return iso
}
