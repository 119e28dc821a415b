package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

const (
	// unlimitedRate is the value of max-bandwidth for no limit, in bytes per second. QEMU's default is 128 MiB/s.
	unlimitedRate = 1 << 34
	// mirrorEndTimeout is the maximum time until the copies of disks end after they were requested to.
	mirrorEndTimeout = 15 * time.Second
	// migrationPoll is the pause between two queries while a migration ends.
	migrationPoll = 20 * time.Millisecond
)

// BeginMirrors makes QEMU copy all local disks to the target while the guest runs. QEMU copies what the guest writes, too,
// before the write is acknowledged. The function dial opens the stream of a disk to the NBD server of the target. The
// rate is in bytes per second; 0 means no limit.
//
// A base image is not copied: the target has it. After an error, the caller must call CancelMigration.
func (p *Process) BeginMirrors(ctx context.Context, rate uint64, dial func(ctx context.Context, disk string) (*os.File, error)) error {
	for _, d := range p.Record().Spec.Disks {
		stream, err := dial(ctx, d.ID)
		if err != nil {
			return err
		}
		err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			return d.beginMirror(ctx, conn, rate, stream)
		})
		_ = stream.Close()
		if err != nil {
			return fmt.Errorf("copy disk %s: %w", d.ID, err)
		}
	}
	return nil
}

func (d Disk) beginMirror(ctx context.Context, conn *qmp.Conn, rate uint64, stream *os.File) error {
	if err := conn.SendFD(ctx, d.mirrorNode(), stream); err != nil {
		return err
	}
	target := object{"driver": "nbd", "node-name": d.mirrorNode(), "export": d.ID, "discard": "unmap", "detect-zeroes": "unmap",
		"server": object{"type": "fd", "str": d.mirrorNode()}}
	if err := conn.Do(ctx, "blockdev-add", target, nil); err != nil {
		return err
	}
	sync := "full"
	if d.Base != "" {
		sync = "top"
	}
	return conn.Do(ctx, "blockdev-mirror", object{"job-id": d.mirrorNode(), "device": d.node(), "target": d.mirrorNode(),
		"sync": sync, "copy-mode": "write-blocking", "speed": rate, "auto-dismiss": false,
		"on-source-error": "report", "on-target-error": "report"}, nil)
}

// SendState stops the guest and makes QEMU send its memory and devices through stream, a socket that is connected to the
// target's QEMU. QEMU then waits in the status pre-switchover. The guest stays stopped, also after a failure and under a
// later agent, until ResumeMigrated.
//
// The guest is stopped first for two reasons. Under TCG, the memory of a running guest is not copied correctly. And a
// QEMU whose guest was running when the state was complete runs the guest again by itself if the target does not confirm
// the state, although the target may have it.
func (p *Process) SendState(ctx context.Context, rate uint64, stream *os.File) error {
	if err := p.home.setMigrating(); err != nil {
		return err
	}
	if rate == 0 {
		rate = unlimitedRate
	}
	if err := p.do(ctx, p.work, (*raw.Monitor).Stop); err != nil {
		return err
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := setCapabilities(ctx, conn); err != nil {
			return err
		}
		if err := conn.Do(ctx, "migrate-set-parameters", object{"max-bandwidth": rate}, nil); err != nil {
			return err
		}
		if err := conn.SendFD(ctx, "migration", stream); err != nil {
			return err
		}
		return conn.Do(ctx, "migrate", object{"uri": "fd:migration"}, nil)
	})
}

// EndMirrors ends the copies of the disks, which are complete then. QEMU must be in the status pre-switchover. It
// returns an error if a copy is not complete.
func (p *Process) EndMirrors(ctx context.Context) error {
	if err := p.endMirrors(ctx, false); err != nil {
		return fmt.Errorf("complete the copies of the disks: %w", err)
	}
	return nil
}

// endMirrors ends the jobs that copy disks to the target, and removes the jobs and the target nodes. If force is true,
// the copies need not be complete.
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

// endMirror makes the job of a copy end, or removes the job if it has ended.
func (p *Process) endMirror(ctx context.Context, m Mirror, force bool) error {
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if m.Ended {
			return conn.Do(ctx, "job-dismiss", object{"id": mirrorPrefix + m.node}, nil)
		}
		return conn.Do(ctx, "block-job-cancel", object{"device": mirrorPrefix + m.node, "force": force}, nil)
	})
	return refused(err) // The job is ending already, or has just ended.
}

// removeMirrorNodes removes the nodes through which the disks were copied, which closes their streams.
func (p *Process) removeMirrorNodes(ctx context.Context) error {
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		var nodes []struct {
			Name string `json:"node-name"`
		}
		if err := conn.Do(ctx, "query-named-block-nodes", object{"flat": true}, &nodes); err != nil {
			return err
		}
		for _, d := range p.Record().Spec.Disks {
			if !slices.ContainsFunc(nodes, func(n struct {
				Name string `json:"node-name"`
			}) bool {
				return n.Name == d.mirrorNode()
			}) {
				continue
			}
			if err := conn.Do(ctx, "blockdev-del", object{"node-name": d.mirrorNode()}, nil); err != nil {
				return err
			}
		}
		return nil
	})
}

// HandOver makes QEMU give up the disks and send the last part of the state. QEMU must be in the status pre-switchover.
// The caller must have recorded that the guest may run at the target from now on.
func (p *Process) HandOver(ctx context.Context) error {
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "migrate-continue", object{"state": "pre-switchover"}, nil)
	})
}

// CancelMigration ends what is left of a migration in the QEMU of a source, and returns when QEMU no longer sends
// anything. The caller must have closed the streams first (tunnel.Stop): a stream whose peer does not answer would delay
// the end of a copy. The guest stays stopped until ResumeMigrated.
func (p *Process) CancelMigration(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, mirrorEndTimeout)
	defer cancel()
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "migrate_cancel", nil, nil)
	})
	for err == nil {
		var m Migration
		if m, err = p.Migration(ctx); err == nil && !m.Active() {
			break
		}
		if pause(ctx, migrationPoll); ctx.Err() != nil {
			err = ctx.Err()
		}
	}
	if err = errors.Join(err, p.endMirrors(ctx, true)); err != nil {
		return fmt.Errorf("cancel migration: %w", err)
	}
	return nil
}
