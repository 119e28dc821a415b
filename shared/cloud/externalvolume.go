package cloud

import (
	"regexp"

	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ownImage matches the names that Trivet gives to RBD images of volumes and to base images. It does not depend on the
// records, because an image of this name may belong to another Trivet cloud that uses the same Ceph pool.
var ownImage = regexp.MustCompile(`^(volume|image)-`)

// CheckExternalImage returns an InvalidArgument fault unless an RBD image with this name can be registered. The name
// must have 1 to 96 characters of A-Z a-z 0-9 . _ -, and must not begin with a dot or with a prefix of Trivet's own
// images. A valid name contains neither / nor @, so it cannot select another pool or a snapshot.
func CheckExternalImage(name string) error {
	if !cephName.MatchString(name) {
		return fault.Invalid("rbd.image", "must be 1 to 96 characters of A-Z a-z 0-9 . _ - and not begin with .")
	}
	if ownImage.MatchString(name) && !mutant.On(mutant.RegisterOwnImage) {
		return fault.Invalid("rbd.image", "%s: names that begin with volume- or image- are reserved for images that Trivet makes: rename the image before you register it", name)
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
