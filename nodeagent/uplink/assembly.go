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
	errLowerTerm   = errors.New("the member speaks for a term that is over")
	errOutOfOrder  = errors.New("the member sent an older revision after a newer one")
	errNotComplete = errors.New("the member sent a delta before its snapshot was complete")
)

// Ways to break the rules of this file, each caught by TestMutants.
const (
	followLowerTerm  = "follow-lower-term"  // a leader whose term is over is believed
	handOnIncomplete = "hand-on-incomplete" // a snapshot is handed on before its complete mark
)

// assembly puts a watch's messages together. It is pure: what it returns is for the caller to keep and hand on.
type assembly struct {
	term     uint64      // highest ever seen
	held     *Assignment // the newest that is whole; nil before the first
	building *Assignment // a snapshot under way
	whole    bool        // this stream's snapshot is complete
}

// begin starts a new stream: what the last one left unfinished is dropped.
func (a *assembly) begin() { a.building, a.whole = nil, false }

// add takes the stream's next message and returns the assignment when there is a new whole one, nil when more must come.
// After an error the stream is of no use; nothing of the refused message is kept.
func (a *assembly) add(m *agentv1.WatchResponse) (*Assignment, error) {
	if m.GetTerm() < a.term && !mutant.On(followLowerTerm) {
		return nil, fmt.Errorf("%w: term %d, seen %d", errLowerTerm, m.GetTerm(), a.term)
	}
	if a.whole {
		return a.delta(m)
	}
	b := a.building
	if b == nil {
		b = &Assignment{VMs: map[cloud.VMID]*agentv1.AssignedVm{}}
	}
	if m.GetRevision() < b.Revision {
		return nil, errOutOfOrder
	}
	b.Term, b.Revision = m.GetTerm(), m.GetRevision()
	for _, vm := range m.GetVms() {
		b.VMs[cloud.VMID(vm.GetVmId())] = vm
	}
	for _, id := range m.GetReleasedVms() {
		b.Released = append(b.Released, cloud.VMID(id))
	}
	b.Images = append(b.Images, m.GetImages()...)
	a.term, a.building = m.GetTerm(), b
	if !m.GetComplete() && !mutant.On(handOnIncomplete) {
		return nil, nil
	}
	a.held, a.building, a.whole = b, nil, true
	return b, nil
}

func (a *assembly) delta(m *agentv1.WatchResponse) (*Assignment, error) {
	if !m.GetComplete() {
		return nil, errNotComplete
	}
	if m.GetRevision() < a.held.Revision {
		return nil, errOutOfOrder
	}
	a.term = m.GetTerm()
	if len(m.GetVms()) == 0 && len(m.GetReleasedVms()) == 0 && len(m.GetImages()) == 0 {
		return nil, nil // a console request, or a sign of life
	}
	n := &Assignment{Term: m.GetTerm(), Revision: m.GetRevision(), VMs: maps.Clone(a.held.VMs), Images: slices.Clone(a.held.Images)}
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
	a.held = n
	return n, nil
}
