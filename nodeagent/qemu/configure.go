package qemu

import (
	"context"
	"errors"
	"slices"

	"github.com/digitalocean/go-qemu/qmp/raw"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// preconfig is the option with which QEMU waits for QMP commands (see configure) before it creates the machine.
const preconfig = "-preconfig"

// configure passes the kernel's command line, and the keys of encrypted disks and RBD images, to a QEMU that waits in
// preconfig, and then makes QEMU create the machine. It does nothing if QEMU has created the machine already. The
// kernel's command line comes from the tenant and may hold secrets. If the command line were an argument (-append),
// every user of the host could read it in /proc. QEMU's own configuration files (-readconfig) take no values above 1
// KiB, nor quotation marks.
//
// configure also does nothing for a VM that has neither a kernel command line nor disks with keys: the QEMU of such a
// VM is started without preconfig. If the agent that started QEMU ended before it passed the keys, configure ends QEMU,
// and records that the start was interrupted.
func (p *Process) configure(ctx context.Context) error {
	if p.configured.Load() || !slices.Contains(p.record.Argv, preconfig) {
		return nil
	}
	status, err := p.Status(ctx)
	if err != nil {
		return err
	}
	if status.State == "prelaunch" || status.State == "inmigrate" {
		if cmdline := p.record.Spec.Cmdline; cmdline != "" {
			setCmdline := func(m *raw.Monitor) error { return m.QomSet("/machine", "append", cmdline) }
			if err := p.do(ctx, p.work, setCmdline); err != nil {
				return err
			}
		}
		err := p.unlockDisks(ctx)
		if errors.Is(err, errKeysLost) {
			p.recordExitAndQuit(exitLaunchLost)
		}
		if err != nil {
			return err
		}
		// An error that QEMU returns is ignored. QEMU refuses this command if it has created the machine already. If
		// QEMU refuses it for another reason, QEMU also refuses the command cont later, and that error is returned.
		var refusal *qmp.Error
		err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			return conn.Do(ctx, "x-exit-preconfig", nil, nil)
		})
		if err != nil && !errors.As(err, &refusal) {
			return err
		}
	}
	p.configured.Store(true)
	return nil
}
