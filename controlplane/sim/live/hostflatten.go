package live

import (
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// origin describes how a stored volume depends on the image from which it was made. It is zero for a blank volume.
type origin struct {
	// image is true while the volume needs the image, and flattened after a host has copied the image into the volume.
	image, flattened bool
	// end is the time at which the copy in progress is complete, and by is the agent process that copies.
	end time.Time
	by  *agent
}

// maxFlattenTime is the maximum time that a host needs to copy an image into a volume.
const maxFlattenTime = 40 * time.Second

// newOrigin returns the origin of a new volume with the assignment a.
func newOrigin(a *agentv1.AssignedVolume) origin { return origin{image: a.GetImage() != nil} }

// settleFlatten copies the image into a volume if the assignment a says so, and adds the result to the report o. The
// copy begins again when the agent restarts. It reports a violation if the assignment does not name the image that the
// volume still needs. The caller must hold h.mu.
func (h *host) settleFlatten(from *origin, a *agentv1.AssignedVolume, o *cloud.VolumeObservation) {
	if from.image && a.GetImage() == nil && a.GetSource() == nil {
		h.f.fail("%s is to have volume %s without an image, and the volume still needs its image", h.name, a.GetVolumeId())
	}
	if from.image && a.GetFlatten() {
		switch {
		case from.by != h.agent:
			from.by, from.end = h.agent, time.Now().Add(h.drawn(time.Millisecond, maxFlattenTime))
		case time.Now().After(from.end):
			from.image, from.flattened = false, true
			h.f.count("volumes flattened")
		default:
			o.FlattenPercent = 50
		}
	}
	if from.flattened {
		o.Flattened, o.Format = true, cloud.VolumeRaw
	}
}

// needsImage reports whether a host or common storage has a volume that still needs its image.
func (f *fleet) needsImage(v *cloud.Volume) bool {
	if c := f.commonOf(v.Pool); c != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		i := c.volumes[v.ID]
		return i != nil && i.origin.image
	}
	h := f.hostOf(v.Node)
	if h == nil {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	i := h.volumes[v.ID]
	return i != nil && i.origin.image
}
