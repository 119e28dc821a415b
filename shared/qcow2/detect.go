package qcow2

import "bytes"

// Magic begins every QCOW2 file.
const Magic = "QFI\xfb"

// IsQCOW2 reports whether a file that begins like this claims to be QCOW2.
func IsQCOW2(first []byte) bool { return bytes.HasPrefix(first, []byte(Magic)) }

// Format is what a file's first bytes say it is.
type Format string

// Formats that [Detect] tells apart. Raw is everything else: a raw disk has no mark.
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

// DetectLength is how many first bytes of a file [Detect] looks at.
const DetectLength = 512

var marks = []struct {
	at     int
	magic  string
	format Format
}{
	{0, Magic, QCOW2},
	{0, "QED\x00", QED},
	{0, "KDMV", VMDK},
	{0, "COWD", VMDK},
	{0, "# Disk DescriptorFile", VMDK},
	{0, "conectix", VHD}, // dynamic and differencing; a fixed VHD is a raw disk with a footer
	{0, "vhdxfile", VHDX},
	{64, "\x7f\x10\xda\xbe", VDI},
	{0, "LUKS\xba\xbe", LUKS},
	{0, "WithoutFreeSpace", Parallels},
	{0, "WithouFreSpacExt", Parallels},
	{0, "\x1f\x8b\x08", Gzip},
	{0, "\xfd7zXZ\x00", XZ},
	{0, "\x28\xb5\x2f\xfd", Zstandard},
}

// Detect says what a file is that begins with first (DetectLength bytes, or the whole of a shorter file). It is meant
// for telling an owner that what was declared RAW is something else; nothing is ever opened in a format so found.
func Detect(first []byte) Format {
	for _, m := range marks {
		if len(first) >= m.at && bytes.HasPrefix(first[m.at:], []byte(m.magic)) {
			return m.format
		}
	}
	return Raw
}
