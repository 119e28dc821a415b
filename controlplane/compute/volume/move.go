package volume

import (
	"context"
	"crypto/sha256"
	"fmt"
	"hash/fnv"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// PlaceEvery is the interval at which Place runs.
const PlaceEvery = time.Second

// maxPlaced is the maximum number of volumes that Place binds in one transaction.
const maxPlaced = 100

// HostState is the record of a host and its state. Ready is true if the state of the host is READY.
type HostState struct {
	Node  cloud.Node
	Ready bool
	// Awaited is true if the host may be READY, but has sent no heartbeat to the present leader yet.
	Awaited bool
}

// candidates are the hosts that can have volumes of one kind of storage: a shared pool, or the driver RBD.
type candidates struct {
	ready []cloud.NodeID // the READY hosts, to which volumes can be moved: see fleet.candidates
	keep  []cloud.NodeID // the READY and the awaited hosts (see HostState), whose volumes are not moved
}

// choose returns the host for the volume with this ID. It chooses by a hash of the ID, which distributes volumes
// evenly.
func (c *candidates) choose(id cloud.VolumeID) cloud.NodeID {
	sum := fnv.New32a()
	sum.Write([]byte(id))
	return c.ready[int(sum.Sum32())%len(c.ready)]
}

// kind is a kind of storage: a shared pool, or the driver RBD if space is empty. Encrypted is true for encrypted
// volumes of the driver RBD.
type kind struct {
	space
	encrypted bool
}

// fleet has all hosts, and the candidates for each kind of storage.
type fleet struct {
	hosts []HostState
	cache map[kind]*candidates
}

// candidates returns the candidates for volumes of one kind of storage. Hosts whose agents cannot migrate volumes are
// candidates for a move only if there are no others.
func (f *fleet) candidates(at kind) *candidates {
	if c := f.cache[at]; c != nil {
		return c
	}
	c := &candidates{}
	var old []cloud.NodeID
	for _, h := range f.hosts {
		serves := h.Node.RBDShortage(at.encrypted) == ""
		if at.ID != "" {
			serves = h.Node.LacksSharedPool(at.Name, at.ID) == ""
		}
		switch {
		case !serves || !h.Ready:
		case h.Node.MissingFeature([]string{cloud.FeatureVolumeMigration}) != "":
			old = append(old, h.Node.ID)
		default:
			c.ready = append(c.ready, h.Node.ID)
		}
		if serves && (h.Ready || h.Awaited) {
			c.keep = append(c.keep, h.Node.ID)
		}
	}
	if len(c.ready) == 0 {
		c.ready = old
	}
	f.cache[at] = c
	return c
}

// move is a change of the host of one volume by Place. From is the former host, or empty if the volume has none yet. If
// Gone is true, the record of the volume was deleted, and From is the host that should have deleted the bytes.
type move struct {
	Project  cloud.ProjectID
	ID       cloud.VolumeID
	From, To cloud.NodeID
	Gone     bool
}

// Place binds volumes that several hosts can use to hosts that are READY. It binds new volumes of the driver RBD, and
// moves those detached volumes of the driver RBD and of shared pools whose host is not READY or no longer serves their
// storage. Deleted volumes whose bytes still exist are moved too. The new host then makes, enlarges or deletes the file
// or RBD image. The former host may still be working on the same file or image. This is safe: a host changes a shared
// pool only while it has locked the pool, and changes an RBD volume only if no other host has changed the volume's
// record in the meantime. A volume that is attached to a VM, or is not flushed, keeps its host until the host is
// removed from the cluster. So does a volume on an awaited host: otherwise each change of the leader would move all
// volumes to the first host that sends a heartbeat.
//
// Place also adopts volumes that were bound to a host before the host reported their pool as shared.
//
// Package leader runs Place on the leader. hosts has all hosts. Place reads the records of the volumes only if one of
// these records, or a property of a host that fleet.key contains, has changed since the last call.
func (s *Service) Place(ctx context.Context, hosts []HostState) error {
	f := &fleet{hosts, map[kind]*candidates{}}
	var due *duePlacement
	err := s.store.Local(func(v *store.View) (err error) {
		due, err = s.placements.Get(v, f.key(), func(v *store.View) (*duePlacement, error) { return f.due(v) })
		return err
	})
	if err != nil || len(due.moves)+len(due.adoptions) == 0 {
		return err
	}
	_, err = s.store.Update(ctx, func(tx *store.Tx) error {
		for _, m := range due.moves {
			if err := m.apply(tx); err != nil {
				return err
			}
		}
		for _, a := range due.adoptions {
			if err := a.apply(tx); err != nil {
				return err
			}
		}
		return nil
	})
	return err
}

// duePlacement lists the changes that Place has to make.
type duePlacement struct {
	moves     []move
	adoptions []adoption
}

// due returns the changes that Place has to make. It reads the records of all volumes.
func (f *fleet) due(r store.Reader) (*duePlacement, error) {
	moves, err := misplaced(r, f)
	if err != nil {
		return nil, err
	}
	adopted, err := adoptions(r, f.hosts)
	if err != nil {
		return nil, err
	}
	return &duePlacement{moves, adopted}, nil
}

// key returns a hash of the properties of the hosts on which the result of due depends.
func (f *fleet) key() (key store.MemoKey) {
	sum := sha256.New()
	for _, h := range f.hosts {
		fmt.Fprintf(sum, "%q %t %t %t %t %q %q\n", h.Node.ID, h.Ready, h.Awaited, h.Node.RBD, h.Node.RBDEncryption, fmt.Sprint(h.Node.StoragePools),
			h.Node.MissingFeature([]string{cloud.FeatureVolumeMigration}))
	}
	sum.Sum(key[:0])
	return key
}

// misplaced returns moves for up to maxPlaced volumes that are not bound to one of their candidates and can move.
func misplaced(r store.Reader, f *fleet) (moves []move, err error) {
	add := func(at kind, m move) {
		c := f.candidates(at)
		if len(c.ready) > 0 && !slices.Contains(c.keep, m.From) {
			m.To = c.choose(m.ID)
			moves = append(moves, m)
		}
	}
	all, _, err := Volumes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, one := range all {
		v := *one.Value
		if v.Move("any other host") {
			add(kind{space{v.Pool, v.PoolID}, v.Driver == cloud.DriverRBD && v.Encrypted}, move{Project: v.Project, ID: v.ID, From: one.Value.Node})
		}
	}
	bound, _, err := node.BoundVolumes.List(r, 0)
	if err != nil {
		return nil, err
	}
	for _, b := range bound {
		if b.Value.Gone && (b.Value.Class != "" || b.Value.PoolID != "") {
			m := move{Project: b.Value.Project, ID: cloud.VolumeID(b.Path[1]), From: cloud.NodeID(b.Path[0]), Gone: true}
			add(kind{space: space{b.Value.Pool, b.Value.PoolID}}, m)
		}
	}
	return moves[:min(len(moves), maxPlaced)], nil
}

// apply binds the volume of m to the host m.To. It does nothing if the volume is no longer bound to m.From or can no
// longer move.
func (m move) apply(tx *store.Tx) error {
	if m.Gone {
		b, err := node.BoundVolumes.Get(tx, string(m.From), string(m.ID))
		if err != nil || b == nil {
			return err
		}
		node.BoundVolumes.Delete(tx, string(m.From), string(m.ID))
		node.BoundVolumes.Put(tx, b, string(m.To), string(m.ID))
		return nil
	}
	v, err := Volumes.Get(tx, string(m.Project), string(m.ID))
	if err != nil || v == nil || v.Node != m.From {
		return err
	}
	generation := v.Generation
	if v.Move(m.To) {
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
