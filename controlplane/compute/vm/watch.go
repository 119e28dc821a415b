package vm

import (
	"context"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// EventType is the kind of an Event. Its numbers are those of VmEventType in the wire contract (docs/api.md).
type EventType uint8

const (
	CreatedEvent EventType = iota + 1
	UpdatedEvent
	DeletedEvent
	StateChangedEvent
)

// Event describes one commit that changed a VM: the kind of change, the VM after the change, and the time.
type Event struct {
	Type EventType
	VM   *cloud.VM
	At   cloud.Time
}

// maxEventCacheBytes is the maximum size, in bytes, of the cache of encoded VM events.
const maxEventCacheBytes = 16 << 20

// messages caches the encoded WatchVm events of all VMs. Each event is encoded once, for all watches of its VM.
type messages = store.Shared[cloud.VM, *rpc.Encoded]

func newMessages(s *store.Store) *messages {
	return store.NewShared(s, VMs, maxEventCacheBytes, func(c store.Change[cloud.VM]) (*rpc.Encoded, int, error) {
		e := event(c, s.Now())
		vm := convert.VM(e.VM, nil)
		vm.Status.HostPid = 0 // the encoded event is for all watchers, and only operators get the process ID: see ForCaller
		m, err := rpc.Encode(&vmv1.VmEvent{
			VmId: string(e.VM.ID), EventType: vmv1.VmEventType(e.Type), Vm: vm, Timestamp: e.At,
		})
		return m, m.Size(), err
	})
}

// Watch sends the current VM, then one event per commit, in log order, until the VM is deleted or ctx ends. Each event
// is passed to send as an rpc.Lazy, which returns the encoded VmEvent when the stream is ready to send it. If the
// client reads so slowly that the events are no longer retained, Watch returns OutOfRange, and the client has to start
// a new watch.
func (s *Service) Watch(ctx context.Context, t cloud.Tenant, id cloud.VMID, send func(rpc.Lazy) error) error {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return err
	}
	first, from, err := s.current(ctx, t, id)
	if err != nil {
		return err
	}
	w := s.messages.WatchOne(from, string(t.Project), string(id))
	defer w.Close()
	if err := send(first); err != nil {
		return err
	}
	for {
		changes, err := w.Next(ctx)
		if err != nil {
			return err
		}
		for _, c := range changes {
			if err := send(c.Value); err != nil || c.Deleted {
				return err
			}
		}
	}
}

// current returns the first event of a watch, which has the current VM, and the revision from which later events must
// be read.
func (s *Service) current(ctx context.Context, t cloud.Tenant, id cloud.VMID) (first rpc.Lazy, next int64, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) (err error) {
		next = v.Revision() + 1
		if _, err = getOwned(v, t, id); err != nil {
			return err
		}
		first, err = s.messages.Current(v, string(t.Project), string(id))
		return err
	})
	return first, next, err
}

// WatchRecords is like Watch, but calls send with Events instead of encoded messages.
func (s *Service) WatchRecords(ctx context.Context, t cloud.Tenant, id cloud.VMID, send func(Event) error) error {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return err
	}
	var last *cloud.VM
	var next int64
	err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		next = v.Revision() + 1
		last, err = getOwned(v, t, id)
		return err
	})
	if err != nil {
		return err
	}
	w := VMs.WatchOne(s.opts.Store, next, string(t.Project), string(id))
	defer w.Close()
	if err := send(event(store.Change[cloud.VM]{Before: last, Value: last}, s.opts.Store.Now())); err != nil {
		return err
	}
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		for _, c := range changes {
			c.Before = last
			if err := send(event(c, s.opts.Store.Now())); err != nil || c.Value == nil {
				return err
			}
			last = c.Value
		}
	}
}

// event converts a change of a VM's record to an Event. If the record was deleted, the time of the Event is now.
func event(c store.Change[cloud.VM], now cloud.Time) Event {
	switch {
	case c.Value == nil:
		last := *c.Before
		last.State = cloud.Deleted
		return Event{DeletedEvent, &last, now}
	case c.Before == nil:
		return Event{CreatedEvent, c.Value, c.Value.UpdatedAt}
	case c.Before.State != c.Value.State:
		return Event{StateChangedEvent, c.Value, c.Value.UpdatedAt}
	}
	return Event{UpdatedEvent, c.Value, c.Value.UpdatedAt}
}
