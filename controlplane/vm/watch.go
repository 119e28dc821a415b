package vm

import (
	"context"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// EventType numbers are the spec's (part 6).
type EventType uint8

const (
	CreatedEvent EventType = iota + 1
	UpdatedEvent
	DeletedEvent
	StateChangedEvent
)

// Event is one commit of one VM.
type Event struct {
	Type EventType
	VM   *cloud.VM
	At   cloud.Time
}

// Watch sends the VM as it is, then one event for each commit, in log order, until it is deleted or ctx ends. A reader
// that falls behind the kept history gets OutOfRange and reads again.
func (s *Service) Watch(ctx context.Context, t cloud.Tenant, id cloud.VMID, send func(Event) error) error {
	if err := cloud.CheckUUID("vm_id", string(id)); err != nil {
		return err
	}
	var first *cloud.VM
	var from int64
	err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		from = v.Revision() + 1
		first, err = of(v, t, id)
		return err
	})
	if err != nil {
		return err
	}
	w := VMs.WatchOne(s.opts.Store, from, string(t.Project), string(id))
	defer w.Close()
	if err := send(Event{UpdatedEvent, first, first.UpdatedAt}); err != nil {
		return err
	}
	for {
		changes, _, err := w.Next(ctx)
		if err != nil {
			return err
		}
		for _, c := range changes {
			e := event(c, s.opts.Store.Now())
			if err := send(e); err != nil || e.Type == DeletedEvent {
				return err
			}
		}
	}
}

// event says what a commit means.
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
