package cloud

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
)

type (
	Visibility  uint8
	ImageFormat uint8
	OSType      uint8
	ImageStatus uint8
)

const (
	VisibilityUnspecified Visibility = iota
	Public
	Private
	Shared
)

const (
	FormatUnspecified ImageFormat = iota
	FormatRaw
	FormatQCOW2
	FormatVMDK
	FormatVHD
)

const (
	OSUnspecified OSType = iota
	Linux
	Windows
	BSD
)

const (
	ImageUnspecified ImageStatus = iota
	ImagePending
	ImageUploading
	ImageAvailable
	ImageError
)

func (s ImageStatus) String() string {
	return [...]string{"UNSPECIFIED", "PENDING", "UPLOADING", "AVAILABLE", "ERROR"}[min(s, ImageError)]
}

// SharedWith is the metadata key that names, comma-separated, the orgs a SHARED image is shown to.
const SharedWith = "trivet/shared-with"

// ImageReason is the metadata key under which an image in ERROR says why.
const ImageReason = "trivet/error"

// Image is an image as recorded. Its bytes are files named by checksum on the members that Holders lists.
type Image struct {
	ID   ImageID
	Name string
	Org  OrgID
	// Project is whose quota it counts in: the one that its creator acted in; empty when that was none in particular.
	Project    ProjectID `cbor:",omitempty"`
	Visibility Visibility
	Format     ImageFormat
	SizeBytes  uint64
	// VirtualSize is what a guest would see, in bytes.
	VirtualSize  uint64
	SHA256       string
	OSType       OSType
	OSVersion    string
	Architecture Architecture
	MinDiskGiB   uint32
	MinMemoryMiB uint32
	Status       ImageStatus
	CreatedAt    Time
	UpdatedAt    Time
	CreatedBy    string
	Metadata     map[string]string
	// Holders are the members that hold and have verified the bytes.
	Holders []uint64
	// Importer is the member that opens Source, while PENDING.
	Importer uint64
	Source   string
	// Users counts the VMs whose spec names this image: a used image cannot be deleted.
	Users int
}

// VisibleTo reports whether members of org may read the image.
func (i *Image) VisibleTo(org OrgID) bool {
	switch i.Visibility {
	case Public:
		return true
	case Shared:
		if slices.Contains(strings.Split(i.Metadata[SharedWith], ","), string(org)) {
			return true
		}
	}
	return i.Org == org
}

// Checksum is the spec's form of the hash; empty while there is none.
func (i *Image) Checksum() string {
	if i.SHA256 == "" {
		return ""
	}
	return "sha256:" + i.SHA256
}

// Check says what is wrong with an image's description.
func (i *Image) Check() error {
	if err := CheckName("name", i.Name); err != nil {
		return err
	}
	for _, e := range []struct {
		field      string
		value, top uint8
	}{
		{"visibility", uint8(i.Visibility), uint8(Shared)}, {"format", uint8(i.Format), uint8(FormatVHD)},
		{"os_type", uint8(i.OSType), uint8(BSD)}, {"architecture", uint8(i.Architecture), uint8(AArch64)},
	} {
		if e.value > e.top {
			return fault.Invalid(e.field, "unknown value %d", e.value)
		}
	}
	if len(i.OSVersion) > 128 || strings.ContainsFunc(i.OSVersion, isControl) || !validText(i.OSVersion) {
		return fault.Invalid("os_version", "must be at most 128 printable bytes")
	}
	if i.MinDiskGiB > MaxDiskGiB {
		return fault.Invalid("min_disk_gib", "must be at most %d", MaxDiskGiB)
	}
	if uint64(i.MinMemoryMiB) > MaxMemoryMiB {
		return fault.Invalid("min_memory_mib", "must be at most %d", MaxMemoryMiB)
	}
	return CheckPairs("metadata", i.Metadata)
}
