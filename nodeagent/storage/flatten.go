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
	// flattens is the maximum number of volumes that the agent flattens concurrently. It does not limit those that QEMU
	// flattens.
	flattens = 2
	// flattenWithin and flattenPerGiB give the maximum time in which the agent flattens a volume.
	flattenWithin = 10 * time.Minute
	flattenPerGiB = 30 * time.Second
)

// errLater means that a volume cannot be flattened now: its VM has it open or is about to open it, another change of the
// volume is waiting, or enough other volumes are being flattened.
var errLater = fmt.Errorf("flatten the volume later: %w", volume.ErrInUse)

// flatten makes a volume independent of its image if no VM has it open. A VM that opens the volume, and a change of the
// desired state, cancel this. QEMU then continues it, or the agent begins again later.
func (s *Storage) flatten(ctx context.Context, p pool, want *agentv1.AssignedVolume) error {
	select {
	case s.flattens <- struct{}{}:
		defer func() { <-s.flattens }()
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

// setFlattening sets the function that cancels the flattening of a volume, or nil. It returns false and changes nothing
// if the desired state has changed or a VM is opening the volume.
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

// stopFlattening cancels the flattening of a volume by the agent, and prevents another one until the returned function
// is called.
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

// endFlatten cancels the flattening of the volume by the agent. The caller must hold Storage.mu.
func (e *entry) endFlatten() {
	if e.cancelFlatten != nil {
		e.cancelFlatten()
	}
}

// Flattened is called when QEMU has copied all of the volume's image into the volume, which it has open for the VM.
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

// FlattenProgress stores how much of a volume is flattened, in percent, and why the last attempt has failed, for the next
// report of the volume. If the volume is not being flattened by the agent itself, it makes Run report the volume soon.
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

// reportStep is the difference, in percent, between two reports of the progress of a volume.
const reportStep = 5
