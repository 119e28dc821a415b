package volume

import (
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// RemoveHost implements node.VolumeController. The host's record must still exist, and no VM with a record may be placed
// on the host. Volumes that the host has attached are therefore those of deleted VMs. Each volume that only the host
// could use stays bound to it, as a record that can only be deleted. Place moves volumes in shared pools and RBD
// volumes.
func (s *Service) RemoveHost(tx *store.Tx, host cloud.NodeID) error {
	n, err := node.Nodes.Get(tx, string(host))
	if err != nil || n == nil {
		return err
	}
	bound, _, err := node.BoundVolumes.List(tx, 0, string(host))
	if err != nil {
		return err
	}
	for _, b := range bound {
		if b.Value.Gone {
			if b.Value.Class == "" && b.Value.PoolID == "" {
				node.BoundVolumes.Delete(tx, b.Path...)
			}
			continue
		}
		v, err := Volumes.Get(tx, string(b.Value.Project), b.Path[1])
		if err != nil {
			return err
		}
		if v == nil || v.Node != host {
			continue
		}
		generation := v.Generation
		if v.LoseHost(n.Name) {
			save(tx, v, generation)
		}
	}
	return nil
}

// requestDeletion makes the host of a deleted volume delete its bytes. The parameter held is the room in GiB that the
// volume and its snapshots take in the host's pool. If the volume is in a pool of a host that was removed from the
// cluster, nobody can delete the bytes, and requestDeletion deletes the Bound record.
func requestDeletion(tx *store.Tx, v *cloud.Volume, held uint64) error {
	if !v.Movable() {
		if has, err := node.Nodes.Has(tx, string(v.Node)); err != nil {
			return err
		} else if !has {
			node.BoundVolumes.Delete(tx, string(v.Node), string(v.ID))
			return nil
		}
	}
	node.BoundVolumes.Put(tx, &node.Bound{
		Project: v.Project, Generation: v.Generation + 1, Pool: v.Pool, PoolID: v.PoolID, Class: rbdClass(v), External: v.ExternalImage,
		Gone: true, HeldGiB: held,
	}, string(v.Node), string(v.ID))
	return nil
}
