// Package storage brings the volumes of this host to the state that the control plane desires, and reports them.
//
// A [Storage] manages the storage pools of the host. [Storage.Assign] takes the complete desired state of the host's
// volumes. [Storage.Run] then makes, grows and deletes volumes, and ends the attachments of detached ones. VMs get
// their volumes from [Storage.Open], and return them with [Storage.Release]. Package volume handles the files.
//
// # Decisions
//
//   - The desired state of an attached volume arrives twice: in the list of volumes, and in the disk of its VM. The
//     desired state with the higher generation is valid (see [WithNewestVolumes]). Open refuses a volume unless this
//     valid desired state attaches it to the VM.
//   - Open makes and grows the volume if Run has not done so yet. A VM therefore does not wait for another goroutine.
//     Only a volume with the content of a snapshot is always made by Run, because a start of the VM has less time
//     than the copy.
//   - If QEMU still has a volume open, its detachment or deletion is repeated later. This is not reported as an error
//     of the volume, because the report of the VM says when a guest does not release a disk.
//   - The control plane sends the key of an encrypted volume only in the list of volumes, and the agent stores the key
//     only in memory. After a restart of the agent, an encrypted volume cannot be opened until the control plane has
//     sent the key again. A guest that has the volume open keeps running.
//   - An assignment that was stored on disk may be outdated, so it deletes no volume.
//   - A volume that is in no assignment is kept and logged, because the control plane may have lost the volume's
//     record.
//   - Storage flattens a volume that no VM has open. When a VM opens the volume, Storage stops and the VM's QEMU
//     flattens the volume, so a VM never waits until a volume is flattened. The Ceph cluster flattens an RBD image,
//     also while a VM has it open. Progress is reported in steps of 5 percent.
//   - Snapshots are made in separate goroutines, because a copy may take hours. Snapshots of several volumes that must
//     have the content of the same instant form a group, and one goroutine makes all of them. If a copy cannot be
//     begun, for example because the VM is just being started, the attempt is repeated until the deadline in the
//     assignment. A copy that has begun and failed is never repeated. Storage does not flatten a volume with a
//     pending snapshot, because flattening locks the volume.
//   - Storage flattens a volume that was made from a snapshot of an RBD volume without a request, so that the snapshot
//     can be deleted.
//   - The helper process trivet-rbd makes, grows, flattens and deletes RBD images. One helper runs for each combination
//     of Ceph cluster, monitors, user and key in the assigned volumes. The key of the Ceph user is part of the desired
//     state. An assignment that was stored on disk has no keys, so Storage does not change RBD images until the control
//     plane has sent the assignment.
//   - Each host that has volumes of a Ceph pool deletes the unused base images in it. When no host has volumes of the
//     pool any more, no host has the key of the Ceph user, so the base images remain.
//   - An RBD image has no lock between Open and the moment at which QEMU has opened the image. The host does not
//     detach the volume in this time, and the VM checks the attachment afterwards ([Storage.Confirm]), because
//     another host or the next agent may have ended it.
//   - Hosts that share a pool have different volumes assigned. If another host has a volume open that is assigned to
//     this host as detached, because the control plane has given up the other host, the error is reported and the
//     detachment is tried again.
//   - During a migration of a VM, two hosts have its volumes assigned. Only one of them is the VM's host. The other one
//     has AssignedVolume.standby: it neither makes nor changes nor opens the volumes, except that the target opens them
//     for a QEMU that does not write yet ([Storage.OpenStandby]). At the switchover, the target gets the volumes with a
//     higher generation ([Storage.Activate]). If the migration is undone after that, the source gets them back with a
//     still higher generation, after it has made sure that the target's QEMU cannot write ([Storage.TakeBack]).
//   - A pool that cannot be opened, for example because its file system is not mounted, is opened again later. Until
//     then its volumes are reported with the error, and the host does not report the pool.
package storage

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Options are the dependencies of a Storage. All but Copy, RBD and Encrypter are required.
type Options struct {
	Pools []volume.Options
	// RBD has the settings of the helper process trivet-rbd. If RBD.Program is empty, the host serves no RBD volumes.
	RBD rbd.Options
	// Images is the cache of the images from which RBD volumes are made.
	Images *disk.Images
	// Encrypter makes encrypted RBD volumes. If it is nil, the host cannot make them.
	Encrypter volume.Encrypter
	// Report is called with the state of a volume after each check, even if the state has not changed. It must not
	// block.
	Report func(cloud.VolumeObservation)
	// Forget is called for a volume that is not reported any more.
	Forget func(cloud.VolumeID)
	// Copy copies volumes of a running VM. All copies have the content of the same instant. The error wraps
	// volume.ErrNotNow if no copy was begun. If Copy is nil, no snapshots can be made of volumes that a VM has open.
	Copy func(ctx context.Context, vm cloud.VMID, targets []volume.CopyTarget) (volume.Copied, error)
	Log  *slog.Logger
}

// Storage has the storage pools and volumes of a host. Its methods are safe for concurrent use.
type Storage struct {
	o    Options
	wake chan struct{} // capacity 1

	copiers        sync.WaitGroup // the goroutines of copies
	made, failures atomic.Uint64  // numbers of made and failed snapshots

	mu      sync.Mutex // guards the fields below
	pools   map[string]*volume.Pool
	ceph    *ceph
	failed  map[string]error // why pools could not be opened
	volumes map[cloud.VolumeID]*entry
	current bool                 // an assignment that was not read from disk has arrived
	copies  map[string]*copyTask // the copies in progress, by group ID, or snapshot ID without a group
	unknown map[string]string    // the last logged text about unknown volumes and files, by pool

	flattenSlots chan struct{} // semaphore; limits concurrent calls of flatten
	restoreSlots chan struct{} // semaphore; limits the volumes that are being made from snapshots
}

// entry is a volume with a desired state. Storage.mu guards its fields.
type entry struct {
	want    *agentv1.AssignedVolume
	stored  bool // want was read from disk
	touched bool // want or the volume has changed since the last step began
	busy    bool // a step is in progress
	fails   int  // steps in a row that ended with an error
	again   time.Time
	logged  string

	notBegun      string                   // the last reason why a copyTask of the volume could not be begun, or ""
	last          *cloud.VolumeObservation // the last report
	opening       int                      // calls of Open in progress
	unconfirmed   bool                     // Open has returned the RBD image, and Confirm or Release was not called since
	cancelFlatten context.CancelFunc       // set while the agent flattens the volume
	percent       uint32                   // flattened part of the volume
	flattenError  string                   // last error of QEMU's attempt to flatten the volume, or ""
}

const (
	// steps is the maximum number of volumes that are changed concurrently.
	steps = 8
	// stepWithin is the maximum time of a step for one volume. A step may fetch an image. Flattening has its own limit
	// (flattenWithin). copyPerGiB is added for each GiB of a volume that is made from a snapshot.
	stepWithin = 10 * time.Minute
	copyPerGiB = 30 * time.Second
	// maxRestores is the maximum number of volumes that are made from snapshots concurrently. It is lower than steps,
	// so that the copies do not delay the changes of other volumes.
	maxRestores = 2
	firstPause  = 500 * time.Millisecond
	lastPause   = 30 * time.Second
	// inUsePause is the time between two attempts after a temporary error (see isTemporary).
	inUsePause = time.Second
	// checkEvery is the interval at which Run checks volumes that have reached their desired state, and tries again to
	// open pools that could not be opened.
	checkEvery = time.Minute
	openWithin = 10 * time.Second
	// sweepEvery is the interval at which Run deletes data that is not needed any more: base images in Ceph pools that
	// no volume has needed for the duration keepBases, the remains of deleted volumes, and the records of deletions
	// that are older than keepDeletions. sweepWithin is the maximum time for the base images of one Ceph pool, and
	// again for its deletions.
	sweepEvery    = time.Hour
	keepBases     = 24 * time.Hour
	keepDeletions = 30 * 24 * time.Hour
	sweepWithin   = 10 * time.Minute
)

// New opens the pools of the host. It logs the pools that cannot be opened, and Run tries to open them again.
func New(ctx context.Context, o Options) *Storage {
	s := &Storage{
		o: o, wake: make(chan struct{}, 1), pools: map[string]*volume.Pool{}, failed: map[string]error{}, ceph: newCeph(o),
		volumes: map[cloud.VolumeID]*entry{}, copies: map[string]*copyTask{}, unknown: map[string]string{},
		flattenSlots: make(chan struct{}, maxFlattens), restoreSlots: make(chan struct{}, maxRestores),
	}
	s.openPools(ctx)
	return s
}

// openPools opens the pools that are not open yet.
func (s *Storage) openPools(ctx context.Context) {
	for _, o := range s.o.Pools {
		s.mu.Lock()
		open, last := s.pools[o.Name] != nil, s.failed[o.Name]
		s.mu.Unlock()
		if open {
			continue
		}
		bounded, cancel := context.WithTimeout(ctx, openWithin)
		pool, err := volume.OpenPool(bounded, o)
		cancel()
		if err != nil {
			if last == nil || last.Error() != err.Error() {
				s.o.Log.Warn("cannot use a storage pool", "err", err)
			}
		}
		s.mu.Lock()
		if err == nil {
			s.pools[o.Name] = pool
			delete(s.failed, o.Name)
		} else {
			s.failed[o.Name] = err
		}
		s.mu.Unlock()
	}
}

// Close closes the pools. It must be called after Run has returned. Volumes that QEMU has open stay open.
func (s *Storage) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.pools {
		p.Close()
	}
	s.ceph.close()
}

// Assign sets the desired states of all volumes to those of the newest complete assignment. If stored is true, the
// assignment was read from disk and may be outdated. Assign does not block.
func (s *Storage) Assign(volumes map[cloud.VolumeID]*agentv1.AssignedVolume, stored bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, want := range volumes {
		s.setDesired(id, want, stored)
	}
	for id := range s.volumes {
		if volumes[id] == nil {
			s.volumes[id].endFlatten()
			delete(s.volumes, id)
			s.o.Forget(id)
		}
	}
	s.current = !stored
	s.ceph.keep(volumes)
	s.notify()
}

// setDesired sets the desired state of a volume, unless a newer desired state is known. The caller must hold mu.
func (s *Storage) setDesired(id cloud.VolumeID, want *agentv1.AssignedVolume, stored bool) {
	e := s.volumes[id]
	switch {
	case e == nil:
		e = &entry{}
		s.volumes[id] = e
	case e.want.GetGeneration() > want.GetGeneration() && !mutant.On(mutant.AcceptOldList), e.stored == stored && proto.Equal(e.want, want):
		return
	}
	e.endFlatten()
	// The remaining fields are reset, because their values belong to the old desired state.
	*e = entry{want: want, stored: stored, touched: true, busy: e.busy, opening: e.opening,
		unconfirmed: e.unconfirmed, percent: e.percent, cancelFlatten: e.cancelFlatten}
}

// touch makes Run check a volume soon.
func (s *Storage) touch(id cloud.VolumeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.volumes[id]; e != nil {
		e.touched = true
		s.notify()
	}
}

func (s *Storage) notify() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Run brings the volumes to their desired states until ctx ends. Then it waits for the steps in progress.
func (s *Storage) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer s.copiers.Wait()
	defer running.Wait()
	slots := make(chan struct{}, steps)
	checked, swept := time.Now(), time.Now()
	s.logUnknown()
	for ctx.Err() == nil {
		next := time.Now().Add(checkEvery)
		for _, id := range s.due(time.Now(), &next) {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				return ctx.Err()
			}
			e, want, stored := s.begin(id)
			if want == nil {
				<-slots
				continue
			}
			running.Go(func() {
				defer func() { <-slots }()
				s.end(ctx, e, want, s.step(ctx, want, stored))
			})
		}
		timer := time.NewTimer(max(time.Until(next), 0))
		select {
		case <-s.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
		if time.Since(checked) >= checkEvery {
			checked = time.Now()
			s.openPools(ctx)
			s.logUnknown()
		}
		if time.Since(swept) >= sweepEvery {
			swept = time.Now()
			running.Go(func() { s.sweep(ctx) })
		}
	}
	return ctx.Err()
}

// sweep deletes data of Ceph pools and of shared pools that is not needed any more. After an error, it logs a warning
// and continues.
func (s *Storage) sweep(ctx context.Context) {
	s.ceph.sweep(ctx, s.assigned())
	for _, p := range s.Pools() {
		if err := p.ForgetDeletions(ctx, keepDeletions); err != nil && ctx.Err() == nil {
			s.o.Log.Warn("cannot remove old records of deleted volumes from a storage pool", "err", err)
		}
	}
}

// due returns the volumes for which a step is due at the time now. If a step is due only later, due lowers *next to the
// time of that step.
func (s *Storage) due(now time.Time, next *time.Time) (ids []cloud.VolumeID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, e := range s.volumes {
		switch {
		case e.busy: // the end of the step wakes Run
		case e.touched || !e.again.After(now):
			ids = append(ids, id)
		case e.again.Before(*next):
			*next = e.again
		}
	}
	slices.Sort(ids)
	return ids
}

// begin marks a volume as busy, and returns its desired state. It returns nil if the volume has no desired state any
// more, or a step of the volume is in progress.
func (s *Storage) begin(id cloud.VolumeID) (e *entry, want *agentv1.AssignedVolume, stored bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e = s.volumes[id]; e == nil || e.busy {
		return nil, nil, false
	}
	e.busy, e.touched = true, false
	return e, e.want, e.stored
}

// end schedules the next step of a volume whose last step returned err. It logs err if this differs from the last
// logged error of the volume.
func (s *Storage) end(ctx context.Context, e *entry, want *agentv1.AssignedVolume, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e.busy = false
	s.notify()
	switch {
	case err == nil:
		e.fails, e.logged, e.again = 0, "", time.Now().Add(checkEvery)
	case isTemporary(err):
		e.again = time.Now().Add(inUsePause)
	default:
		e.again = time.Now().Add(min(firstPause<<min(e.fails, 10), lastPause))
		e.fails++
		if e.logged != err.Error() && ctx.Err() == nil {
			e.logged = err.Error()
			s.o.Log.Warn("volume", "volume", want.GetVolumeId(), "pool", want.GetPool(), "err", err)
		}
	}
}

// report reports a volume, unless it has no desired state any more.
func (s *Storage) report(o cloud.VolumeObservation) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.volumes[o.Volume]; e != nil {
		o.FlattenPercent = e.percent
		if o.Error == "" {
			o.Error = e.flattenError
		}
		if o.Flattened {
			o.FlattenPercent, e.percent, e.flattenError = 100, 100, ""
		}
		e.last = &o
		s.o.Report(o)
	}
}
