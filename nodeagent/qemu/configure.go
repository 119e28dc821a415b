package qemu

import (
	"context"
	"errors"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// preconfig is the option by which QEMU waits, before it makes the machine, for what configure says.
const preconfig = "-preconfig"

// configure hands over the kernel's command line and lets QEMU make the machine, unless it has. The command line is a
// tenant's and may hold secrets; as an argument (-append) every user of the host could read it in /proc. QEMU's own
// configuration files (-readconfig) take no values above 1 KiB, nor quotation marks.
//
// A QEMU that was started without preconfig, as one without a command line is, needs none of this.
func (p *Process) configure(ctx context.Context) error {
	if p.whole.Load() || !slices.Contains(p.record.Argv, preconfig) {
		return nil
	}
	status, err := p.Status(ctx)
	if err != nil {
		return err
	}
	if status.State == "prelaunch" {
		set := map[string]string{"path": "/machine", "property": "append", "value": p.record.Spec.Cmdline}
		if err := p.do(ctx, p.work, "qom-set", set, nil); err != nil {
			return err
		}
		// QEMU refuses this command when the machine is made. Should it refuse for another reason, cont is refused too.
		var refusal *qmp.Error
		if err := p.do(ctx, p.work, "x-exit-preconfig", nil, nil); err != nil && !errors.As(err, &refusal) {
			return err
		}
	}
	p.whole.Store(true)
	return nil
}
