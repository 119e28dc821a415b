package volume

import (
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// adoption records that a volume is in a shared pool. It is needed for volumes that were bound to a host before the
// host reported the pool as shared: by an earlier version of the agent, or before `shared: true` was added to the
// host's configuration. If Gone is true, the record of the volume was deleted, and its host deletes the bytes.
type adoption struct {
	Project cloud.ProjectID
	ID      cloud.VolumeID
	Node    cloud.NodeID
	PoolID  string
	Gone    bool
}

// adoptions returns adoptions for up to maxPlaced volumes whose record has no pool ID, although the volume's host
// shares the pool.
func adoptions(r store.Reader, hosts []HostState) (out []adoption, err error) {
	nodes := map[cloud.NodeID]*cloud.Node{}
	for i := range hosts {
		nodes[hosts[i].Node.ID] = &hosts[i].Node
	}
	id := func(on cloud.NodeID, pool string) string {
		if n := nodes[on]; n != nil && pool != "" {
			return n.SharedPoolID(pool)
		}
		return ""
	}
	bound, _, err := node.BoundVolumes.List(r, 0)
	for _, b := range bound {
		on := cloud.NodeID(b.Path[0])
		if pool := id(on, b.Value.Pool); pool != "" && b.Value.PoolID == "" {
			out = append(out, adoption{b.Value.Project, cloud.VolumeID(b.Path[1]), on, pool, b.Value.Gone})
		}
	}
	return out[:min(len(out), maxPlaced)], err
}

// apply writes the pool ID into the records of the volume and of its snapshots, and counts their size in the shared
// pool instead of in the pool of the host. It does nothing if the volume has changed since adoptions.
func (a adoption) apply(tx *store.Tx) error {
	b, err := node.BoundVolumes.Get(tx, string(a.Node), string(a.ID))
	if err != nil || b == nil || b.PoolID != "" || b.Gone != a.Gone {
		return err
	}
	size := b.HeldGiB
	if !a.Gone {
		v, err := Volumes.Get(tx, string(a.Project), string(a.ID))
		if err != nil || v == nil || v.Node != a.Node || v.PoolID != "" {
			return err
		}
		size = v.SizeGiB
		snapshots, err := SnapshotsOf(tx, v)
		if err != nil {
			return err
		}
		for _, s := range snapshots {
			size += s.SizeGiB
			s.PoolID = a.PoolID
			Snapshots.Put(tx, s, string(s.Project), string(s.ID))
		}
		v.PoolID = a.PoolID
		Volumes.Put(tx, v, string(v.Project), string(v.ID))
	}
	b.PoolID = a.PoolID
	node.BoundVolumes.Put(tx, b, string(a.Node), string(a.ID))
	if err := (space{Name: b.Pool}).add(tx, a.Node, -int64(size)); err != nil {
		return err
	}
	return space{b.Pool, a.PoolID}.add(tx, a.Node, int64(size))
}
