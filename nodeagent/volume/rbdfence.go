package volume

import (
	"context"
	"errors"
	"fmt"
	"slices"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// fenceSeconds is the time in seconds for which the Ceph cluster refuses all requests of a client that Fence has
	// blocked: 7 days, the maximum of RbdService.BlockClients. A QEMU that has no connection to the cluster for longer
	// than this could write again.
	fenceSeconds = 7 * 24 * 3600
	// maxClients is the maximum length of record.Clients.
	maxClients = 16
)

// addClients adds addresses of clients to r.Clients, and removes the oldest ones above maxClients.
func (r *record) addClients(clients []string) {
	all := slices.Clone(r.Clients)
	for _, c := range clients {
		if !slices.Contains(all, c) {
			all = append(all, c)
		}
	}
	r.Clients = all[max(0, len(all)-maxClients):]
}

// Fence ends all attachments up to the given generation, like Detach, although processes of a host that was removed
// from the cluster may still have the image open. The Ceph cluster refuses all requests of these processes before Fence
// returns, for fenceSeconds. The error wraps [ErrStale] if the volume was opened for a later attachment. A volume that
// does not exist is no error. A second call does nothing.
//
// The present clients of the image are not sufficient: the Ceph cluster forgets a client that it has not heard from for
// about 30 s, and the client continues to write when its host has a network again. Therefore Fence also blocks the
// clients in the record, which Confirm has written. The record of an attachment that an older agent opened has no
// clients. Fence then blocks the present clients of the image only, so the removed host must be switched off.
func (p *RBDPool) Fence(ctx context.Context, id string, generation uint64) error {
	if err := p.change(ctx, func() error { return p.fence(ctx, id, generation) }); err != nil {
		return fmt.Errorf("fence volume %s: %w", id, err)
	}
	return nil
}

func (p *RBDPool) fence(ctx context.Context, id string, generation uint64) error {
	r, text, err := p.read(ctx, id)
	switch {
	case errors.Is(err, ErrNotFound):
		return nil
	case err != nil:
		return err
	case generation < r.Attachment.Generation && !mutant.On(mutant.FenceLaterUse):
		return fmt.Errorf("%w: generation %d is older than %d", ErrStale, generation, r.Attachment.Generation)
	case r.State != ready || r.Detached >= generation && r.Flushed >= generation:
		return nil
	}
	i, err := p.image(ctx, id)
	if err != nil {
		return err
	}
	// The record with the clients is written before they are blocked. After this write, Confirm refuses every process
	// that has not been confirmed. If another host has fenced the volume and a later attachment has begun since the
	// record was read, the write fails, so that the process of the later attachment is not blocked.
	clients := slices.Concat(r.Clients, r.Former, r.standbyClients())
	for _, c := range i.GetClients() {
		if !slices.Contains(clients, c) {
			clients = append(clients, c)
		}
	}
	r.Clients, r.Former, r.Standby = clients, nil, nil
	if !mutant.On(mutant.FenceLateClients) {
		r.Detached = max(r.Detached, generation)
	}
	if text, err = p.write(ctx, id, text, r); err != nil {
		return err
	}
	if len(r.Clients) > 0 && !mutant.On(mutant.FenceWithoutBlock) {
		request := &rbdv1.BlockClientsRequest{Clients: r.Clients, Seconds: fenceSeconds}
		if _, err := p.o.Client.BlockClients(ctx, request); err != nil {
			return rbdError(err)
		}
	}
	r.Clients, r.Flushed, r.Detached = nil, max(r.Flushed, generation), max(r.Detached, generation)
	_, err = p.write(ctx, id, text, r)
	return err
}
