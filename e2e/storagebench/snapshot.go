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

// largeGiB is the size of the larger of the two volumes of which measureSnapshot makes snapshots.
const largeGiB = 20

// source is a volume in use, and the disk of the guest that was started by hand with the same size and content.
type source struct {
	line   string // ID of the line
	disk   string // name in the guests
	gib    int
	volume string
	node   string // block node of the QEMU that was started by hand
}

// measureSnapshot measures how long it takes until a copy of a volume in use is complete. The copy has the content of
// one instant, and the guest runs meanwhile. It does so with the first disks of the guests, and with larger ones.
func measureSnapshot(ctx context.Context, s *site) (err error) {
	p, err := s.pair(ctx, 0)
	if err != nil {
		return err
	}
	large, err := s.createVolumeOf(ctx, largeGiB, "")
	if err != nil {
		return err
	}
	if err := s.attach(ctx, p.ours, "large", large); err != nil {
		return err
	}
	file := backing{path: filepath.Join(p.hand.dir, "large.raw")}
	if err := makeRaw(file.path, largeGiB<<30); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.Remove(file.path)) }()
	if err := p.hand.plug(ctx, 1, file); err != nil {
		return err
	}
	for _, m := range []*machine{p.ours, p.hand} {
		if err := m.awaitSectors(ctx, "vdb", largeGiB*sectorsPerGiB); err != nil {
			return err
		}
	}
	for _, from := range []source{
		{"snapshot", "vda", 1, p.ours.volume, firstDisk}, {"snapshot large", "vdb", largeGiB, large, node(1)},
	} {
		if err := s.measureSnapshots(ctx, p, from); err != nil {
			return err
		}
	}
	return errors.Join(p.hand.unplug(ctx, 1, file), s.detach(ctx, p.ours, "large"), s.deleteVolume(ctx, large))
}

func (s *site) measureSnapshots(ctx context.Context, p *pair, from source) error {
	// Both disks get the same content, so that both copies have as many bytes.
	for _, m := range []*machine{p.ours, p.hand} {
		if _, err := m.load(ctx, s.loadOf(from.disk, "write")...); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	s.results.Note(from.line, fmt.Sprintf("%d MiB of the volume are written", s.size.span))
	return s.InTurn(ctx, s.fewer(),
		func(round int) error { return s.snapshotOurs(ctx, from, round) },
		func(int) error { return s.snapshotByHand(ctx, p.hand, from) },
	)
}

func (s *site) snapshotOurs(ctx context.Context, from source, round int) error {
	service := storagev1.NewSnapshotServiceClient(s.cloud.Admin.Conn())
	began := time.Now()
	made, err := service.CreateSnapshot(ctx, &storagev1.CreateSnapshotRequest{
		OrgId: onehost.Org, ProjectId: project, VolumeId: from.volume, Name: fmt.Sprintf("snapshot-%d-%d", from.gib, round),
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
	s.results.Ours(from.line, milliseconds(time.Since(began)))
	_, err = service.DeleteSnapshot(ctx, &storagev1.DeleteSnapshotRequest{
		OrgId: onehost.Org, ProjectId: project, SnapshotId: made.GetId(),
	})
	return err
}

// firstDisk is the name of the block node of the first disk of a guest, as package qemu of the agent names it.
const firstDisk = "virtio0"

// snapshotByHand copies the disk with the job blockdev-backup of QEMU to a new sparse file, and flushes the file.
func (s *site) snapshotByHand(ctx context.Context, m *machine, from source) (err error) {
	path := filepath.Join(m.dir, "snapshot.raw")
	began := time.Now()
	if err := makeRaw(path, int64(from.gib)<<30); err != nil {
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
	job := object{"job-id": "copy", "device": from.node, "target": "copy", "sync": "full"}
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
	s.results.Peer(from.line, milliseconds(time.Since(began)))
	return nil
}
