package vm

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// CreateRequest describes a VM to create.
type CreateRequest struct {
	Name       string
	Spec       cloud.Spec
	Hypervisor cloud.Hypervisor
	Metadata   map[string]string
	Labels     map[string]string
	// Seed is set by Create from the metadata.
	Seed *Seed `cbor:",omitempty"`
}

// Created is the result of Create. Replayed means that an earlier call with the same idempotency key created the VM.
type Created struct {
	VM       cloud.VM
	Replayed bool
}

type createArgs struct {
	Tenant  cloud.Tenant
	Request CreateRequest `cbor:"Wanted"`
	// Body is the hash of the request. It is stored with the idempotency key and compared when the key is used again.
	Body [32]byte
}

// Create places a VM on a host, creates its record, and returns the VM as CREATING. body is the hash of the request.
func (s *Service) Create(ctx context.Context, t cloud.Tenant, w CreateRequest, body [32]byte) (Created, error) {
	w.Spec.NormalizeFor(w.Metadata)
	var err error
	if w.Seed, w.Metadata, err = takeSeed(w.Metadata); err != nil {
		return Created{}, err
	}
	if err := w.check(); err != nil {
		return Created{}, err
	}
	return createCommand.Call(ctx, s.opts.Commands, createArgs{t, w, body})
}

func (w *CreateRequest) check() error {
	if err := cloud.CheckName("name", w.Name); err != nil {
		return err
	}
	if w.Hypervisor != cloud.HypervisorUnspecified && w.Hypervisor != cloud.KVM {
		return fault.Invalid("hypervisor", "public VM APIs support only the KVM backend")
	}
	if err := w.Spec.Check(); err != nil {
		return err
	}
	if err := cloud.CheckPairs("metadata", w.Metadata); err != nil {
		return err
	}
	if err := cloud.CheckPairs("labels", w.Labels); err != nil {
		return err
	}
	if err := checkKeys(w.Metadata, w.Labels, nil); err != nil {
		return err
	}
	if err := checkPolicy(w.Metadata); err != nil {
		return err
	}
	if err := cloud.CheckInstanceTypeKey(w.Metadata); err != nil {
		return err
	}
	if err := checkPlacementLabels(w.Labels); err != nil {
		return err
	}
	return cloud.CheckMachine(w.Metadata, &w.Spec)
}

// checkPolicy returns InvalidArgument if the metadata has an invalid value for a key with a meaning.
func checkPolicy(metadata map[string]string) error {
	switch p := metadata[cloud.RestartPolicy]; p {
	case "", "never", "on-failure":
	default:
		return fault.Invalid("metadata", "%s must be never or on-failure, not %q", cloud.RestartPolicy, p)
	}
	switch p := metadata[cloud.MetadataTokens]; p {
	case "", "required", "optional":
	default:
		return fault.Invalid("metadata", "%s must be required or optional, not %q", cloud.MetadataTokens, p)
	}
	switch p := metadata[cloud.GuestExec]; p {
	case "", "allowed", "refused":
	default:
		return fault.Invalid("metadata", "%s must be allowed or refused, not %q", cloud.GuestExec, p)
	}
	if _, isSet := metadata[cloud.PendingResize]; isSet {
		return fault.Invalid("metadata", "%s cannot be set: it shows a resize that takes effect at the next start", cloud.PendingResize)
	}
	return cloud.CheckHighAvailability(metadata)
}

var createCommand = leader.NewCommand("vm.create", leader.Keyed, (*Service).createOnLeader)

// createOnLeader implements Create on the leader. If no host fits now, but a host that has not yet sent this leader a
// heartbeat may fit, it repeats the placement for up to heartbeatWait.
func (s *Service) createOnLeader(ctx context.Context, q createArgs) (out Created, err error) {
	id, err := uuid.NewV7()
	if err != nil {
		return out, err
	}
	err = s.untilHeartbeats(ctx, func() error {
		_, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			vm, replayed, err := store.Idempotent(tx, auth.CallerOf(ctx), store.InProject(q.Tenant.Project), "CreateVm", q.Body, func() (cloud.VM, error) {
				return s.createRecords(ctx, tx, cloud.VMID(id.String()), q)
			})
			out = Created{vm, replayed}
			return err
		})
		return err
	})
	s.placements.countRefusal(err)
	return out, err
}

// untilHeartbeats calls place until it returns something else than a retryableRefusal, for up to heartbeatWait. After
// that time it returns the error in the last retryableRefusal.
func (s *Service) untilHeartbeats(ctx context.Context, place func() error) error {
	deadline := time.NewTimer(heartbeatWait)
	defer deadline.Stop()
	for {
		err := place()
		var refusal *retryableRefusal
		if !errors.As(err, &refusal) {
			return err
		}
		select {
		case <-time.After(retryPause):
		case <-deadline.C:
			return refusal.refusal
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// heartbeatWait is how long a placement waits for the first heartbeats of hosts to a new leader. It is longer than the
// heartbeat interval.
const heartbeatWait = 7 * time.Second

// retryableRefusal wraps the error of a placement that found no host, but may find one after the next heartbeats of the
// hosts.
type retryableRefusal struct{ refusal error }

func (e *retryableRefusal) Error() string { return e.refusal.Error() }

// createRecords checks whether a VM can be created, chooses its host, and writes all its records in tx.
func (s *Service) createRecords(ctx context.Context, tx *store.Tx, id cloud.VMID, q createArgs) (vm cloud.VM, err error) {
	project := string(q.Tenant.Project)
	if err := refuseTaken(tx, project, q.Request.Name); err != nil {
		return vm, err
	}
	vm = cloud.VM{
		ID: id, Name: q.Request.Name, Org: q.Tenant.Org, Project: q.Tenant.Project, State: cloud.Creating, Spec: q.Request.Spec,
		Hypervisor: cloud.KVM, CreatedAt: tx.Now(), CreatedBy: auth.CallerOf(ctx).Name(), Metadata: q.Request.Metadata,
		Labels: q.Request.Labels, Generation: 1, Deadline: tx.Now() + cloud.CreatingTime,
	}
	images, err := resolveImages(tx, &vm, nil)
	if err != nil {
		return vm, err
	}
	volumes, err := volume.PlacementOf(tx, vm.Tenant(), vm.Spec.Volumes())
	if err != nil {
		return vm, err
	}
	if err := chargeQuota(tx, &vm, amountOf(&vm), tenant.Amount{}); err != nil {
		return vm, err
	}
	ports, err := claimNICs(tx, &vm)
	if err != nil {
		return vm, err
	}
	if err := s.place(tx, &vm, images, &volumes); err != nil {
		return vm, err
	}
	for _, d := range vm.Spec.Disks {
		if d.Volume == "" {
			continue
		}
		if err := volume.Attach(tx, vm.Tenant(), d.Volume, vm.ID, d.ID, vm.Node); err != nil {
			return vm, err
		}
	}
	for i := range ports {
		if err := network.BindNIC(tx, &ports[i], vm.Node, vm.Name); err != nil {
			return vm, err
		}
	}
	for _, i := range images {
		i.Use(tx, vm.ID)
	}
	names.Put(tx, &vm.ID, project, vm.Name)
	if q.Request.Seed != nil {
		seeds.Put(tx, q.Request.Seed, string(vm.ID))
	}
	joinGroups(tx, &vm)
	if err := s.opts.Billing.Admit(tx, &vm); err != nil {
		return vm, err
	}
	err = s.save(tx, &vm, 0)
	return vm, err
}

// resolveImages checks that the org of vm may use the VM's images. It sets the disks, kernel, initrd, CD-ROM and rescue
// disk with which the host builds the VM, and returns the images by ID. Images whose IDs are in current, which the VM
// already uses, are accepted even if its org can no longer see them.
func resolveImages(tx *store.Tx, vm *cloud.VM, current []cloud.ImageID) (map[cloud.ImageID]*image.Usable, error) {
	images := map[cloud.ImageID]*image.Usable{}
	var first *image.Usable
	for _, id := range vm.Images() {
		i, err := lookupImage(tx, vm.Org, id, slices.Contains(current, id))
		if err != nil {
			return nil, err
		}
		if i.Architecture != cloud.ArchUnspecified {
			if first == nil {
				first = i
			} else if first.Architecture != i.Architecture {
				return nil, fault.New(fault.InvalidArgument, "images %s and %s are of different architectures", first.ID, i.ID)
			}
		}
		if need := uint64(i.MinMemoryMiB); vm.Spec.Memory.SizeMiB < need {
			return nil, fault.Invalid("spec.memory.size_mib", "image %s needs %d MiB, got %d", id, need, vm.Spec.Memory.SizeMiB)
		}
		images[id] = i
	}
	for _, d := range cloud.SortByBootOrder(vm.Spec.Disks) {
		b := cloud.ResolvedDisk{ID: d.ID, SizeBytes: d.SizeGiB << 30, Bus: d.Bus, Cache: d.Cache, Volume: d.Volume}
		if i := images[d.Image]; i != nil {
			field := "spec.disks[" + d.ID + "].size_gib"
			if b.SizeBytes < i.VirtualSize {
				return nil, fault.Invalid(field, "the image is %d bytes large, the disk of %d GiB only %d", i.VirtualSize, d.SizeGiB, b.SizeBytes)
			}
			if d.SizeGiB < uint64(i.MinDiskGiB) {
				return nil, fault.Invalid(field, "image %s needs %d GiB, got %d", d.Image, i.MinDiskGiB, d.SizeGiB)
			}
			b.Image = i.Built()
		}
		vm.Disks = append(vm.Disks, b)
	}
	if k := images[vm.Spec.Boot.Kernel]; k != nil {
		vm.Kernel = k.Built()
	}
	if k := images[vm.Spec.Boot.Initrd]; k != nil {
		vm.Initrd = k.Built()
	}
	return images, resolveDrives(vm, images)
}

// resolveDrives sets the CD-ROM and the rescue disk of vm. The parameter images has the VM's images by ID.
func resolveDrives(vm *cloud.VM, images map[cloud.ImageID]*image.Usable) error {
	vm.CDROM, vm.Rescue = nil, nil
	if i := images[cloud.ImageID(vm.Metadata[cloud.CDROMKey])]; i != nil {
		if vm.CDROM = i.Built(); vm.CDROM.Format != cloud.FormatRaw {
			return fault.Invalid("metadata", "%s: image %s is not RAW, as ISO images are", cloud.CDROMKey, i.ID)
		}
	}
	if i := images[cloud.ImageID(vm.Metadata[cloud.RescueKey])]; i != nil {
		const sector = 512
		size := (i.VirtualSize + sector - 1) / sector * sector
		vm.Rescue = &cloud.ResolvedDisk{ID: cloud.RescueDisk, SizeBytes: size, Bus: cloud.BusVirtio, Cache: cloud.CacheWriteback, Image: i.Built()}
		if i.OSType == cloud.Windows { // which has no drivers for virtio
			vm.Rescue.Bus = cloud.BusSATA
		}
	}
	return nil
}

func lookupImage(tx *store.Tx, org cloud.OrgID, id cloud.ImageID, current bool) (*image.Usable, error) {
	if current {
		if i, err := image.Images.Get(tx, string(id)); err != nil {
			return nil, err
		} else if i != nil {
			return &image.Usable{Image: *i}, nil
		}
	}
	return image.Lookup(tx, org, id)
}
