package vm

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// migrationPoll is the time between two reads of the progress of a migration.
const migrationPoll = time.Second

// maxMigrationWait is the deadline of `trivet vm migrate --wait`. It is longer than the maximum timeout of a migration.
const maxMigrationWait = 25 * time.Hour

func migrateCommand(s *session.Session) *cobra.Command {
	var to string
	var cancel bool
	var wait session.Waiting
	var limit time.Duration
	c := vmsCommand(s, "migrate VM...", "Move running VMs to another host")
	c.Long = `Move running VMs to another host. The disks of a VM are copied while the guest runs. The guest is paused for
the last part of its memory (under TCG and with QEMU 9 or later: for all of it), and then continues on the other
host.

Without --to the control plane chooses the host. With --wait the command shows the progress, and returns when the
migration has ended. If the migration fails or does not finish in time, the VM goes
on running on its host. "trivet vm show" shows a migration and the result of the last one.

Several VMs are migrated one after the other with --wait, and at the same time without it. A failure of one VM does not
stop the others. "trivet host drain" moves all VMs of a host.`
	c.Example = `  trivet vm migrate web --wait
  trivet vm migrate web db --to rack7
  trivet vm migrate web --cancel`
	c.Flags().StringVar(&to, "to", "", "the name or ID of the host to move them to")
	wait.Add(c, false)
	c.Flags().DurationVar(&limit, "within", 0, "abort a migration if it has not reached the switchover after this time (default: 150 s per GiB of memory and disk, at least 5m)")
	c.Flags().BoolVar(&cancel, "cancel", false, "end the migrations that are under way")
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if limit < 0 || limit%time.Second != 0 || limit > 24*time.Hour {
			return session.Usagef("--within %s: want whole seconds, at most 24h", limit)
		}
		host, err := hostToMoveTo(ctx, s, conn, to, cancel)
		if err != nil {
			return err
		}
		var moved []*vmv1.VirtualMachine
		each := map[bool]time.Duration{false: callTimeout, true: maxMigrationWait}[wait.On()]
		err = s.Each(ctx, each, args, func(ctx context.Context, name string) error {
			t, err := find(ctx, s, conn, name)
			if err != nil {
				return err
			}
			m := migration{operatorv1.NewOperatorServiceClient(conn), t}
			if cancel {
				if err := m.cancel(ctx); err != nil {
					return err
				}
				return s.Done(name, "migration cancelled")
			}
			vm, err := t.client.MigrateVm(ctx, &vmv1.MigrateVmRequest{
				OrgId: t.org, ProjectId: t.project, VmId: t.id, DestinationNodeId: host, TimeoutSeconds: uint32(limit / time.Second),
			})
			if err == nil && wait.On() {
				vm, err = m.wait(ctx, s, name)
			}
			if err == nil {
				moved = append(moved, vm)
			}
			return err
		})
		if len(moved) == 0 {
			return err
		}
		ctx, done := s.PrintContext(ctx)
		defer done()
		if printed := printVMs(ctx, s, conn, len(args) == 1, moved); printed != nil && err == nil {
			err = printed
		}
		return err
	})
	return c
}

// hostToMoveTo returns the ID of the host of --to, or an empty text if the control plane chooses the host.
func hostToMoveTo(ctx context.Context, s *session.Session, conn *dial.Conn, to string, cancel bool) (string, error) {
	if to == "" || cancel {
		return "", nil
	}
	ctx, end := s.Limit(ctx, callTimeout)
	defer end()
	return node.Find(ctx, conn, to)
}

// migration calls the RPCs for the migration of a VM.
type migration struct {
	client operatorv1.OperatorServiceClient
	vm     *target
}

func (m migration) get(ctx context.Context) (*operatorv1.Migration, error) {
	out, err := m.client.GetMigration(ctx, &operatorv1.GetMigrationRequest{OrgId: m.vm.org, ProjectId: m.vm.project, VmId: m.vm.id})
	return out.GetMigration(), err
}

func (m migration) cancel(ctx context.Context) error {
	_, err := m.client.CancelMigration(ctx, &operatorv1.CancelMigrationRequest{OrgId: m.vm.org, ProjectId: m.vm.project, VmId: m.vm.id})
	return err
}

// wait shows the progress of the migration until the migration has ended, and returns the VM. If the VM was not moved,
// it returns an error with the reason.
func (m migration) wait(ctx context.Context, s *session.Session, name string) (vm *vmv1.VirtualMachine, err error) {
	goesOn := session.Ongoing{What: "the migration of " + name + " goes on, and --cancel ends it", Look: "trivet vm show " + name}
	err = s.WaitOngoing("migrating "+name, goesOn, func(progress func(string)) error {
		for {
			now, err := m.get(ctx)
			if err != nil {
				return err
			}
			if now.GetPhase() == "" {
				if !now.GetMoved() {
					return fmt.Errorf("%s was not migrated: %s", name, now.GetReason())
				}
				vm, err = m.vm.client.GetVm(ctx, &vmv1.GetVmRequest{OrgId: m.vm.org, ProjectId: m.vm.project, VmId: m.vm.id})
				return err
			}
			progress(migrationText(now))
			select {
			case <-time.After(migrationPoll):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	return vm, err
}

// migrationText describes a migration in one line.
func migrationText(m *operatorv1.Migration) string {
	if m == nil {
		return ""
	}
	paused := ""
	if m.GetDowntimeMs() > 0 {
		paused = fmt.Sprintf(", paused for %d ms", m.GetDowntimeMs())
	}
	switch {
	case m.GetPhase() != "" && m.GetTotalBytes() > 0:
		return fmt.Sprintf("to %s, phase %s, %s of %s sent", m.GetTargetNodeId(), m.GetPhase(), show.Bytes(m.GetSentBytes()), show.Bytes(m.GetTotalBytes()))
	case m.GetPhase() != "":
		return fmt.Sprintf("to %s, phase %s", m.GetTargetNodeId(), m.GetPhase())
	case m.GetMoved():
		return fmt.Sprintf("%s from %s%s", show.When(m.GetEndedAt()), m.GetSourceNodeId(), paused)
	}
	return fmt.Sprintf("%s to %s failed: %s", show.When(m.GetEndedAt()), m.GetTargetNodeId(), m.GetReason())
}
