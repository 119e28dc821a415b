package vm

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// ListChangeType is the kind of a ListChange. Its numbers are those of VmListChangeType in operator.v1.
type ListChangeType uint8

const (
	PresentInList ListChangeType = iota + 1
	ListSynced
	ChangedInList
	RemovedFromList
)

// ListChange is a change of the list of VMs that match a filter. VM is nil unless Type is PresentInList or
// ChangedInList.
type ListChange struct {
	Type ListChangeType
	ID   cloud.VMID
	VM   *cloud.VM
	At   cloud.Time
}

// ListAll is like List for the VMs of all projects, in order of project and creation.
func (s *Service) ListAll(ctx context.Context, size int32, token, filter string) ([]*cloud.VM, string, error) {
	match, err := parseFilter(filter)
	if err != nil {
		return nil, "", err
	}
	return store.Page(ctx, s.opts.Store, VMs, store.PageRequest{Size: size, Token: token, Query: "all vms\x00" + filter}, match)
}

// WatchList sends the VMs of the tenant t that match filter, then a ListSynced, and then each change of these VMs in
// log order, until ctx ends or send returns an error. Changes that were committed while the VMs were sent can be sent
// twice: as part of a VM and as a change. WatchList returns OutOfRange if send is so slow that the changes are no
// longer retained.
func (s *Service) WatchList(ctx context.Context, t cloud.Tenant, filter string, send func(ListChange) error) error {
	match, err := parseFilter(filter)
	if err != nil {
		return err
	}
	return s.watchList(ctx, func(vm *cloud.VM) bool { return vm.Org == t.Org && match(vm) }, send, string(t.Project))
}

// WatchAll is like WatchList for the VMs of all projects.
func (s *Service) WatchAll(ctx context.Context, filter string, send func(ListChange) error) error {
	match, err := parseFilter(filter)
	if err != nil {
		return err
	}
	return s.watchList(ctx, match, send)
}

// watchList sends the VMs below path for which keep returns true, and then their changes.
func (s *Service) watchList(ctx context.Context, keep matcher, send func(ListChange) error, path ...string) error {
	// The watch begins at from. The pages below are read later, so no change between the pages and the watch is missed.
	var from int64
	if err := s.opts.Store.View(ctx, func(v *store.View) error { from = v.Revision() + 1; return nil }); err != nil {
		return err
	}
	sent := map[cloud.VMID]struct{}{} // the VMs that the caller has in its list
	for token := ""; ; {
		page, next, err := store.Page(ctx, s.opts.Store, VMs, store.PageRequest{Size: cloud.DefaultPage, Token: token, Query: "watch vms"}, keep, path...)
		if err != nil {
			return expiredHistory(err)
		}
		for _, vm := range page {
			sent[vm.ID] = struct{}{}
			if err := send(ListChange{PresentInList, vm.ID, vm, vm.UpdatedAt}); err != nil {
				return err
			}
		}
		if token = next; token == "" {
			break
		}
	}
	if err := send(ListChange{Type: ListSynced, At: s.opts.Store.Now()}); err != nil {
		return err
	}
	w := VMs.Watch(s.opts.Store, from, path...)
	defer w.Close()
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		for _, c := range changes {
			id := cloud.VMID(c.Path[len(c.Path)-1])
			_, listed := sent[id]
			switch {
			case c.Value != nil && keep(c.Value):
				sent[id] = struct{}{}
				err = send(ListChange{ChangedInList, id, c.Value, c.Value.UpdatedAt})
			case listed:
				delete(sent, id)
				err = send(ListChange{Type: RemovedFromList, ID: id, At: s.opts.Store.Now()})
			}
			if err != nil {
				return err
			}
		}
	}
}

// expiredHistory returns OutOfRange for the error of a page whose revision is no longer kept, and err otherwise.
func expiredHistory(err error) error {
	if f, ok := fault.From(err); ok && f.Reason == "PAGE_TOKEN_EXPIRED" {
		return fault.New(fault.OutOfRange, "the list was read too slowly: open the stream again").WithReason("HISTORY_EXPIRED").Because(err)
	}
	return err
}

// Details returns the VM with this ID and the name of its host, which is empty if it has none.
func (s *Service) Details(ctx context.Context, t cloud.Tenant, id cloud.VMID) (vm *cloud.VM, host string, err error) {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return nil, "", err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		if vm, err = getOwned(v, t, id); err != nil || vm.Node == "" {
			return err
		}
		n, err := node.Nodes.Get(v, string(vm.Node))
		if n != nil {
			host = n.Name
		}
		return err
	})
	return vm, host, err
}
