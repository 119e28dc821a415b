package uplink

import (
	"maps"
	"slices"
	"strings"
	"sync"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/convert"
)

// volumeErrorBytes is the length to which an error text about a volume is cut before it is sent, in bytes. A member
// stores at most 1 KiB of the text.
const volumeErrorBytes = 1 << 10

// maxBatchSnapshots is the maximum number of snapshots in one message. It keeps the message below the maximum message
// size.
const maxBatchSnapshots = 1000

// volumeObservations holds the newest observation of each volume, and the set of volumes whose observation must still
// be sent.
type volumeObservations struct {
	wake chan struct{} // shared with the VM observations, whose sender also sends these

	mu      sync.Mutex // guards the fields below
	current map[cloud.VolumeID]cloud.VolumeObservation
	pending map[cloud.VolumeID]bool
}

func newVolumeObservations(wake chan struct{}) *volumeObservations {
	return &volumeObservations{
		wake: wake, current: map[cloud.VolumeID]cloud.VolumeObservation{}, pending: map[cloud.VolumeID]bool{},
	}
}

func (l *volumeObservations) observe(o cloud.VolumeObservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if had, ok := l.current[o.Volume]; ok && had.Equal(o) {
		return
	}
	l.current[o.Volume] = o
	l.queue(o.Volume)
}

func (l *volumeObservations) forget(id cloud.VolumeID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.current, id)
	delete(l.pending, id)
}

func (l *volumeObservations) queueAll() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for id := range l.current {
		l.queue(id)
	}
}

// queue marks a volume so that its observation is in one of the next messages. The caller must hold mu.
func (l *volumeObservations) queue(id cloud.VolumeID) {
	l.pending[id] = true
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

// nextBatch returns the observations for the next message and removes their volumes from the queue. It returns nil if
// the queue is empty.
func (l *volumeObservations) nextBatch() []*agentv1.VolumeObservation {
	l.mu.Lock()
	defer l.mu.Unlock()
	ids := slices.Sorted(maps.Keys(l.pending))
	var out []*agentv1.VolumeObservation
	snapshots := 0
	for _, id := range ids[:min(len(ids), reportBatch)] {
		o := l.current[id]
		if snapshots += len(o.Snapshots); len(out) > 0 && snapshots > maxBatchSnapshots {
			break
		}
		o.Error = strings.ToValidUTF8(o.Error[:min(len(o.Error), volumeErrorBytes)], "")
		out = append(out, convert.VolumeObservation(o))
		delete(l.pending, id)
	}
	return out
}
