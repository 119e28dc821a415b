package node

import (
	"context"
	"fmt"
	"slices"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Bound is a record in the store which states that a host has, or had, a volume. Its key is
// bound-volume/<node>/<volume>. Every transaction that changes the desired state of a volume also writes its Bound
// record, so a host's session needs to watch only the prefix bound-volume/<node>/.
type Bound struct {
	Project    cloud.ProjectID
	Generation uint64
	Pool       string
	// PoolID is the ID of the pool if hosts share the pool, and empty otherwise.
	PoolID string `cbor:",omitempty"`
	// Class is the storage class of a volume of the driver RBD, and empty for other volumes.
	Class string `cbor:",omitempty"`
	// External is the RBD image of a deleted volume that was registered. The host keeps this image.
	External string `cbor:",omitempty"`
	// Gone is true if the volume's record was deleted. The host then deletes the volume's bytes and reports the
	// deletion. After the report, this Bound record is deleted, and HeldGiB of the pool become free again.
	// HeldGiB has no effect for a volume of the driver RBD.
	Gone    bool
	HeldGiB uint64
}

// BoundVolumes is the table of Bound records.
var BoundVolumes = store.NewTable[Bound]("bound-volume")

// VolumeController computes the desired state of volumes and stores what hosts report of them. Package volume
// implements it.
type VolumeController interface {
	// AssignedVolumes returns the desired state of the listed volumes that are bound to a host. If the list volumes is
	// empty, it returns the desired state of all volumes that are bound to the host.
	AssignedVolumes(v *store.View, node cloud.NodeID, volumes ...cloud.VolumeID) ([]*agentv1.AssignedVolume, error)
	// ObservedVolumes stores what a host reports of its volumes. changed is the number of reports that changed a
	// record.
	ObservedVolumes(ctx context.Context, node cloud.NodeID, reports []cloud.VolumeObservation) (changed int, err error)
	// VolumesUseImage reports whether a volume that is bound to a host is made from the image with this checksum.
	VolumesUseImage(v *store.View, node cloud.NodeID, sha256 string) (bool, error)
	// ServedClasses returns the names of the storage classes that a host serves.
	ServedClasses(v store.Reader, n *cloud.Node) ([]string, error)
	// RemoveHost is called in the transaction that deletes the record of a host without VMs. It detaches the volumes of
	// VMs that were deleted and that the host did not report as destroyed, and deletes the Bound records of deleted
	// volumes whose bytes only this host could delete. Volumes that other hosts can use are moved later.
	RemoveHost(tx *store.Tx, node cloud.NodeID) error
}

// noVolumes implements VolumeController for tests without volumes.
type noVolumes struct{}

func (noVolumes) AssignedVolumes(*store.View, cloud.NodeID, ...cloud.VolumeID) ([]*agentv1.AssignedVolume, error) {
	return nil, nil
}

func (noVolumes) ObservedVolumes(context.Context, cloud.NodeID, []cloud.VolumeObservation) (int, error) {
	return 0, nil
}

func (noVolumes) VolumesUseImage(*store.View, cloud.NodeID, string) (bool, error) { return false, nil }

func (noVolumes) ServedClasses(store.Reader, *cloud.Node) ([]string, error) { return nil, nil }

func (noVolumes) RemoveHost(*store.Tx, cloud.NodeID) error { return nil }

// AttachVolumes sets the VolumeController. Call AttachVolumes before the service receives calls. Without this call,
// hosts are sent no volumes.
func (s *Service) AttachVolumes(v VolumeController) { s.volumes = v }

// volumeDelta adds the current desired state of the changed volumes to message, as delta does for VMs.
func (s *Service) volumeDelta(node cloud.NodeID, changes []store.PathChange, message *agentv1.WatchResponse) error {
	var touched []cloud.VolumeID
	for _, c := range changes {
		if id := cloud.VolumeID(c.Path[1]); !slices.Contains(touched, id) {
			touched = append(touched, id)
		}
	}
	return s.opts.Store.Local(func(v *store.View) (err error) {
		if message.Volumes, err = s.volumes.AssignedVolumes(v, node, touched...); err != nil {
			return err
		}
		for _, id := range touched {
			bound, err := BoundVolumes.Has(v, string(node), string(id))
			if err != nil {
				return err
			}
			if !bound {
				message.ReleasedVolumes = append(message.ReleasedVolumes, string(id))
			}
		}
		return nil
	})
}

// applyVolumeReports passes a host's reports about volumes to VolumeController.ObservedVolumes, like applyReports.
func (s *Service) applyVolumeReports(ctx context.Context, node cloud.NodeID, all []*agentv1.VolumeObservation) error {
	b := s.budgetOf(node)
	for chunk := range slices.Chunk(all, reportChunk) {
		reports := make([]cloud.VolumeObservation, 0, len(chunk))
		for _, o := range chunk {
			reports = append(reports, convert.VolumeObservationFrom(o))
		}
		attempt, cancel := context.WithTimeout(ctx, reportTimeout)
		changed, err := s.volumes.ObservedVolumes(attempt, node, reports)
		cancel()
		if err != nil {
			return err
		}
		if err := s.throttle(ctx, b.changes, changed); err != nil {
			return err
		}
	}
	return nil
}

// Limits on the storage pools that a host reports: their number, and the size of one in GiB. The maximum size is more
// than any host has, and small enough that sums of sizes do not overflow.
const (
	maxPools   = 64
	maxPoolGiB = 1 << 32
)

// checkPools converts the storage pools that a host reports. It returns InvalidArgument if they are not valid.
func checkPools(all []*agentv1.StoragePool) (pools []cloud.StoragePool, err error) {
	if len(all) > maxPools {
		return nil, fault.Invalid("facts.storage_pools", "at most %d", maxPools)
	}
	for i, p := range all {
		at := fmt.Sprintf("facts.storage_pools[%d].", i)
		if err := cloud.CheckName(at+"name", p.GetName()); err != nil {
			return nil, err
		}
		if slices.ContainsFunc(pools, func(have cloud.StoragePool) bool { return have.Name == p.GetName() }) {
			return nil, fault.Invalid(at+"name", "is used twice")
		}
		if p.GetAllocatableGib() > maxPoolGiB {
			return nil, fault.Invalid(at+"allocatable_gib", "at most %d", uint64(maxPoolGiB))
		}
		if id := p.GetPoolId(); id != "" {
			if err := cloud.CheckUUID(at+"pool_id", id); err != nil {
				return nil, err
			}
		}
		pools = append(pools, cloud.StoragePool{
			Name: p.GetName(), AllocatableGiB: p.GetAllocatableGib(), Encryption: p.GetEncryption(),
			ID: p.GetPoolId(), Shared: p.GetShared() && p.GetPoolId() != "",
		})
	}
	return pools, nil
}

// addClasses sets the fields StorageClasses and VolumeDrivers of a host, according to its storage pools and to whether
// it serves RBD. It changes nothing if the host has no pools and does not serve RBD.
func (s *Service) addClasses(n *cloud.Node) error {
	if len(n.StoragePools) == 0 && !n.RBD {
		return nil
	}
	n.VolumeDrivers = nil
	if len(n.StoragePools) > 0 {
		n.VolumeDrivers = append(n.VolumeDrivers, cloud.DriverManaged)
	}
	if n.RBD {
		n.VolumeDrivers = append(n.VolumeDrivers, cloud.DriverRBD)
	}
	return s.opts.Store.Local(func(v *store.View) (err error) {
		n.StorageClasses, err = s.volumes.ServedClasses(v, n)
		return err
	})
}
