package storage

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// runCopy makes the snapshots of a copyTask, and records the result of each. If the copies cannot be begun now, runCopy
// records nothing and returns nil after laterPause. The caller logs the error and must not act on it.
func (s *Storage) runCopy(ctx context.Context, t *copyTask) error {
	copies, err := s.copyVolumes(ctx, t)
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordWithin)
	defer cancel()
	if errors.Is(err, volume.ErrNotNow) || errors.Is(err, volume.ErrInUse) || errors.Is(err, volume.ErrStale) {
		s.setNotBegun(t, brief(err))
		for _, c := range copies {
			err = errors.Join(err, c.Abandon(late))
		}
		timer := time.NewTimer(laterPause)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
		}
		return nil // Storage tries again until the deadline of the snapshot.
	}
	s.setNotBegun(t, "")
	if err == nil {
		s.made.Add(uint64(len(copies)))
		return nil
	}
	s.failures.Add(uint64(len(t.members)))
	reason := copyError(ctx, err)
	for _, c := range copies {
		err = errors.Join(err, c.Fail(late, reason))
	}
	for _, m := range t.members { // FailSnapshot changes only snapshots whose copies were not begun.
		p, poolErr := s.snapshotPool(m.want)
		if poolErr == nil {
			poolErr = p.FailSnapshot(late, m.ref, reason)
		}
		err = errors.Join(err, poolErr)
	}
	return err
}

// copyError returns the text that tells a tenant why a copy failed.
func copyError(ctx context.Context, err error) string {
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fmt.Sprintf("the copy took longer than %s", copyWithin)
	case ctx.Err() != nil:
		return "the copy was cancelled, because the agent stopped or a snapshot of the group was deleted"
	case strings.Contains(err.Error(), "No space left on device"):
		return "the storage pool is full"
	case strings.Contains(err.Error(), "Operation canceled"):
		return "a volume was detached during the copy"
	}
	return brief(err)
}

// copyVolumes copies the volumes of a copyTask. All copies have the content of the same instant. After an error,
// copyVolumes returns the copies that it began, and the caller must end them.
func (s *Storage) copyVolumes(ctx context.Context, t *copyTask) (copies []snapshotCopy, err error) {
	var attached []volume.CopyTarget
	vm := ""
	for _, m := range t.members {
		p, err := s.snapshotPool(m.want)
		if err != nil {
			return copies, err
		}
		c, err := p.begin(ctx, m)
		if err != nil {
			return copies, err
		}
		copies = append(copies, c)
		if !c.Attached() {
			continue
		}
		if vm != "" && vm != m.want.GetVmId() || m.want.GetVmId() == "" || s.o.Copy == nil {
			return copies, fmt.Errorf("%w: volume %s", volume.ErrNotNow, m.ref.Volume)
		}
		vm = m.want.GetVmId()
		attached = append(attached, c.target(m.ref.Volume))
	}
	if len(attached) > 0 {
		if err := s.checkClusters(ctx, vm, t); err != nil {
			return copies, err
		}
	}
	// The content of detached volumes does not change: Pool.BeginSnapshot has locked their files, and copyAllDetached
	// checks that no VM has opened an RBD volume.
	taken, consistency := time.Now(), crashConsistent
	if len(attached) > 0 {
		result, err := s.o.Copy(ctx, cloud.VMID(vm), attached)
		if err != nil {
			return copies, err
		}
		if taken = result.Taken; result.Frozen {
			consistency = fileSystem
		}
	}
	if err := copyAllDetached(ctx, copies); err != nil {
		return copies, err
	}
	for _, c := range copies {
		of := consistency
		if !c.Attached() {
			of = detachedVolume
		}
		if err := c.Finish(ctx, taken, of); err != nil {
			return copies, err
		}
	}
	return copies, nil
}

// copyAllDetached copies the content of the volumes that no process has open. If there are several copies, and a VM has
// opened one of these volumes meanwhile, the copies may have the content of different instants. The error then wraps
// volume.ErrNotNow.
func copyAllDetached(ctx context.Context, copies []snapshotCopy) error {
	for _, c := range copies {
		if c.Attached() {
			continue
		}
		if err := c.copyDetached(ctx); err != nil {
			return err
		}
		if c.Attached() && len(copies) > 1 && !mutant.On(mutant.TwoInstants) {
			return fmt.Errorf("%w: a VM has opened a volume while the snapshots were taken", volume.ErrNotNow)
		}
	}
	return nil
}

// checkClusters returns an error that wraps volume.ErrNotNow unless the Ceph clusters of all RBD volumes of the VM
// answer. Before QEMU copies a disk, it waits for the I/O requests of all disks of the VM, and executes no QMP command
// in this time. If a cluster does not answer, QEMU would hang. The volumes of the copyTask itself need no check,
// because their clusters have just answered the begin of their snapshots.
func (s *Storage) checkClusters(ctx context.Context, vm string, t *copyTask) error {
	ctx, cancel := context.WithTimeout(ctx, clusterWithin)
	defer cancel()
	s.mu.Lock()
	var check []*agentv1.AssignedVolume
	for id, e := range s.volumes {
		member := slices.ContainsFunc(t.members, func(m copyMember) bool { return m.ref.Volume == string(id) })
		if e.want.GetRbd() != nil && e.want.GetVmId() == vm && !member {
			check = append(check, e.want)
		}
	}
	s.mu.Unlock()
	for _, want := range check {
		p, err := s.poolOf(want)
		if err == nil {
			_, err = p.Status(ctx, want.GetVolumeId())
		}
		if err != nil && !errors.Is(err, volume.ErrNotFound) {
			return fmt.Errorf("%w: the VM also has volume %s: %w", volume.ErrNotNow, want.GetVolumeId(), err)
		}
	}
	return nil
}

// setNotBegun stores the reason why a copyTask could not be begun, for whyNotBegun, or "" if it was begun.
func (s *Storage) setNotBegun(t *copyTask, reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range t.members {
		if e := s.volumes[cloud.VolumeID(m.ref.Volume)]; e != nil {
			e.notBegun = reason
		}
	}
}

// whyNotBegun returns the last reason why a copyTask of the volume of ref could not be begun, as the end of an error
// text: ": " and the reason, or "".
func (s *Storage) whyNotBegun(ref volume.SnapshotRef) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.volumes[cloud.VolumeID(ref.Volume)]; e != nil && e.notBegun != "" {
		return ": " + e.notBegun
	}
	return ""
}

// SnapshotCounts returns the number of snapshots that were made since the agent started, and the number that failed.
func (s *Storage) SnapshotCounts() (made, failed uint64) { return s.made.Load(), s.failures.Load() }
