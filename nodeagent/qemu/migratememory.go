package qemu

import (
	"context"
	"errors"
	"slices"

	"github.com/digitalocean/go-qemu/qmp/raw"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

const (
	// leastDowntime is QEMU's downtime limit until StopGuest, in milliseconds. QEMU goes to the status pre-switchover as
	// soon as it could send the rest within this time. See addHold for a guest that runs.
	leastDowntime = 1
	// mostDowntime is QEMU's downtime limit after StopGuest, in milliseconds. It is the greatest that QEMU accepts. QEMU
	// then goes to the status pre-switchover within about 100 ms.
	mostDowntime = 2_000_000
)

// stateSuspended is the state of QEMU while its guest is in the ACPI state S3.
const stateSuspended = "suspended"

var errSuspended = errors.New("the guest is suspended (ACPI S3): wake it up first")

// SendState stops the guest and makes QEMU send its memory and the state of its devices to the target's QEMU. When all
// but the last part is sent, QEMU waits in the status pre-switchover. The guest stays stopped until ResumeMigrated, even
// if SendState fails or the agent is restarted.
//
// Under TCG, the guest must be stopped first: QEMU does not copy the memory of a running guest correctly. SendRunning
// sends the memory while the guest runs.
func (p *Process) SendState(ctx context.Context, rate uint64, to Route) error {
	if err := p.stopForMigration(ctx); err != nil {
		return err
	}
	return p.send(ctx, rate, to, false)
}

// CanSendRunning reports whether SendRunning works with the version of QEMU (see addHold).
func (p *Process) CanSendRunning(ctx context.Context) (bool, error) {
	var v struct {
		QEMU struct{ Major, Minor int } `json:"qemu"`
	}
	err := p.call(ctx, p.inspect, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "query-version", nil, &v)
	})
	return err == nil && holds(v.QEMU.Major, v.QEMU.Minor), err
}

// holds reports whether a QEMU of this version makes further passes over the memory while addHold keeps it from
// completing. QEMU 9 and later begin a further pass only if they could send everything, with the bitmap, within the
// downtime limit.
func holds(major, minor int) bool { return major == 7 && minor >= 2 || major == 8 }

// SendRunning makes QEMU send the memory of the guest to the target's QEMU while the guest runs. In further passes, QEMU
// sends again the pages that the guest has written. QEMU reaches the status pre-switchover only after StopGuest, even
// if the guest writes nothing. The caller must first check CanSendRunning.
func (p *Process) SendRunning(ctx context.Context, rate uint64, to Route) error {
	if err := p.removeHold(ctx); err != nil { // of an earlier attempt
		return err
	}
	if err := p.call(ctx, p.work, addHold); err != nil {
		return err
	}
	return p.send(ctx, rate, to, true)
}

// StopGuest stops the guest of a QEMU that sends memory since SendRunning. QEMU then sends the rest and waits in the
// status pre-switchover, as after SendState. StopGuest can be repeated. The error wraps ErrGuestRan if QEMU has sent all
// of the memory while the guest ran.
func (p *Process) StopGuest(ctx context.Context) error {
	if _, stopped := p.StoppedForMigration(); !stopped {
		if err := p.stopForMigration(ctx); err != nil {
			return err
		}
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "migrate-set-parameters", object{"downtime-limit": mostDowntime}, nil)
	})
}

// CheckMigratable returns errSuspended if the guest is suspended (ACPI S3), and errTPMEnded if the process of the VM's TPM
// has ended. The guest cannot be handed over to another host then.
func (p *Process) CheckMigratable(ctx context.Context) error {
	s, err := p.Status(ctx)
	if err != nil {
		return err
	}
	if s.State == stateSuspended && !mutant.On(mutant.MigrateSuspended) {
		return errSuspended
	}
	return p.checkTPM()
}

// stopForMigration stops the guest, and records that it was stopped before QEMU had sent all of its memory. The record
// is necessary because QEMU also stops a running guest by itself before the status pre-switchover, and its status does
// not show who stopped the guest. QEMU resumes a guest that it stopped by itself if the target does not confirm the
// state. If only the confirmation was lost, the guest would run on both hosts.
//
// A guest that is suspended (ACPI S3) cannot be stopped: QEMU ignores the command stop, and wakes the guest before the
// migration completes. If the TPM's process has ended, QEMU could not send the TPM's state after the guest has been handed
// over. In both cases, stopForMigration returns the error of CheckMigratable and changes nothing.
func (p *Process) stopForMigration(ctx context.Context) error {
	if err := p.CheckMigratable(ctx); err != nil {
		return err
	}
	if err := p.home.setMigrating(""); err != nil {
		return err
	}
	if err := p.do(ctx, p.work, (*raw.Monitor).Stop); err != nil {
		return err
	}
	s, err := p.Status(ctx)
	if err != nil {
		return err
	}
	suspended := s.State == stateSuspended && !mutant.On(mutant.MigrateSuspended)
	if s.Running || suspended || s.State == "finish-migrate" || s.State == "postmigrate" {
		return ErrGuestRan
	}
	return p.home.setMigrating(stoppedMark)
}

// send makes QEMU send the state of the guest, at most at rate bytes per second. 0 means no limit. The parameter hold
// means that addHold was called.
func (p *Process) send(ctx context.Context, rate uint64, to Route, hold bool) error {
	if rate == 0 {
		rate = unlimitedRate
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := setCapabilities(ctx, conn, hold, to.Channels); err != nil {
			return err
		}
		if err := conn.Do(ctx, "migrate-set-parameters", object{"max-bandwidth": rate, "downtime-limit": leastDowntime}, nil); err != nil {
			return err
		}
		if to.Channels > 0 {
			return conn.Do(ctx, "migrate", object{"uri": "unix:" + socketsDir + "/" + to.Socket}, nil)
		}
		if err := conn.SendFD(ctx, "migration", to.Stream); err != nil {
			return err
		}
		return conn.Do(ctx, "migrate", object{"uri": "fd:migration"}, nil)
	})
}

// HandOver makes QEMU close the disks and send the last part of the state. QEMU must be in the status pre-switchover.
// The caller must first have recorded that the guest may run at the target from now on. HandOver returns ErrGuestRan, and
// does nothing, if the guest was not stopped before QEMU had sent its memory.
func (p *Process) HandOver(ctx context.Context) error {
	if _, stopped := p.StoppedForMigration(); !stopped && !mutant.On(mutant.HandOverRunning) {
		return ErrGuestRan
	}
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "migrate-continue", object{"state": "pre-switchover"}, nil)
	})
}

const (
	// holdNode is the name of the hold node, which is the block node of addHold, and of its bitmap. It is the same at
	// the source and the target.
	holdNode = "migration-hold"
	// holdBits is the number of bits in the bitmap. QEMU counts each as one byte that it must send.
	holdBits = 64 << 20
	// holdGranularity is the number of bytes of the node for each bit. It is the smallest that QEMU accepts.
	holdGranularity = 512
)

// addHold adds a block node without data, and a dirty bitmap of this node that QEMU sends to the target after the
// memory. The bitmap keeps QEMU from completing the migration of a running guest.
//
// Without the bitmap, QEMU completes a migration by itself as soon as it could send the rest within its downtime limit,
// which is at least 1 ms. For an idle guest, this happens at the end of the first pass, before the agent can stop the
// guest. QEMU counts the bitmap as holdBits bytes of the rest (dirty_bitmap_save_pending in
// migration/block-dirty-bitmap.c of QEMU 7.2). It could send that many bytes within 1 ms only at more than 60 GB/s.
// QEMU sends the bitmap only when it completes. The bitmap has no set bit, so QEMU then sends less than 1 MB for it.
func addHold(ctx context.Context, conn *qmp.Conn) error {
	if err := addHoldNode(ctx, conn); err != nil {
		return err
	}
	return conn.Do(ctx, "block-dirty-bitmap-add", object{"node": holdNode, "name": holdNode, "granularity": holdGranularity}, nil)
}

// addHoldNode adds the hold node. The target needs only the node.
func addHoldNode(ctx context.Context, conn *qmp.Conn) error {
	return conn.Do(ctx, "blockdev-add", object{"driver": "null-co", "node-name": holdNode, "size": uint64(holdBits) * holdGranularity}, nil)
}

// removeHold removes the hold node, with its bitmap. It does nothing if the node does not exist.
func (p *Process) removeHold(ctx context.Context) error {
	return p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		nodes, err := queryNodes(ctx, conn)
		if err != nil || !slices.Contains(nodes, holdNode) {
			return err
		}
		return conn.Do(ctx, "blockdev-del", object{"node-name": holdNode}, nil)
	})
}
