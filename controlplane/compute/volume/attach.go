package volume

import (
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Placement is the requirements of a VM's volumes on the host of the VM.
type Placement struct {
	// Node is the host that has the volumes, or empty if none of them is bound to one host.
	Node cloud.NodeID
	// Pools is the size in GiB, by pool, of those volumes that are not bound to a host yet.
	Pools map[string]uint64
	// Encrypted has the pools of the encrypted volumes that are not bound to a host yet.
	Encrypted []string
	// RBD is true if one of the volumes has the driver RBD. The VM can then be on any host that serves RBD volumes.
	// EncryptedRBD is true if one of these is encrypted.
	RBD, EncryptedRBD bool
	// shared are the shared pools of the volumes that can move between the hosts of their pool.
	shared []space
	// allocated is the allocated room in GiB of each shared pool, by ID. It is read if Pools is not empty.
	allocated map[string]uint64
}

// Shortage returns a text that says why a VM with these volumes cannot be placed on the host n. It returns "" if the VM
// can be placed there.
func (p *Placement) Shortage(n *cloud.Node) string {
	if p.Node != "" && p.Node != n.ID {
		return "does not have the VM's volumes"
	}
	if p.RBD {
		if why := n.RBDShortage(p.EncryptedRBD); why != "" {
			return why
		}
	}
	for _, pool := range p.Encrypted {
		if why := n.LacksEncryption(pool); why != "" {
			return why
		}
	}
	for _, s := range p.shared {
		if why := n.LacksSharedPool(s.Name, s.ID); why != "" {
			return why
		}
	}
	for pool, gib := range p.Pools {
		used := p.allocated[n.PoolID(pool)]
		if at := (space{pool, n.SharedPoolID(pool)}); !at.shared() {
			used += n.PoolAllocated[pool]
		}
		if why := n.PoolShortage(pool, gib, used); why != "" {
			return why
		}
	}
	return ""
}

// MayMigrate reports whether a VM with the volumes can perhaps be migrated if its host can migrate volumes. For a volume
// without a host, that depends on whether the pool of its future host is shared.
func (p *Placement) MayMigrate() bool { return len(p.shared) > 0 || p.RBD || len(p.Pools) > 0 }

// PlacementOf returns the requirements of the listed volumes of the tenant t on the host of a VM. It returns NotFound
// if a volume does not exist, and FailedPrecondition if two volumes are on different hosts.
func PlacementOf(r store.Reader, t cloud.Tenant, ids []cloud.VolumeID) (p Placement, err error) {
	var first *cloud.Volume
	for _, id := range ids {
		v, err := Lookup(r, t, id)
		if err != nil {
			return p, err
		}
		stays, err := staysOnHost(r, v)
		switch {
		case err != nil:
			return p, err
		case v.Driver == cloud.DriverRBD:
			p.RBD = true
			p.EncryptedRBD = p.EncryptedRBD || v.Encrypted
		case v.PoolID != "" && !stays:
			p.shared = append(p.shared, space{v.Pool, v.PoolID})
		case v.Node == "":
			if p.Pools == nil {
				p.Pools = map[string]uint64{}
			}
			p.Pools[v.Pool] += v.SizeGiB
			if v.Encrypted {
				p.Encrypted = append(p.Encrypted, v.Pool)
			}
		case first == nil:
			first, p.Node = v, v.Node
		case v.Node != p.Node:
			return p, fault.New(fault.FailedPrecondition, "volumes %s and %s are on different hosts, %s and %s: one VM cannot have both",
				first.Name, v.Name, first.Node, v.Node).WithReason("VOLUME_ELSEWHERE")
		}
	}
	if len(p.Pools) > 0 {
		all, _, err := sharedPools.List(r, 0)
		if err != nil {
			return p, err
		}
		for _, one := range all {
			if p.allocated == nil {
				p.allocated = map[string]uint64{}
			}
			p.allocated[one.Path[0]] = one.Value.AllocatedGiB
		}
	}
	return p, nil
}

// staysOnHost reports whether a volume in a shared pool can be attached on its present host only, because it has a
// PENDING snapshot. It returns false for other volumes.
func staysOnHost(r store.Reader, v *cloud.Volume) (bool, error) {
	if v.PoolID == "" || mutant.On(mutant.MoveDuringSnapshot) {
		return false, nil
	}
	all, err := SnapshotsOf(r, v)
	return slices.ContainsFunc(all, isPending), err
}

// Attach attaches a volume of the tenant t to a VM on a host, as the disk with the given ID. The first attachment of a
// volume of the driver MANAGED binds the volume to the host. Each attachment of a Movable volume moves the volume to
// the host.
//
// Attach returns NotFound if the volume does not exist. It returns FailedPrecondition if a VM has the volume or the
// last attachment is not flushed. For the driver MANAGED it also returns FailedPrecondition if the host's pool has too
// little space, if the volume is in a shared pool that the host does not share, or if the volume is bound to another
// host and is either not in a shared pool or has a PENDING snapshot. For the driver RBD it returns FailedPrecondition
// if the host does not serve RBD volumes.
func Attach(tx *store.Tx, t cloud.Tenant, id cloud.VolumeID, vm cloud.VMID, disk string, host cloud.NodeID) error {
	v, err := Lookup(tx, t, id)
	if err != nil {
		return err
	}
	generation, bound := v.Generation, v.Node
	if err := v.Attach(vm, disk, host); err != nil {
		return err
	}
	n, err := node.Nodes.Get(tx, string(host))
	if err != nil {
		return err
	}
	if n == nil {
		return fault.New(fault.FailedPrecondition, "the host of the VM is no longer in the cluster")
	}
	switch {
	case v.Movable():
		if err := checkMove(tx, v, bound, n); err != nil {
			return err
		}
		if bound != host {
			unbind(tx, bound, v.ID)
		}
	case bound == "":
		v.PoolID = n.SharedPoolID(v.Pool)
		if err := allocate(tx, v, host, v.SizeGiB, fault.FailedPrecondition); err != nil {
			return err
		}
	}
	save(tx, v, generation)
	return nil
}

// checkMove returns FailedPrecondition if the Movable volume v, which is bound to the host from, cannot be attached on
// the host n.
func checkMove(r store.Reader, v *cloud.Volume, from cloud.NodeID, n *cloud.Node) error {
	if v.Driver == cloud.DriverRBD {
		if why := n.RBDShortage(v.Encrypted); why != "" {
			return fault.New(fault.FailedPrecondition, "host %s cannot have volume %s: it %s", n.Name, v.Name, why).WithReason("NO_RBD")
		}
		return nil
	}
	if why := n.LacksSharedPool(v.Pool, v.PoolID); why != "" {
		return fault.New(fault.FailedPrecondition, "host %s cannot have volume %s: it %s", n.Name, v.Name, why).WithReason("VOLUME_ELSEWHERE")
	}
	if from == n.ID || mutant.On(mutant.MoveDuringSnapshot) {
		return nil
	}
	return checkNoPendingSnapshot(r, v)
}

// Release detaches a volume from a VM. It does nothing if the VM does not have the volume. The caller must know that
// the VM cannot use the volume any more (see cloud.Volume.Detach).
func Release(tx *store.Tx, project cloud.ProjectID, id cloud.VolumeID, vm cloud.VMID) error {
	v, err := Volumes.Get(tx, string(project), string(id))
	if err != nil || v == nil || v.VM != vm {
		return err
	}
	generation := v.Generation
	v.Detach()
	save(tx, v, generation)
	return nil
}

// releaseBytes completes the deletion of a volume whose bytes the host has deleted. It deletes the Bound record and
// returns the volume's space to the host's pool. For a volume of the driver RBD, releaseBytes instead removes the
// volume from the volumes of its storage class, so that the class can be deleted. It also deletes the registration of a
// registered volume, so that the RBD image can be registered again.
func releaseBytes(tx *store.Tx, host cloud.NodeID, id cloud.VolumeID, b *node.Bound) error {
	node.BoundVolumes.Delete(tx, string(host), string(id))
	if b.Class != "" {
		if err := unregister(tx, b.Class, b.External); err != nil {
			return err
		}
		storageclass.Release(tx, b.Class, id)
		return nil
	}
	return space{b.Pool, b.PoolID}.add(tx, host, -int64(b.HeldGiB))
}
