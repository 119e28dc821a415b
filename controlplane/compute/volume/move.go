package volume

import (
	"context"
	"hash/fnv"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// PlaceEvery is the interval at which PlaceRBD runs.
const PlaceEvery = time.Second

// maxPlaced is the maximum number of volumes that PlaceRBD places in one transaction.
const maxPlaced = 100

// HostState is a host, and whether new work can be given to it.
type HostState struct {
	Node  cloud.Node
	Ready bool
}

// rbdHosts are the hosts that can make and delete RBD images.
type rbdHosts []cloud.NodeID

// of returns the host that is to have a volume. It distributes the volumes among the hosts.
func (h rbdHosts) of(id cloud.VolumeID) cloud.NodeID {
	sum := fnv.New32a()
	sum.Write([]byte(id))
	return h[int(sum.Sum32())%len(h)]
}

func (h rbdHosts) has(id cloud.NodeID) bool {
	for _, one := range h {
		if one == id {
			return true
		}
	}
	return false
}

// move is a volume that PlaceRBD binds to another host. If the record of the volume was deleted, Gone is set, and From
// is the host that was to delete the bytes.
type move struct {
	Project cloud.ProjectID
	ID      cloud.VolumeID
	From    cloud.NodeID
	Gone    bool
}

// PlaceRBD binds volumes of the driver RBD to hosts: new ones, and detached ones whose host is not READY or does not
// serve RBD any more. The new host then makes, grows or deletes the image. The images are in the Ceph cluster, and both
// hosts may do this at the same time. A volume that a VM has, or that is not flushed, keeps its host.
//
// Package leader runs PlaceRBD on the leader.
func (s *Service) PlaceRBD(ctx context.Context, fleet []HostState) error {
	var hosts rbdHosts
	for _, h := range fleet {
		if h.Ready && h.Node.RBD {
			hosts = append(hosts, h.Node.ID)
		}
	}
	if len(hosts) == 0 {
		return nil
	}
	var moves []move
	if err := s.store.Local(func(v *store.View) (err error) {
		moves, err = misplaced(v, hosts)
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

// misplaced returns up to maxPlaced volumes of the driver RBD that are not bound to one of hosts and may move.
func misplaced(r store.Reader, hosts rbdHosts) (moves []move, err error) {
	all, _, err := Volumes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, one := range all {
		v := *one.Value
		if !hosts.has(v.Node) && v.Move(hosts[0]) {
			moves = append(moves, move{Project: v.Project, ID: v.ID, From: one.Value.Node})
		}
	}
	bound, _, err := node.BoundVolumes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, b := range bound {
		if on := cloud.NodeID(b.Path[0]); b.Value.Gone && b.Value.Class != "" && !hosts.has(on) {
			moves = append(moves, move{Project: b.Value.Project, ID: cloud.VolumeID(b.Path[1]), From: on, Gone: true})
		}
	}
	return moves[:min(len(moves), maxPlaced)], nil
}

// apply binds the volume to the host to, unless the volume has changed since misplaced has read it.
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

// unbind deletes the Bound record of a volume that moves to another host. The former host forgets the volume. The
// parameter from is empty if the volume had no host.
func unbind(tx *store.Tx, from cloud.NodeID, id cloud.VolumeID) {
	if from != "" {
		node.BoundVolumes.Delete(tx, string(from), string(id))
	}
}
