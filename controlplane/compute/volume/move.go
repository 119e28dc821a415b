package volume

import (
	"context"
	"hash/fnv"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// PlaceEvery is the interval at which PlaceRBD runs.
const PlaceEvery = time.Second

// maxPlaced is the maximum number of volumes that PlaceRBD places in one transaction.
const maxPlaced = 100

// HostState is the record of a host and its state. Ready is true if the state of the host is READY.
type HostState struct {
	Node  cloud.Node
	Ready bool
	// Awaited is true if the host may be READY, but has sent no heartbeat to the present leader yet.
	Awaited bool
}

// rbdHosts are the hosts that can make and delete RBD images.
type rbdHosts []cloud.NodeID

// of returns the host for the volume with this ID. It chooses by a hash of the ID, which distributes volumes evenly.
func (h rbdHosts) of(id cloud.VolumeID) cloud.NodeID {
	sum := fnv.New32a()
	sum.Write([]byte(id))
	return h[int(sum.Sum32())%len(h)]
}

// move is a change of the host of one volume by PlaceRBD. From is the former host, or empty if the volume has none yet.
// If Gone is true, the record of the volume was deleted, and From is the host that should have deleted the RBD image.
type move struct {
	Project cloud.ProjectID
	ID      cloud.VolumeID
	From    cloud.NodeID
	Gone    bool
}

// PlaceRBD binds volumes of the driver RBD to hosts that are READY and serve RBD. It binds new volumes, and moves those
// detached volumes whose host is not READY or no longer serves RBD. Deleted volumes whose RBD image still exists are
// moved too. The new host then makes, enlarges or deletes the RBD image. The former host may be doing the same at the
// same time, without harm. A volume that is attached to a VM, or is not flushed, keeps its host. So does a volume on an
// awaited host: otherwise each change of the leader would move all volumes to the first host that sends a heartbeat.
//
// Package leader runs PlaceRBD on the leader. fleet has all hosts.
func (s *Service) PlaceRBD(ctx context.Context, fleet []HostState) error {
	var hosts, keep rbdHosts
	for _, h := range fleet {
		if h.Ready && h.Node.RBD {
			hosts = append(hosts, h.Node.ID)
		}
		if (h.Ready || h.Awaited) && h.Node.RBD {
			keep = append(keep, h.Node.ID)
		}
	}
	if len(hosts) == 0 {
		return nil
	}
	var moves []move
	if err := s.store.Local(func(v *store.View) (err error) {
		moves, err = misplaced(v, keep)
		return err
	}); err != nil || len(moves) == 0 {
		return err
	}
	_, err := s.store.Update(ctx, func(tx *store.Tx) error {
		for _, m := range moves {
			if err := m.apply(tx, hosts.of(m.ID)); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// misplaced returns moves for up to maxPlaced volumes of the driver RBD that are not bound to one of the hosts in keep
// and can move.
func misplaced(r store.Reader, keep rbdHosts) (moves []move, err error) {
	all, _, err := Volumes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, one := range all {
		v := *one.Value
		if !slices.Contains(keep, v.Node) && v.Move(keep[0]) {
			moves = append(moves, move{Project: v.Project, ID: v.ID, From: one.Value.Node})
		}
	}
	bound, _, err := node.BoundVolumes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, b := range bound {
		if on := cloud.NodeID(b.Path[0]); b.Value.Gone && b.Value.Class != "" && !slices.Contains(keep, on) {
			moves = append(moves, move{Project: b.Value.Project, ID: cloud.VolumeID(b.Path[1]), From: on, Gone: true})
		}
	}
	return moves[:min(len(moves), maxPlaced)], nil
}

// apply binds the volume of m to the host to. It does nothing if the volume is no longer bound to m.From or can no
// longer move.
func (m move) apply(tx *store.Tx, to cloud.NodeID) error {
	if m.Gone {
		b, err := node.BoundVolumes.Get(tx, string(m.From), string(m.ID))
		if err != nil || b == nil {
			return err
		}
		node.BoundVolumes.Delete(tx, string(m.From), string(m.ID))
		node.BoundVolumes.Put(tx, b, string(to), string(m.ID))
		return nil
	}
	v, err := Volumes.Get(tx, string(m.Project), string(m.ID))
	if err != nil || v == nil || v.Node != m.From {
		return err
	}
	generation := v.Generation
	if v.Move(to) {
		unbind(tx, m.From, v.ID)
		save(tx, v, generation)
	}
	return nil
}

// unbind deletes the Bound record of a volume that moves to another host. The host from is then told to forget the
// volume. unbind does nothing if from is empty, because the volume had no host.
func unbind(tx *store.Tx, from cloud.NodeID, id cloud.VolumeID) {
	if from != "" {
		node.BoundVolumes.Delete(tx, string(from), string(id))
	}
}
