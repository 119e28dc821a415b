package cloud

import (
	"regexp"
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

// SharedWith is the metadata key whose value lists the orgs that may read a SHARED image, separated by commas.
const SharedWith = "trivet/shared-with"

// ImageReason is the metadata key whose value is the reason why an image is in the status ERROR.
const ImageReason = "trivet/error"

// SourceSHA256 is the metadata key whose value is the expected SHA-256 of an image's bytes, as 64 hexadecimal digits.
// If the bytes have another checksum, the image becomes ERROR.
const SourceSHA256 = "trivet/source-sha256"

// SourceSHA512 is like SourceSHA256 for the SHA-512, as 128 hexadecimal digits.
const SourceSHA512 = "trivet/source-sha512"

// ImageUpload describes the upload session of an image whose content a client sends in parts.
type ImageUpload struct {
	// ID is the session's ID.
	ID string
	// ExpiresAt is the time at which the session expires unless it was completed before.
	ExpiresAt Time
	// CompletedAt is the time at which the client completed the session; 0 before. Importer then joins the parts.
	CompletedAt Time `cbor:",omitempty"`
	// Parts is the number of parts, and Size their total size in bytes. Both are set when the session is completed.
	Parts uint32 `cbor:",omitempty"`
	Size  uint64 `cbor:",omitempty"`
}

// Image is the record of a disk, kernel or initrd image. Its content is a file on each member in Holders. The name of
// the file is the image's SHA-256.
type Image struct {
	ID   ImageID
	Name string
	Org  OrgID
	// Project is the project whose quota the image counts in: the project of the call that created it. It is empty if
	// the call had none.
	Project    ProjectID `cbor:",omitempty"`
	Visibility Visibility
	Format     ImageFormat
	SizeBytes  uint64
	// VirtualSize is the size of the disk as a guest sees it, in bytes.
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
	// CountedMiB is the size with which the image counts in the project's quota of image bytes, in MiB.
	CountedMiB uint64 `cbor:",omitempty"`
	// Holders are the IDs of the members that store the content and have verified its checksum.
	Holders []uint64
	// Importer is the ID of the member that copies Source, or joins the parts of Upload, while the image is PENDING.
	Importer uint64
	Source   string
	// Upload is the upload session of an image that is uploaded in parts; nil for an imported image.
	Upload *ImageUpload `cbor:",omitempty"`
	// Users is the number of VMs whose spec names this image. An image in use cannot be deleted.
	Users int
}

// VisibleTo reports whether callers with a role in org may read the image.
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

// Uploading reports whether the image has an upload session that takes parts.
func (i *Image) Uploading() bool {
	return i.Status == ImagePending && i.Upload != nil && i.Upload.CompletedAt == 0
}

// Checksum returns the image's SHA-256 in the form of the wire contract, "sha256:<hex>". It returns "" if the SHA-256
// is not known yet.
func (i *Image) Checksum() string {
	if i.SHA256 == "" {
		return ""
	}
	return "sha256:" + i.SHA256
}

// Check returns an InvalidArgument fault if a field that a caller may set is invalid.
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
	if sum, ok := i.Metadata[SourceSHA256]; ok && sum != "" && !hexSHA256.MatchString(sum) {
		return fault.Invalid("metadata", "%s must be 64 hexadecimal digits", SourceSHA256)
	}
	if sum, ok := i.Metadata[SourceSHA512]; ok && sum != "" && !hexSHA512.MatchString(sum) {
		return fault.Invalid("metadata", "%s must be 128 hexadecimal digits", SourceSHA512)
	}
	return CheckPairs("metadata", i.Metadata)
}

var (
	hexSHA256 = regexp.MustCompile(`^[0-9a-fA-F]{64}$`)
	hexSHA512 = regexp.MustCompile(`^[0-9a-fA-F]{128}$`)
)
