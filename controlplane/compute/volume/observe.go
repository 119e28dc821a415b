package volume

import (
	"context"
	"strings"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

var _ node.VolumeController = (*Service)(nil)

// AssignedVolumes implements node.VolumeController.
func (s *Service) AssignedVolumes(v *store.View, on cloud.NodeID, ids ...cloud.VolumeID) (out []*agentv1.AssignedVolume, err error) {
	if len(ids) == 0 {
		all, _, err := node.BoundVolumes.List(v, 0, string(on))
		if err != nil {
			return nil, err
		}
		for _, r := range all {
			ids = append(ids, cloud.VolumeID(r.Path[1]))
		}
	}
	for _, id := range ids {
		b, err := node.BoundVolumes.Get(v, string(on), string(id))
		if err != nil {
			return nil, err
		}
		if b == nil {
			continue
		}
		if b.Gone {
			gone := &agentv1.AssignedVolume{
				VolumeId: string(id), Generation: b.Generation, Pool: b.Pool, Deleted: true, ExternalImage: b.External,
			}
			if gone.Rbd, err = s.rbdPool(v, b.Class); err != nil {
				return nil, err
			}
			out = append(out, gone)
			continue
		}
		record, err := Volumes.Get(v, string(b.Project), string(id))
		if err != nil {
			return nil, err
		}
		if record != nil && (record.Node == on || record.Other == on) {
			assigned := convert.AssignedVolume(record, on)
			if assigned.Rbd, err = s.rbdPool(v, b.Class); err != nil {
				return nil, err
			}
			if assigned.EncryptionKey, err = s.keys.keyFor(v, record); err != nil {
				// Without the key the host does not open the volume. The host still receives the rest of the desired
				// state.
				s.log.Error("cannot read the key of an encrypted volume", "volume", id, "err", err)
			}
			if err := assignSnapshots(v, record, on, assigned); err != nil {
				return nil, err
			}
			out = append(out, assigned)
		}
	}
	return out, nil
}

// assignSnapshots adds the snapshots of a volume to its desired state on the host on. Only the host Node of the volume
// makes and deletes snapshots.
func assignSnapshots(r store.Reader, record *cloud.Volume, on cloud.NodeID, out *agentv1.AssignedVolume) error {
	if record.Node != on {
		return nil
	}
	snapshots, err := SnapshotsOf(r, record)
	for _, s := range snapshots {
		out.Snapshots = append(out.Snapshots, convert.AssignedSnapshot(s))
	}
	return err
}

// rbdPool returns the Ceph pool of a storage class, including the key of the Ceph user in plain text. It returns nil if
// class is empty. If the key cannot be opened, rbdPool logs that and returns the pool without the key: the host keeps
// the volumes of the class closed, and receives everything else.
func (s *Service) rbdPool(r store.Reader, class string) (*agentv1.RbdPool, error) {
	if class == "" {
		return nil, nil
	}
	pool, err := storageclass.RBDPool(r, s.keys.cluster, class)
	if pool != nil && err != nil {
		s.log.Error("cannot read the key of the Ceph user of a storage class", "class", class, "err", err)
		err = nil
	}
	return pool, err
}

// VolumesUseImage implements node.VolumeController. An empty checksum matches no image.
func (s *Service) VolumesUseImage(v *store.View, on cloud.NodeID, sha256 string) (bool, error) {
	all, _, err := node.BoundVolumes.List(v, 0, string(on))
	if err != nil || sha256 == "" {
		return false, err
	}
	for _, r := range all {
		if r.Value.Gone {
			continue
		}
		record, err := Volumes.Get(v, string(r.Value.Project), r.Path[1])
		if err != nil {
			return false, err
		}
		if record != nil && record.Image != nil && record.Image.SHA256 == sha256 {
			return true, nil
		}
	}
	return false, nil
}

// ObservedVolumes implements node.VolumeController. Most reports change no record. ObservedVolumes compares the reports
// with this member's records first, and begins a transaction only for those that change one.
func (s *Service) ObservedVolumes(ctx context.Context, on cloud.NodeID, reports []cloud.VolumeObservation) (changed int, err error) {
	var changes []cloud.VolumeObservation
	err = s.store.Local(func(v *store.View) error {
		for _, o := range reports {
			changed, err := applyReport(v, nil, on, o)
			if err != nil {
				return err
			}
			if changed {
				changes = append(changes, o)
			}
		}
		return nil
	})
	if err != nil || len(changes) == 0 {
		return 0, err
	}
	_, err = s.store.Update(ctx, func(tx *store.Tx) error {
		for _, o := range changes {
			if _, err := applyReport(tx, tx, on, o); err != nil {
				return err
			}
		}
		return nil
	})
	return len(changes), err
}

// isDeleted reports whether a host has deleted the bytes of a volume whose record was deleted. A host that cannot look
// into the pool, for example because it does not reach the Ceph cluster, reports an error, and the volume as absent.
func isDeleted(b *node.Bound, o cloud.VolumeObservation) bool {
	switch {
	case o.Present:
		return false
	case o.Error != "" && !mutant.On(mutant.ForgetUnseenBytes):
		return false
	}
	return o.Generation >= b.Generation || mutant.On(mutant.ForgetBytesEarly)
}

// maxLastError is the maximum size in bytes of an error text that a host can write into a record.
const maxLastError = 1 << 10

// applyReport applies a host's report about one volume to the volume's records, and returns whether the report changes
// a record. If tx is nil, applyReport writes nothing. It ignores a report about a volume that is not bound to the host.
func applyReport(r store.Reader, tx *store.Tx, on cloud.NodeID, o cloud.VolumeObservation) (changed bool, err error) {
	if cloud.CheckUUID("volume_id", string(o.Volume)) != nil {
		return false, nil
	}
	b, err := node.BoundVolumes.Get(r, string(on), string(o.Volume))
	if err != nil || b == nil {
		return false, err
	}
	if b.Gone {
		if !isDeleted(b, o) {
			return false, nil
		}
		if tx == nil {
			return true, nil
		}
		return true, releaseBytes(tx, on, o.Volume, b)
	}
	v, err := Volumes.Get(r, string(b.Project), string(o.Volume))
	if err != nil || v == nil || v.Node != on {
		return false, err
	}
	o.Error = strings.ToValidUTF8(o.Error[:min(len(o.Error), maxLastError)], "")
	generation := v.Generation
	if changed = observe(tx, v, o); changed && tx != nil {
		save(tx, v, generation)
	}
	for _, one := range o.Snapshots {
		also, err := applySnapshotReport(r, tx, v, o.Generation, one)
		if err != nil {
			return false, err
		}
		changed = changed || also
	}
	return changed, nil
}
