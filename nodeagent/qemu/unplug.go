package qemu

import (
	"context"
	"errors"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// releaseRepeat is the time between two requests to the guest to release a device. A guest that is booting ignores
// requests. QEMU refuses a repeated request while it considers the last one pending.
const releaseRepeat = 2 * time.Second

// devices queries the ids of QEMU's devices. A device whose removal the guest has not confirmed is included.
func (p *Process) devices(ctx context.Context) (map[string]bool, error) {
	properties, err := query(ctx, p, func(m *raw.Monitor) ([]raw.ObjectPropertyInfo, error) {
		return m.QomList("/machine/peripheral")
	})
	if err != nil {
		return nil, err
	}
	ids := map[string]bool{}
	for _, property := range properties {
		ids[property.Name] = true
	}
	return ids, nil
}

// deleteDevice asks the guest to release a device, repeatedly and for at most the duration patience. It returns true
// when QEMU does not have the device any more, and false if the guest has not released it.
func (p *Process) deleteDevice(ctx context.Context, device string, patience time.Duration) (released bool, err error) {
	late, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := p.call(late, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			mark := conn.Mark()
			// A refusal is ignored: the device does not exist, or QEMU considers the last request pending.
			var refusal *qmp.Error
			if err := conn.Do(ctx, "device_del", object{"id": device}, nil); errors.As(err, &refusal) {
				if refusal.Class == "DeviceNotFound" {
					return nil
				}
			} else if err != nil {
				return err
			}
			return waitDeleted(ctx, conn, mark, device)
		})
		if err == nil || mutant.On(mutant.DetachUnreleased) {
			return true, nil
		}
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		if devices, queryErr := p.devices(ctx); queryErr == nil && !devices[device] {
			return true, nil // The event was lost with a connection, or the guest was reset, which releases the device.
		}
		switch {
		case late.Err() != nil:
			return false, nil
		case !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, qmp.ErrDropped):
			return false, err
		}
	}
}

// waitDeleted waits for the event that the device was deleted, for at most releaseRepeat.
func waitDeleted(ctx context.Context, conn *qmp.Conn, from qmp.Mark, device string) error {
	ctx, cancel := context.WithTimeout(ctx, releaseRepeat)
	defer cancel()
	_, err := conn.Wait(ctx, from, func(e qmp.Event) bool {
		var data struct {
			Device string `json:"device"`
		}
		return e.Name == "DEVICE_DELETED" && e.Decode(&data) == nil && data.Device == device
	})
	return err
}
