package qemu

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// nicReleaseTimeout is how long UnplugNIC waits for the guest to release a network interface.
const nicReleaseTimeout = 10 * time.Second

var (
	// ErrNotReleased means that the guest did not release a network interface within 10 seconds.
	ErrNotReleased = errors.New("the guest does not release the network interface")

	// ErrNoPort means that QEMU has no free root port for a further network interface. It has one after the next start.
	ErrNoPort = errors.New("the VM has no free slot for a further network interface before its next start")
)

// AttachedNIC is a network interface in the record of a running VM.
type AttachedNIC struct {
	NIC
	// Present is false if QEMU does not have the device. QEMU may have its tap: UnplugNIC removes the rest.
	Present bool
}

// NICs queries which network interfaces QEMU has, and returns them with all others in the record, in the order of their
// slots.
func (p *Process) NICs(ctx context.Context) ([]AttachedNIC, error) {
	devices, err := p.devices(ctx)
	if err != nil {
		return nil, err
	}
	var out []AttachedNIC
	for _, n := range p.Record().Spec.NICs {
		out = append(out, AttachedNIC{NIC: n, Present: devices[n.deviceID()]})
	}
	slices.SortFunc(out, func(a, b AttachedNIC) int { return cmp.Compare(a.Slot, b.Slot) })
	return out, nil
}

// PlugNIC attaches a network interface to the running guest, and writes it to the record. QEMU gets a duplicate of tap,
// which the caller must still close. A slot of -1 means the first free one. The error wraps [ErrNoPort] if there is
// none. If the record contains the interface after an error, QEMU may have the tap, and the caller must call UnplugNIC
// before it opens the tap again. Otherwise QEMU has neither the interface nor the tap.
func (p *Process) PlugNIC(ctx context.Context, n NIC, tap *os.File) error {
	if err := p.plugNIC(ctx, n, tap); err != nil {
		return fmt.Errorf("attach network interface %s: %w", n.ID, err)
	}
	return nil
}

func (p *Process) plugNIC(ctx context.Context, n NIC, tap *os.File) error {
	devices, err := p.devices(ctx)
	if err != nil {
		return err
	}
	if devices[n.deviceID()] {
		return nil // An earlier call was interrupted before it got the reply.
	}
	others := slices.DeleteFunc(slices.Clone(p.Record().Spec.NICs), func(o NIC) bool { return o.ID == n.ID })
	if n.Slot == -1 {
		taken := map[int]bool{}
		for _, o := range others {
			taken[o.Slot] = true
		}
		n.Slot = freeSlot(taken, MaxNICs)
	}
	if n.Slot < 0 || !devices[nicPortID(n.Slot)] {
		return ErrNoPort
	}
	all := append(slices.Clone(others), n)
	if err := validateNICs(all); err != nil {
		return err
	}
	if err := p.writeNICs(all); err != nil {
		return err
	}
	if err := p.deleteNetdev(ctx, n); err != nil { // An earlier call may have left a backend without a device.
		return err
	}
	err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := conn.SendFD(ctx, n.netdevID(), tap); err != nil {
			return err
		}
		backend := object{"type": "tap", "id": n.netdevID(), "fd": n.netdevID(), "vhost": false}
		if err := conn.Do(ctx, "netdev_add", backend, nil); err != nil {
			// QEMU closes the descriptor with the connection if this command fails too.
			return errors.Join(err, conn.Do(ctx, "closefd", object{"fdname": n.netdevID()}, nil))
		}
		return conn.Do(ctx, "device_add", n.device(), nil)
	})
	if err == nil {
		return nil
	}
	var refusal *qmp.Error
	if errors.As(err, &refusal) {
		if cleanErr := p.deleteNetdev(ctx, n); cleanErr != nil {
			return errors.Join(err, cleanErr)
		}
		err = errors.Join(err, p.writeNICs(others))
	}
	return err
}

// UnplugNIC removes a network interface from the running guest. It asks the guest to release the interface, repeatedly
// and for at most 10 seconds; the error wraps [ErrNotReleased] if the guest does not. After the release, QEMU closes
// its descriptor of the tap. When QEMU has neither the device nor the tap, UnplugNIC calls release, and removes the
// interface from the record if release returns nil. UnplugNIC may be called again after any error.
func (p *Process) UnplugNIC(ctx context.Context, id string, release func(NIC) error) error {
	if err := p.unplugNIC(ctx, id, release); err != nil {
		return fmt.Errorf("detach network interface %s: %w", id, err)
	}
	return nil
}

func (p *Process) unplugNIC(ctx context.Context, id string, release func(NIC) error) error {
	nics := p.Record().Spec.NICs
	at := slices.IndexFunc(nics, func(n NIC) bool { return n.ID == id })
	if at < 0 {
		return nil
	}
	released, err := p.deleteDevice(ctx, nics[at].deviceID(), nicReleaseTimeout)
	if err == nil && !released {
		err = ErrNotReleased
	}
	if err != nil {
		return err
	}
	if err := p.deleteNetdev(ctx, nics[at]); err != nil {
		return err
	}
	if err := release(nics[at]); err != nil {
		return err
	}
	return p.writeNICs(slices.Delete(slices.Clone(nics), at, at+1))
}

// deleteNetdev deletes the backend of an interface, if there is one. QEMU closes its descriptor of the tap.
func (p *Process) deleteNetdev(ctx context.Context, n NIC) error {
	err := p.do(ctx, p.work, func(m *raw.Monitor) error { return m.NetdevDel(n.netdevID()) })
	var refusal *qmp.Error
	if errors.As(err, &refusal) && (refusal.Class == "DeviceNotFound" || strings.Contains(refusal.Desc, "not found")) {
		return nil
	}
	return err
}

// writeNICs replaces the network interfaces in the record.
func (p *Process) writeNICs(nics []NIC) error {
	r := p.Record()
	r.Spec.NICs = nics
	if err := p.home.write("record.json", r); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.record.Spec.NICs = nics
	return nil
}
