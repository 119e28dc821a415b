package storage

import (
	"context"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// maxFlattens is the maximum number of volumes that Storage flattens concurrently. It does not limit the number of
	// volumes that QEMU processes flatten for running VMs.
	maxFlattens = 2
	// The maximum time to flatten a volume is flattenWithin plus flattenPerGiB for each GiB of the volume's size.
	flattenWithin = 10 * time.Minute
	flattenPerGiB = 30 * time.Second
)

// errLater means that a volume cannot be flattened now: its VM is about to open it, the volume's desired state has
// changed, or the maximum number of volumes is being flattened.
var errLater = fmt.Errorf("flatten the volume later: %w", volume.ErrInUse)

// flatten makes a volume independent of its image. If a VM has a volume in a directory open, flatten returns an error
// that wraps volume.ErrInUse, and the VM's QEMU flattens the volume. flatten is cancelled if a VM opens the volume or
// the desired state changes, and then returns errLater. Storage calls flatten again later if the volume is still not
// flattened.
func (s *Storage) flatten(ctx context.Context, p pool, want *agentv1.AssignedVolume) error {
	select {
	case s.flattenSlots <- struct{}{}:
		defer func() { <-s.flattenSlots }()
	default:
		return errLater
	}
	ctx, cancel := context.WithTimeout(ctx, flattenWithin+time.Duration(want.GetSizeBytes()>>30)*flattenPerGiB)
	defer cancel()
	id := cloud.VolumeID(want.GetVolumeId())
	if !s.setFlattening(id, want, cancel) {
		return errLater
	}
	defer s.setFlattening(id, want, nil)
	err := p.Flatten(ctx, want.GetVolumeId(), func(percent uint32) { s.FlattenProgress(id, percent, nil) })
	if err != nil && context.Cause(ctx) == context.Canceled {
		return errLater
	}
	return err
}

// setFlattening stores cancel as the function that cancels the flattening of a volume; nil means that no call of
// flatten is running. If cancel is not nil, and the desired state is not want any more or a VM is opening the volume,
// setFlattening returns false and changes nothing.
func (s *Storage) setFlattening(id cloud.VolumeID, want *agentv1.AssignedVolume, cancel context.CancelFunc) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.volumes[id]
	if e == nil || cancel != nil && (e.want != want || e.opening > 0) {
		return false
	}
	e.cancelFlatten = cancel
	return true
}

// stopFlattening cancels a running call of flatten for a volume. No further call of flatten can begin until the caller
// calls the returned function.
func (s *Storage) stopFlattening(id cloud.VolumeID) (allow func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.volumes[id]
	if e == nil {
		return func() {}
	}
	e.opening++
	e.endFlatten()
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		e.opening--
	}
}

// endFlatten cancels a running call of Storage.flatten for the volume. The caller must hold Storage.mu.
func (e *entry) endFlatten() {
	if e.cancelFlatten != nil {
		e.cancelFlatten()
	}
}

// Flattened is called when QEMU has copied all of the volume's image into the volume. QEMU still has the volume open
// for the VM. Flattened records that the volume does not need the image any more.
func (s *Storage) Flattened(ctx context.Context, pool string, id cloud.VolumeID, vm cloud.VMID, generation uint64) error {
	p, err := s.pool(pool)
	if err != nil {
		return err
	}
	if err := p.RecordFlattened(ctx, string(id), volume.Attachment{VM: string(vm), Generation: generation}); err != nil {
		return err
	}
	s.touch(id)
	return nil
}

// FlattenProgress stores the flattened part of a volume in percent, and the error of the last attempt or nil. If either
// has changed enough to be reported (see reportStep), FlattenProgress reports the volume at once while a step for the
// volume is running, and otherwise makes Run report it soon.
func (s *Storage) FlattenProgress(id cloud.VolumeID, percent uint32, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.volumes[id]
	if e == nil {
		return
	}
	failure := ""
	if err != nil {
		failure = brief(err)
	}
	if e.percent/reportStep == percent/reportStep && e.flattenError == failure {
		return
	}
	e.percent, e.flattenError = percent, failure
	if e.busy && e.last != nil {
		o := *e.last
		o.FlattenPercent, o.Error = percent, failure
		s.o.Report(o)
		return
	}
	e.touched = true
	s.notify()
}

// reportStep is the step, in percent, in which the progress of flattening a volume is reported.
const reportStep = 5
