package cloud

import (
	"regexp"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ownImage matches the names that Trivet gives to RBD images: those of volumes, and those of images from which volumes
// are cloned. Another Trivet cloud may use the same Ceph pool.
var ownImage = regexp.MustCompile(`^(volume|image)-`)

// CheckExternalImage returns an InvalidArgument fault if name cannot be the name of a registered RBD image: if it is
// not 1 to 96 characters of A-Z a-z 0-9 . _ -, or begins with a dot or like the names that Trivet gives to images. A name
// therefore contains neither / nor @, so it names no other pool and no snapshot.
func CheckExternalImage(name string) error {
	if !cephName.MatchString(name) {
		return fault.Invalid("rbd.image", "must be 1 to 96 characters of A-Z a-z 0-9 . _ - and not begin with .")
	}
	if ownImage.MatchString(name) && !mutant.On(mutant.RegisterOwnImage) {
		return fault.Invalid("rbd.image", "%s: the names of images that Trivet has made begin with volume- or image-: to register this image, rename it first", name)
	}
	return nil
}

// checkRegistered returns FailedPrecondition if the volume is a registered one whose RBD image no host has checked.
// The parameter act is the refused change, such as "attached".
func (v *Volume) checkRegistered(act string) error {
	if v.ExternalImage == "" || v.Present {
		return nil
	}
	return fault.New(fault.FailedPrecondition, "volume %s cannot be %s: no host has checked its RBD image %s yet", v.Name, act, v.ExternalImage).
		WithReason("VOLUME_NOT_CHECKED")
}
