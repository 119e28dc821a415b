package qemu

import (
	"context"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// firstHotSet is the lowest number of a descriptor set of a disk that is attached to a running QEMU, or of a copy. The
// numbers of the descriptor sets on QEMU's command line are lower.
const firstHotSet = 1000

// newFDSets returns the first of count consecutive numbers of descriptor sets that QEMU has never had. If two disks or
// copies got the same number, or if a disk got the number of a removed set, QEMU might open the file of the other one.
func (p *Process) newFDSets(ctx context.Context, conn *qmp.Conn, count int) (int, error) {
	p.fdSets.Lock()
	defer p.fdSets.Unlock()
	if p.nextFDSet == 0 { // An earlier agent may have added sets.
		all, err := queryFDSets(ctx, conn)
		if err != nil {
			return 0, err
		}
		p.nextFDSet = firstHotSet
		for _, s := range all {
			p.nextFDSet = max(p.nextFDSet, s.Set+1)
		}
	}
	first := p.nextFDSet
	if !mutant.On(mutant.ReuseFDSets) {
		p.nextFDSet += count
	}
	return first, nil
}

// fdSet is a descriptor set of QEMU.
type fdSet struct {
	Set int `json:"fdset-id"`
	FDs []struct {
		Opaque string `json:"opaque"`
	} `json:"fds"`
}

func queryFDSets(ctx context.Context, conn *qmp.Conn) (all []fdSet, err error) {
	err = conn.Do(ctx, "query-fdsets", nil, &all)
	return all, err
}

// removeFDSets removes the descriptor sets whose descriptors have one of the given names. QEMU closes the descriptors
// of a removed set only while the guest runs. The agent can lock the file as soon as QEMU has closed the descriptors.
func removeFDSets(ctx context.Context, conn *qmp.Conn, names ...string) error {
	all, err := queryFDSets(ctx, conn)
	if err != nil {
		return err
	}
	for _, s := range all {
		for _, fd := range s.FDs {
			if !slices.Contains(names, fd.Opaque) {
				continue
			}
			if err := conn.Do(ctx, "remove-fd", object{"fdset-id": s.Set}, nil); err != nil {
				return err
			}
			break
		}
	}
	return nil
}
