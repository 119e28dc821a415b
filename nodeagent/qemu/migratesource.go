package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// unlimitedRate is the max-bandwidth that is set if there is no limit, in bytes per second. QEMU's default would be
	// 128 MiB/s.
	unlimitedRate = 1 << 34
	// mirrorEndTimeout is the maximum time of EndMirrors, and of each of the two parts of CancelMigration.
	mirrorEndTimeout = 15 * time.Second
	// migrationPoll is the pause between two queries of the state of a migration.
	migrationPoll = 20 * time.Millisecond
)

// BeginMirrors makes QEMU copy all disks that are not volumes, and the NVRAM, to the target while the guest runs. A write
// of the guest is acknowledged only after QEMU has also sent it to the target. The function dial opens a stream to the
// NBD server of the target for one of the names of Spec.Copies. The rate is in bytes per second; 0 means no limit.
//
// A base image is not copied, because the target has it. After an error, the caller must call CancelMigration.
func (p *Process) BeginMirrors(ctx context.Context, rate uint64, dial func(ctx context.Context, name string) (*os.File, error)) error {
	for _, c := range p.Record().Spec.copies() {
		stream, err := dial(ctx, c.name)
		if err != nil {
			return err
		}
		err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			return c.beginMirror(ctx, conn, rate, stream)
		})
		_ = stream.Close()
		if err != nil {
			return fmt.Errorf("copy disk %s: %w", c.name, err)
		}
	}
	return nil
}

func (c nodeCopy) beginMirror(ctx context.Context, conn *qmp.Conn, rate uint64, stream *os.File) error {
	if err := conn.SendFD(ctx, c.mirrorNode(), stream); err != nil {
		return err
	}
	target := object{"driver": "nbd", "node-name": c.mirrorNode(), "export": c.name, "discard": "unmap", "detect-zeroes": "unmap",
		"server": object{"type": "fd", "str": c.mirrorNode()}}
	if err := conn.Do(ctx, "blockdev-add", target, nil); err != nil {
		return err
	}
	sync := "full"
	if c.onBase {
		sync = "top"
	}
	if mutant.On(mutant.CopyNewWritesOnly) {
		sync = "none"
	}
	return conn.Do(ctx, "blockdev-mirror", object{"job-id": c.mirrorNode(), "device": c.node, "target": c.mirrorNode(),
		"sync": sync, "copy-mode": "write-blocking", "speed": rate, "auto-dismiss": false,
		"on-source-error": "report", "on-target-error": "report"}, nil)
}

// EndMirrors completes the copies of the disks and ends their jobs. QEMU must be in the status pre-switchover.
// EndMirrors returns an error if a copy cannot be completed.
func (p *Process) EndMirrors(ctx context.Context) error {
	if err := p.endMirrors(ctx, false); err != nil {
		return fmt.Errorf("complete the copies of the disks: %w", err)
	}
	return nil
}

// endMirrors ends the jobs that copy disks to the target, and removes the jobs and the target nodes. If force is true,
// endMirrors does so even if copies are not complete.
func (p *Process) endMirrors(ctx context.Context, force bool) error {
	ctx, cancel := context.WithTimeout(ctx, mirrorEndTimeout)
	defer cancel()
	var failed error
	for {
		m, err := p.Migration(ctx)
		if err != nil {
			return errors.Join(failed, err)
		}
		for _, one := range m.Mirrors {
			switch {
			case one.Ended && one.Error != "" && !force:
				failed = errors.Join(failed, errors.New(one.Error))
			case !one.Ended && !one.Ready && !force:
				return errors.New("a copy is not complete")
			}
			if err := p.endMirror(ctx, one, force); err != nil {
				return errors.Join(failed, err)
			}
		}
		if len(m.Mirrors) == 0 {
			return errors.Join(failed, p.removeMirrorNodes(ctx))
		}
		if pause(ctx, migrationPoll); ctx.Err() != nil {
			return errors.Join(failed, ctx.Err())
		}
	}
}

// endMirror requests the end of the job of a copy. If the job has ended, endMirror removes it.
func (p *Process) endMirror(ctx context.Context, m Mirror, force bool) error {
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if m.Ended {
			return conn.Do(ctx, "job-dismiss", object{"id": mirrorPrefix + m.node}, nil)
		}
		return conn.Do(ctx, "block-job-cancel", object{"device": mirrorPrefix + m.node, "force": force}, nil)
	})
	return refused(err) // QEMU refuses the command if the job is ending or has just ended.
}

// removeMirrorNodes removes the target nodes of the copies. This closes their streams.
func (p *Process) removeMirrorNodes(ctx context.Context) error {
	copies := p.Record().Spec.copies()
	if len(copies) == 0 {
		return nil
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		var nodes []struct {
			Name string `json:"node-name"`
		}
		if err := conn.Do(ctx, "query-named-block-nodes", object{"flat": true}, &nodes); err != nil {
			return err
		}
		for _, c := range copies {
			if !slices.ContainsFunc(nodes, func(n struct {
				Name string `json:"node-name"`
			}) bool {
				return n.Name == c.mirrorNode()
			}) {
				continue
			}
			if err := conn.Do(ctx, "blockdev-del", object{"node-name": c.mirrorNode()}, nil); err != nil {
				return err
			}
		}
		return nil
	})
}

// CancelMigration ends the migration in the QEMU of a source and removes all parts of it. It returns after QEMU has
// stopped sending. The caller must first close the streams (tunnel.Stop), because a copy whose peer does not answer
// would delay CancelMigration. A guest that was stopped for the migration stays stopped until ResumeMigrated.
// CancelMigration ignores it if QEMU refuses to remove the hold node, because nothing depends on this node. It returns
// ErrNotEnded if it has removed everything but the thread that sends.
func (p *Process) CancelMigration(ctx context.Context) error {
	sending, cancel := context.WithTimeout(ctx, mirrorEndTimeout)
	notEnded := p.cancelSending(sending)
	cancel()
	err := p.endMirrors(ctx, true)
	if err == nil {
		err = refused(p.removeHold(ctx))
	}
	if err == nil {
		err = notEnded
	}
	if err != nil {
		return fmt.Errorf("cancel migration: %w", err)
	}
	return nil
}
