package uplink

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

var (
	errLowerTerm   = errors.New("the member sent a message of an earlier term")
	errOutOfOrder  = errors.New("the member sent an older revision after a newer one")
	errNotComplete = errors.New("the member sent a delta before its snapshot was complete")
)

// assembly builds assignments from the messages of a Watch stream. It does no I/O; the caller stores and delivers the
// results.
type assembly struct {
	term     uint64      // highest term of all messages, also of earlier streams
	current  *Assignment // the newest complete assignment; nil before the first
	building *Assignment // the incomplete snapshot of this stream; nil if there is none
	complete bool        // the snapshot of this stream is complete
}

// begin prepares for the messages of a new stream. If the last stream ended within a snapshot, begin discards that
// snapshot.
func (a *assembly) begin() { a.building, a.complete = nil, false }

// add processes the next message of the stream. If the message completes a new assignment, add returns the assignment.
// It returns nil if more messages must follow or the message changes nothing. After an error the caller must end the
// stream; the rejected message has no effect.
func (a *assembly) add(m *agentv1.WatchResponse) (*Assignment, error) {
	if m.GetTerm() < a.term && !mutant.On(mutant.FollowLowerTerm) {
		return nil, fmt.Errorf("%w: term %d, seen %d", errLowerTerm, m.GetTerm(), a.term)
	}
	if a.complete {
		return a.delta(m)
	}
	b := a.building
	if b == nil {
		b = &Assignment{VMs: map[cloud.VMID]*agentv1.AssignedVm{}, Volumes: map[cloud.VolumeID]*agentv1.AssignedVolume{}}
	}
	if m.GetRevision() < b.Revision {
		return nil, errOutOfOrder
	}
	b.Term, b.Revision = m.GetTerm(), m.GetRevision()
	for _, vm := range m.GetVms() {
		b.VMs[cloud.VMID(vm.GetVmId())] = vm
	}
	for _, v := range m.GetVolumes() {
		b.Volumes[cloud.VolumeID(v.GetVolumeId())] = v
	}
	for _, id := range m.GetReleasedVms() {
		b.Released = append(b.Released, cloud.VMID(id))
	}
	b.Images = append(b.Images, m.GetImages()...)
	a.term, a.building = m.GetTerm(), b
	if !m.GetComplete() && !mutant.On(mutant.DeliverIncomplete) {
		return nil, nil
	}
	a.current, a.building, a.complete = b, nil, true
	return b, nil
}

func (a *assembly) delta(m *agentv1.WatchResponse) (*Assignment, error) {
	if !m.GetComplete() {
		return nil, errNotComplete
	}
	if m.GetRevision() < a.current.Revision {
		return nil, errOutOfOrder
	}
	a.term = m.GetTerm()
	if len(m.GetVms()) == 0 && len(m.GetReleasedVms()) == 0 && len(m.GetImages()) == 0 &&
		len(m.GetVolumes()) == 0 && len(m.GetReleasedVolumes()) == 0 {
		return nil, nil // the message is a console request or a keepalive
	}
	n := &Assignment{Term: m.GetTerm(), Revision: m.GetRevision(), VMs: maps.Clone(a.current.VMs),
		Volumes: maps.Clone(a.current.Volumes), Images: slices.Clone(a.current.Images)}
	for _, v := range m.GetVolumes() {
		n.Volumes[cloud.VolumeID(v.GetVolumeId())] = v
	}
	for _, id := range m.GetReleasedVolumes() {
		delete(n.Volumes, cloud.VolumeID(id))
	}
	for _, vm := range m.GetVms() {
		n.VMs[cloud.VMID(vm.GetVmId())] = vm
	}
	for _, id := range m.GetReleasedVms() {
		delete(n.VMs, cloud.VMID(id))
		n.Released = append(n.Released, cloud.VMID(id))
	}
	for _, sha := range m.GetImages() {
		if !slices.Contains(n.Images, sha) {
			n.Images = append(n.Images, sha)
		}
	}
	a.current = n
	return n, nil
}
