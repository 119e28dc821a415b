package qcow2

import "bytes"

// Magic is the first four bytes of every QCOW2 file.
const Magic = "QFI\xfb"

// IsQCOW2 reports whether first begins with the QCOW2 magic.
func IsQCOW2(first []byte) bool { return bytes.HasPrefix(first, []byte(Magic)) }

// Format is the format of a disk image file. Detect recognizes it by the first bytes of the file.
type Format string

// Formats that [Detect] recognizes. A file in any other format is Raw, because a raw disk has no magic number.
const (
	Raw       Format = "raw"
	QCOW2     Format = "qcow2"
	QED       Format = "qed"
	VMDK      Format = "vmdk"
	VHD       Format = "vhd"
	VHDX      Format = "vhdx"
	VDI       Format = "vdi"
	LUKS      Format = "luks"
	Parallels Format = "parallels"
	Gzip      Format = "gzip"
	XZ        Format = "xz"
	Zstandard Format = "zstd"
)

// DetectLength is the number of bytes at the beginning of a file that [Detect] checks.
const DetectLength = 512

var signatures = []struct {
	at     int
	magic  string
	format Format
}{
	{0, Magic, QCOW2},
	{0, "QED\x00", QED},
	{0, "KDMV", VMDK},
	{0, "COWD", VMDK},
	{0, "# Disk DescriptorFile", VMDK},
	{0, "conectix", VHD}, // a dynamic or differencing VHD; a fixed one has only a footer and is detected as Raw
	{0, "vhdxfile", VHDX},
	{64, "\x7f\x10\xda\xbe", VDI},
	{0, "LUKS\xba\xbe", LUKS},
	{0, "WithoutFreeSpace", Parallels},
	{0, "WithouFreSpacExt", Parallels},
	{0, "\x1f\x8b\x08", Gzip},
	{0, "\xfd7zXZ\x00", XZ},
	{0, "\x28\xb5\x2f\xfd", Zstandard},
}

// Detect returns the format of a file. first must contain the first DetectLength bytes of the file, or all bytes of a
// shorter file. Use Detect only to report that a file declared as RAW has another format. Trivet never opens a file in
// a format that was detected.
func Detect(first []byte) Format {
	for _, m := range signatures {
		if len(first) >= m.at && bytes.HasPrefix(first[m.at:], []byte(m.magic)) {
			return m.format
		}
	}
	return Raw
}
