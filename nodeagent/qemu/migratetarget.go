package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// LaunchIncoming starts a QEMU that waits for the state of a guest from another host. The parameter s describes the
// QEMU of that host (see ParseMachine). Apart from this, LaunchIncoming does the same as Launch. The CPUs of the guest
// do not run before ResumeMigrated, even if they ran at the source.
func (l *Launcher) LaunchIncoming(ctx context.Context, home *Home, s Spec, files Files, generation uint64, owner string) (*Process, error) {
	p, err := l.launch(ctx, home, s, files, Record{Generation: generation, Owner: owner, Incoming: true})
	if err != nil {
		return nil, fmt.Errorf("start VM %s to receive its state: %w", home.id, err)
	}
	return p, nil
}

// exportPrefix is the beginning of the ids of the exports of the copied disks and of the NVRAM at the target.
const exportPrefix = "migrate-"

// PrepareIncoming makes a QEMU of LaunchIncoming ready to receive a guest. The file disks is a listening socket, at
// which QEMU serves each of Spec.Copies by NBD under its name. If channels is 0, the file memory is a connected socket,
// from which QEMU reads the memory and the state of the devices. Otherwise memory is a listening socket, at which QEMU
// accepts the main connection and then as many others as channels. QEMU ends if the main connection is closed before
// the state is complete. QEMU may hang if another connection is closed.
// PrepareIncoming can succeed only once for a process.
func (p *Process) PrepareIncoming(ctx context.Context, disks, memory *os.File, channels int) error {
	// The agent that started this QEMU may have ended before it called configure.
	if err := p.configure(ctx); err != nil {
		return err
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := setCapabilities(ctx, conn, true, channels); err != nil {
			return err
		}
		if err := addHoldNode(ctx, conn); err != nil {
			return err
		}
		if err := conn.SendFD(ctx, "disks", disks); err != nil {
			return err
		}
		server := object{"type": "fd", "data": object{"str": "disks"}}
		if err := conn.Do(ctx, "nbd-server-start", object{"addr": server}, nil); err != nil {
			return err
		}
		for _, c := range p.Record().Spec.copies() {
			export := object{"type": "nbd", "id": exportPrefix + c.node, "node-name": c.node, "name": c.name, "writable": true}
			if err := conn.Do(ctx, "block-export-add", export, nil); err != nil {
				return fmt.Errorf("disk %s: %w", c.name, err)
			}
		}
		if err := conn.SendFD(ctx, "migration", memory); err != nil {
			return err
		}
		uri := "fd:migration"
		if channels > 0 {
			uri = listeningURI
		}
		return conn.Do(ctx, "migrate-incoming", object{"uri": uri}, nil)
	})
}

// EndIncoming stops the NBD server of a target that has the complete state, and removes all other parts of the migration
// from QEMU. The call can be repeated. EndIncoming ignores it if QEMU refuses to remove the hold node, because nothing
// depends on this node.
func (p *Process) EndIncoming(ctx context.Context) error {
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return refused(conn.Do(ctx, "nbd-server-stop", nil, nil))
	})
	return errors.Join(err, refused(p.removeHold(ctx)))
}

// Announce makes QEMU send packets with the MAC address of each network interface, so that switches learn the new place
// of the guest. QEMU repeats the packets for about a second.
func (p *Process) Announce(ctx context.Context) error {
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "announce-self", object{"initial": 50, "max": 550, "rounds": 5, "step": 100}, nil)
	})
}
