package vpc

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// OpenTap makes the tap of a port and returns its descriptor, for a guest that is about to start. It waits until the
// port's packet filter and servers are in force, so that the guest has its network from the first packet on. The tap
// disappears when the last copy of the descriptor is closed. If ctx ends before, the error says what OpenTap waited
// for. The error wraps EBUSY if another process has the tap open.
func (n *Networks) OpenTap(ctx context.Context, port cloud.PortID) (tap *os.File, err error) {
	err = n.attach(ctx, port, func(ctx context.Context, w *wanted) error {
		tap, err = n.plane.openTap(ctx, w, port)
		return err
	})
	if err != nil && tap != nil {
		tap.Close()
		tap = nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the tap of port %s: %w", port, err)
	}
	return tap, nil
}

// AttachVeth makes the veth pair of a port, with one end in a container's namespace. It waits as OpenTap does.
func (n *Networks) AttachVeth(ctx context.Context, port cloud.PortID, e netdev.Endpoint) error {
	err := n.attach(ctx, port, func(ctx context.Context, w *wanted) error { return n.plane.attachVeth(ctx, w, port, e) })
	if err != nil {
		return fmt.Errorf("attach port %s: %w", port, err)
	}
	return nil
}

// attach waits until the VPC of a port is in force with the port, calls create, which makes the port's device, and sets
// the device up.
func (n *Networks) attach(ctx context.Context, port cloud.PortID, create func(context.Context, *wanted) error) error {
	for {
		w, waiting, missing := n.applied(port)
		if missing == nil {
			if done, err := n.attachTo(ctx, w, port, create); done {
				return err
			}
			continue
		}
		select {
		case <-waiting:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", missing, ctx.Err())
		case <-n.ctx.Done():
			return errClosed
		}
	}
}

// attachTo makes a port's device. It returns false if the VPC changed meanwhile and is not in force with the port.
func (n *Networks) attachTo(
	ctx context.Context, w *worker, port cloud.PortID, create func(context.Context, *wanted) error,
) (done bool, err error) {
	unlock, err := w.lock(ctx)
	if err != nil {
		return true, err
	}
	defer unlock()
	now, _, missing := n.applied(port)
	if missing != nil || now != w {
		return false, nil
	}
	n.mu.RLock()
	inForce := w.inForce
	n.mu.RUnlock()
	if inForce == nil {
		return false, nil
	}
	if err := create(ctx, inForce); err != nil {
		return true, err
	}
	return true, n.plane.activatePort(ctx, inForce, port)
}

// CloseTap deletes the device of a port, after its guest has ended. A port without a device is no error.
func (n *Networks) CloseTap(ctx context.Context, port cloud.PortID) error {
	n.mu.RLock()
	p := n.tables.port(port)
	var w *worker
	if p != nil {
		w = n.workers[p.VPC]
	}
	n.mu.RUnlock()
	if w == nil {
		return nil // the worker deleted the device with the port or the VPC
	}
	unlock, err := w.lock(ctx)
	if err != nil {
		return fmt.Errorf("close the tap of port %s: %w", port, err)
	}
	defer unlock()
	return n.plane.detach(ctx, w.id, port)
}

// Addresses returns the IP addresses of a port, the IPv4 address first. It returns nil for an unknown port.
func (n *Networks) Addresses(port cloud.PortID) []netip.Addr {
	n.mu.RLock()
	defer n.mu.RUnlock()
	p := n.tables.port(port)
	if p == nil {
		return nil
	}
	out := []netip.Addr{p.IP}
	if p.IP6.IsValid() {
		out = append(out, p.IP6)
	}
	return out
}
