package volume

import (
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Placement is the requirements of a VM's volumes on the host of the VM.
type Placement struct {
	// Node is the host that has the volumes, or empty if they are not bound to a host yet.
	Node cloud.NodeID
	// Pools is the size in GiB, by pool, of those volumes that are not bound to a host yet.
	Pools map[string]uint64
	// Encrypted has the pools of the encrypted volumes that are not bound to a host yet.
	Encrypted []string
	// RBD is true if one of the volumes has the driver RBD. The VM can then be on any host that serves RBD volumes.
	RBD bool
}

// Shortage returns a text that says why a VM with these volumes cannot be placed on the host n. It returns "" if the VM
// can be placed there.
func (p *Placement) Shortage(n *cloud.Node) string {
	if p.Node != "" && p.Node != n.ID {
		return "does not have the VM's volumes"
	}
	if p.RBD {
		if why := n.RBDShortage(); why != "" {
			return why
		}
	}
	for _, pool := range p.Encrypted {
		if why := n.LacksEncryption(pool); why != "" {
			return why
		}
	}
	for pool, gib := range p.Pools {
		if why := n.PoolShortage(pool, gib); why != "" {
			return why
		}
	}
	return ""
}

// PlacementOf returns the requirements of the listed volumes of the tenant t on the host of a VM. It returns NotFound
// if a volume does not exist, and FailedPrecondition if two volumes are on different hosts.
func PlacementOf(r store.Reader, t cloud.Tenant, ids []cloud.VolumeID) (p Placement, err error) {
	var first *cloud.Volume
	for _, id := range ids {
		v, err := Lookup(r, t, id)
		switch {
		case err != nil:
			return p, err
		case v.Driver == cloud.DriverRBD:
			p.RBD = true
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
	return p, nil
}

// Attach attaches a volume of the tenant t to a VM on a host, as the disk with the given ID. The first attachment of a
// volume of the driver MANAGED binds the volume to the host. Each attachment of a volume of the driver RBD moves the
// volume to the host.
//
// Attach returns NotFound if the volume does not exist. It returns FailedPrecondition if a VM has the volume or the
// last attachment is not flushed. For the driver MANAGED it also returns FailedPrecondition if the volume is bound to
// another host or the host's pool has too little space, and for the driver RBD if the host does not serve RBD volumes.
func Attach(tx *store.Tx, t cloud.Tenant, id cloud.VolumeID, vm cloud.VMID, disk string, host cloud.NodeID) error {
	v, err := Lookup(tx, t, id)
	if err != nil {
		return err
	}
	generation, bound := v.Generation, v.Node
	if err := v.Attach(vm, disk, host); err != nil {
		return err
	}
	switch {
	case v.Driver == cloud.DriverRBD:
		if err := checkServesRBD(tx, v, host); err != nil {
			return err
		}
		if bound != host {
			unbind(tx, bound, v.ID)
		}
	case bound == "":
		if err := allocate(tx, v, host, v.SizeGiB, fault.FailedPrecondition); err != nil {
			return err
		}
	}
	save(tx, v, generation)
	return nil
}

// checkServesRBD returns FailedPrecondition if a host does not serve RBD volumes. The volume v is named in the error.
func checkServesRBD(r store.Reader, v *cloud.Volume, host cloud.NodeID) error {
	n, err := node.Nodes.Get(r, string(host))
	if err != nil {
		return err
	}
	if n == nil {
		return fault.New(fault.FailedPrecondition, "the host of the VM is no longer in the cluster")
	}
	if why := n.RBDShortage(); why != "" {
		return fault.New(fault.FailedPrecondition, "host %s cannot have volume %s: it %s", n.Name, v.Name, why).WithReason("NO_RBD")
	}
	return nil
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
// returns the volume's space to the host's pool. For a volume of the driver RBD, it instead ends the use of the storage
// class, which can then be deleted.
func releaseBytes(tx *store.Tx, host cloud.NodeID, id cloud.VolumeID, b *node.Bound) error {
	node.BoundVolumes.Delete(tx, string(host), string(id))
	if b.Class != "" {
		storageclass.Release(tx, b.Class, id)
		return nil
	}
	n, err := node.Nodes.Get(tx, string(host))
	if err != nil || n == nil {
		return err
	}
	n.AllocatePool(b.Pool, -int64(b.HeldGiB))
	node.Nodes.Put(tx, n, string(host))
	return nil
}
