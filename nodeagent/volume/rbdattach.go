package volume

import (
	"context"
	"errors"
	"fmt"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// blockSeconds is the time in seconds for which the Ceph cluster refuses all requests of a client that did not close
// the image. After this time, no request of an ended process can still arrive.
const blockSeconds = 3600

// Open returns the image of a volume, which QEMU then opens for a VM. Before Open returns, it writes the attachment to
// the record in the cluster. The error wraps [ErrStale] if the volume was opened for a later attachment, and [ErrInUse]
// if a client has the image open, or the content of the last attachment is not complete.
func (p *RBDPool) Open(ctx context.Context, id string, a Attachment) (Files, error) {
	var files Files
	err := p.change(ctx, func() (err error) {
		files, err = p.open(ctx, id, a)
		return err
	})
	if err != nil {
		return Files{}, fmt.Errorf("open volume %s: %w", id, err)
	}
	return files, nil
}

func (p *RBDPool) open(ctx context.Context, id string, a Attachment) (Files, error) {
	r, text, err := p.read(ctx, id)
	if err != nil {
		return Files{}, err
	}
	if r.State != ready {
		return Files{}, ErrNotFound
	}
	if err := r.admit(a); err != nil {
		return Files{}, err
	}
	last := r.Attachment.Generation
	if a.Generation > last && r.Flushed < last && !mutant.On(mutant.OpenUnflushedImage) {
		return Files{}, fmt.Errorf("%w: the content of attachment %d is not complete yet", ErrInUse, last)
	}
	if !mutant.On(mutant.OpenVolumeTwice) {
		if _, err := p.closed(ctx, id, nil); err != nil {
			return Files{}, err
		}
	}
	if a.Generation > last {
		r.Clients, r.Former, r.Activated = nil, nil, 0
	}
	r.Standby = nil
	r.Attachment, r.Flushed = a, min(r.Flushed, a.Generation-1)
	if !mutant.On(mutant.OpenBeforeRecord) {
		if _, err := p.write(ctx, id, text, r); err != nil {
			return Files{}, err
		}
	}
	return p.files(id, r), nil
}

// Confirm checks that the attachment a, for which a process has just opened the image of a volume, has not ended. The
// error wraps [ErrStale] if it has: then another VM may have opened the volume, and the process must not write to the
// image. Confirm also writes the address of the process to the record, for Fence.
//
// An RBD image has no lock that is held from Open on. Detach, on this host or another one, cannot see that a process
// is about to open the image, and ends the attachment. After the process has opened the image, each later Open fails
// with ErrInUse, so one check after the process has opened the image is sufficient.
func (p *RBDPool) Confirm(ctx context.Context, id string, a Attachment) error {
	if err := p.change(ctx, func() error { return p.confirm(ctx, id, a) }); err != nil {
		return fmt.Errorf("confirm the attachment of volume %s: %w", id, err)
	}
	return nil
}

func (p *RBDPool) confirm(ctx context.Context, id string, a Attachment) error {
	r, text, err := p.read(ctx, id)
	switch {
	case errors.Is(err, ErrNotFound) || err == nil && r.State != ready:
		return fmt.Errorf("%w: it does not exist any more", ErrStale)
	case err != nil:
		return err
	case mutant.On(mutant.SkipConfirm):
		return nil
	}
	if err := r.admit(a); err != nil {
		return err
	}
	if r.Attachment != a || r.Flushed >= a.Generation {
		return fmt.Errorf("%w: generation %d has ended", ErrStale, a.Generation)
	}
	i, err := p.image(ctx, id)
	if err != nil {
		return err
	}
	r.addClients(i.GetClients())
	_, err = p.write(ctx, id, text, r)
	return err
}

// closed waits for at most closeTimeout until no client has the image of a volume open, apart from those in the parameter
// ignored. If other clients still have the image open, closed returns their addresses and an error that wraps ErrInUse.
func (p *RBDPool) closed(ctx context.Context, id string, ignored []string) (clients []string, err error) {
	waiting, cancel := context.WithTimeout(ctx, closeTimeout)
	defer cancel()
	for {
		i, err := p.image(ctx, id)
		if err != nil {
			return nil, err
		}
		clients := without(i.GetClients(), ignored)
		if len(clients) == 0 {
			return nil, nil
		}
		if sleep(waiting, 10*lockPause) != nil {
			return clients, p.errOpen(clients)
		}
	}
}

// Release records that the content of a volume is complete up to the generation of a. The process that had the volume
// open must have ended or have closed the image. For a while, the Ceph cluster still lists a killed process as a client
// of the image. Release makes the cluster refuse all requests of such a client, so that none of its writes takes effect
// later. The error wraps [ErrStale] if the volume was opened for a later attachment. A volume that does not exist is no
// error. A second call does nothing. The process of a migration's target, which has not activated the volume, may have the
// image open.
func (p *RBDPool) Release(ctx context.Context, id string, a Attachment) error {
	return p.changeRecord(ctx, "release", id, func(r record, text []byte) error { return p.release(ctx, id, a, r, text) })
}

func (p *RBDPool) release(ctx context.Context, id string, a Attachment, r record, text []byte) error {
	if r.State != ready || r.Flushed >= a.Generation && a.Generation >= r.Attachment.Generation {
		return nil
	}
	if err := r.admit(a); err != nil {
		return err
	}
	if !mutant.On(mutant.FlushOpenVolume) {
		clients, err := p.closed(ctx, id, r.standbyClients())
		if errors.Is(err, ErrInUse) {
			request := &rbdv1.BlockClientsRequest{Clients: clients, Seconds: blockSeconds}
			_, err = p.o.Client.BlockClients(ctx, request)
		}
		if err != nil {
			return rbdError(err)
		}
	}
	r.Attachment, r.Flushed = a, a.Generation
	_, err := p.write(ctx, id, text, r)
	return err
}

// Detach ends all attachments up to the given generation: the volume cannot be opened again at such a generation.
// Detach also records that the content is complete up to this generation. The error wraps [ErrInUse] if a client has
// the image open, and [ErrStale] if the volume was opened for a later attachment. A second call does nothing.
func (p *RBDPool) Detach(ctx context.Context, id string, generation uint64) error {
	return p.changeRecord(ctx, "detach", id, func(r record, text []byte) error {
		return p.detach(ctx, id, generation, r, text)
	})
}

func (p *RBDPool) detach(ctx context.Context, id string, generation uint64, r record, text []byte) error {
	switch {
	case r.State != ready || r.Detached >= generation && r.Flushed >= generation:
		return nil
	case generation < r.Attachment.Generation:
		return fmt.Errorf("%w: generation %d is older than %d", ErrStale, generation, r.Attachment.Generation)
	}
	if r.Flushed < r.Attachment.Generation && !mutant.On(mutant.FlushOpenVolume) {
		if _, err := p.closed(ctx, id, nil); err != nil {
			return err
		}
	}
	r.Detached, r.Flushed = max(r.Detached, generation), max(r.Flushed, generation)
	_, err := p.write(ctx, id, text, r)
	return err
}
