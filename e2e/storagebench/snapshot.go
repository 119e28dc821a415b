package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// measureSnapshot measures how long it takes until a copy of a volume in use is complete. The copy has the content of
// one instant, and the guest runs meanwhile.
func measureSnapshot(ctx context.Context, s *site) error {
	p, err := s.pair(ctx, 0)
	if err != nil {
		return err
	}
	// Both disks get the same content, so that both copies have as many bytes.
	for _, m := range []*machine{p.ours, p.hand} {
		if _, err := m.load(ctx, s.loadOf("vda", "write")...); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	s.results.Note("snapshot", fmt.Sprintf("%d MiB of the volume are written", s.size.span))
	return s.InTurn(ctx, s.fewer(),
		func(round int) error { return s.snapshotOurs(ctx, p.ours, round) },
		func(int) error { return s.snapshotByHand(ctx, p.hand) },
	)
}

func (s *site) snapshotOurs(ctx context.Context, m *machine, round int) error {
	service := storagev1.NewSnapshotServiceClient(s.cloud.Admin.Conn())
	began := time.Now()
	made, err := service.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{
		OrgId: onehost.Org, ProjectId: project, VolumeId: m.volume, Name: fmt.Sprintf("snapshot-%d", round),
	})
	if err != nil {
		return err
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()
	for status := made; status.GetStatus() != storagev1.SnapshotStatus_SNAPSHOT_STATUS_AVAILABLE; {
		if status.GetStatus() == storagev1.SnapshotStatus_SNAPSHOT_STATUS_ERROR {
			return fmt.Errorf("the snapshot is in ERROR: %s", status.GetStatusReason())
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
		status, err = service.GetSnapshot(ctx, &storagev1.GetSnapshotRequest{
			OrgId: onehost.Org, ProjectId: project, SnapshotId: made.GetId(),
		})
		if err != nil {
			return err
		}
	}
	s.results.Ours("snapshot", milliseconds(time.Since(began)))
	_, err = service.DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{
		OrgId: onehost.Org, ProjectId: project, SnapshotId: made.GetId(),
	})
	return err
}

// firstDisk is the name of the block node of the first disk of a guest, as package qemu of the agent names it.
const firstDisk = "virtio0"

// snapshotByHand copies the disk with the job blockdev-backup of QEMU to a new sparse file, and flushes the file.
func (s *site) snapshotByHand(ctx context.Context, m *machine) (err error) {
	path := filepath.Join(m.dir, "snapshot.raw")
	began := time.Now()
	if err := makeRaw(path, 1<<30); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(path)) }()
	target := object{
		"driver": "raw", "node-name": "copy", "discard": "unmap",
		"file": object{"driver": "file", "filename": path, "discard": "unmap"},
	}
	if err := m.qmp.Do(ctx, "blockdev-add", target, nil); err != nil {
		return err
	}
	mark := m.qmp.Mark()
	job := object{"job-id": "copy", "device": firstDisk, "target": "copy", "sync": "full"}
	if err := m.qmp.Do(ctx, "blockdev-backup", job, nil); err != nil {
		return err
	}
	var result struct{ Error string }
	end, err := m.qmp.Wait(ctx, mark, func(e qmp.Event) bool { return e.Name == "BLOCK_JOB_COMPLETED" })
	if err != nil {
		return err
	}
	if err := end.Decode(&result); err != nil {
		return err
	}
	if result.Error != "" {
		return errors.New("blockdev-backup: " + result.Error)
	}
	if err := m.qmp.Do(ctx, "blockdev-del", object{"node-name": "copy"}, nil); err != nil {
		return err
	}
	if err := syncFile(path); err != nil {
		return err
	}
	s.results.Peer("snapshot", milliseconds(time.Since(began)))
	return nil
}
