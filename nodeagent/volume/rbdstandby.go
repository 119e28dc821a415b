package volume

import (
	"context"
	"fmt"
	"slices"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// standby is the attachment of the target of a migration before it is activated, with the addresses of the target's
// process.
type standby struct {
	Attachment Attachment `json:"attachment"`
	Clients    []string   `json:"clients,omitempty"`
}

// OpenStandby returns the image of a volume for the target of a migration of the VM that has the volume open. The process
// that opens the image must not write before Activate. Before OpenStandby returns, it writes the attachment to the record
// in the cluster, and makes the cluster refuse the requests of the processes of earlier targets. The error wraps
// [ErrStale] if the VM does not have the volume, or had it with a later generation, [ErrRefused] if the record has no
// address of the source's process, because an older agent started it, and [ErrInUse] if a client has the image open whose
// address is not in the record. For a registered image, the latter error also wraps [ErrForeignClient].
func (p *RBDPool) OpenStandby(ctx context.Context, id string, a Attachment) (files Files, err error) {
	err = p.changeExisting(ctx, "open for a migration", id, func(r record, text []byte) error {
		if err := r.admitStandby(a); err != nil {
			return err
		}
		if len(r.Clients) == 0 {
			return fmt.Errorf("%w: an older agent started the VM, and did not record the address of its Ceph client: stop and "+
				"start the VM once, then it can be migrated", ErrRefused)
		}
		before := r.standbyClients()
		if err := p.block(ctx, before); err != nil {
			return err
		}
		i, err := p.image(ctx, id)
		if err != nil {
			return err
		}
		if others := without(without(i.GetClients(), r.Clients), before); len(others) > 0 {
			return p.errOpen(others)
		}
		r.Standby = &standby{Attachment: a}
		files = p.files(id, r)
		_, err = p.write(ctx, id, text, r)
		return err
	})
	return files, err
}

// ConfirmStandby writes the addresses of the process that has opened the image after OpenStandby to the record, so that
// the cluster can refuse its requests. The error wraps [ErrStale] if the attachment a is not the one of the last
// OpenStandby.
func (p *RBDPool) ConfirmStandby(ctx context.Context, id string, a Attachment) error {
	return p.changeExisting(ctx, "confirm the migration", id, func(r record, text []byte) error {
		if r.Attachment == a {
			return nil
		}
		if r.Standby == nil || r.Standby.Attachment != a {
			return fmt.Errorf("%w: the migration has ended", ErrStale)
		}
		i, err := p.image(ctx, id)
		if err != nil {
			return err
		}
		r.Standby = &standby{a, without(i.GetClients(), r.Clients)}
		_, err = p.write(ctx, id, text, r)
		return err
	})
}

// Activate records that the attachment a of the last OpenStandby is the present attachment: from now on, the process may
// write, and the process on the other host of the migration may not. The error wraps [ErrStale] if the other host has
// taken the volume back. A second call does nothing.
func (p *RBDPool) Activate(ctx context.Context, id string, a Attachment) error {
	return p.changeExisting(ctx, "activate", id, func(r record, text []byte) error {
		stale := r.admit(a)
		switch {
		case mutant.On(mutant.ActivateStale):
		case stale != nil:
			return stale
		case r.Attachment == a:
			return nil
		case r.Standby == nil || r.Standby.Attachment != a:
			return fmt.Errorf("%w: the migration has ended", ErrStale)
		}
		r.Former, r.Clients = r.Clients, r.standbyClients()
		r.Attachment, r.Flushed, r.Standby = a, min(r.Flushed, a.Generation-1), nil
		r.Activated = a.Generation
		_, err := p.write(ctx, id, text, r)
		return err
	})
}

// TakeBack records that the attachment a is the present attachment of a volume that a process of this host has open with
// an earlier generation. The caller uses TakeBack after a migration to another host has failed. Before it writes the
// record, TakeBack makes the cluster refuse all requests of the target's process, also if the target is lost. For an
// image that Trivet has made, the cluster also refuses the requests of unknown clients. It does not do so for a
// registered image, because they can be clients of an administrator or of a backup. An unknown client can also be a
// process of the target that the target has not recorded. Such a process never writes, because Activate fails for it.
//
// The error wraps [ErrStale] if the volume was opened for a later attachment, and [ErrActivated] if the target has
// activated the volume. After ErrActivated, the caller must end the process of this host. A second call does nothing.
// The parameter from is the generation with which the process of this host has
// opened the volume.
func (p *RBDPool) TakeBack(ctx context.Context, id string, a Attachment, from uint64) error {
	return p.changeExisting(ctx, "take back", id, func(r record, text []byte) error {
		if err := r.admit(a); err != nil || r.Attachment == a {
			return err
		}
		if r.activatedAfter(from) {
			if err := p.block(ctx, r.Clients); err != nil {
				return err
			}
			return ErrActivated
		}
		own, others := r.Clients, r.standbyClients()
		i, err := p.image(ctx, id)
		if err != nil {
			return err
		}
		if p.registered == "" {
			others = slices.Concat(others, without(without(i.GetClients(), own), others))
		}
		if !mutant.On(mutant.TakeBackUnproven) {
			if err := p.block(ctx, others); err != nil {
				return err
			}
		}
		r.Clients, r.Former, r.Standby = own, nil, nil
		r.Attachment, r.Flushed = a, min(r.Flushed, a.Generation-1)
		_, err = p.write(ctx, id, text, r)
		return err
	})
}

// EndMigrated ends the attachments of a migration before a volume is opened with a later generation, because no host has
// the state of the guest any more. The processes of the former hosts may still have the image open. See Fence.
func (p *RBDPool) EndMigrated(ctx context.Context, id string, before uint64) error {
	r, _, err := p.read(ctx, id)
	if err != nil {
		return fmt.Errorf("end the migration of volume %s: %w", id, err)
	}
	if r.Attachment.Generation >= before || r.Flushed >= r.Attachment.Generation {
		return nil
	}
	return p.Fence(ctx, id, before-1)
}

// activatedAfter reports whether the target of a migration has activated the volume after the attachment with the
// generation from, which the source has.
func (r record) activatedAfter(from uint64) bool {
	return r.Activated > from && !mutant.On(mutant.TakeBackActivated)
}

// standbyClients returns the addresses of the process of a migration's target that has not activated the volume.
func (r record) standbyClients() []string {
	if r.Standby == nil {
		return nil
	}
	return r.Standby.Clients
}

// without returns the elements of all that are not in some.
func without(all, some []string) (out []string) {
	for _, c := range all {
		if !slices.Contains(some, c) {
			out = append(out, c)
		}
	}
	return out
}

// block makes the cluster refuse all requests of these clients for fenceSeconds.
func (p *RBDPool) block(ctx context.Context, clients []string) error {
	if len(clients) == 0 {
		return nil
	}
	_, err := p.o.Client.BlockClients(ctx, &rbdv1.BlockClientsRequest{Clients: clients, Seconds: fenceSeconds})
	return rbdError(err)
}

// files returns the image of a volume with the record r for QEMU.
func (p *RBDPool) files(id string, r record) Files {
	return Files{Size: r.Size, Encrypted: r.Encrypted, RBD: &RBDImage{
		Monitors: p.o.Monitors, Pool: p.o.Pool, Image: p.imageOf(id), User: p.o.User, Key: p.o.Key,
	}}
}

// changeExisting is like changeRecord, but the error wraps ErrNotFound if the volume has no record or is not complete.
func (p *RBDPool) changeExisting(ctx context.Context, act, id string, f func(r record, text []byte) error) error {
	err := p.change(ctx, func() error {
		r, text, err := p.read(ctx, id)
		switch {
		case err != nil:
			return err
		case r.State != ready:
			return ErrNotFound
		}
		return f(r, text)
	})
	if err != nil {
		return fmt.Errorf("%s volume %s: %w", act, id, err)
	}
	return nil
}
