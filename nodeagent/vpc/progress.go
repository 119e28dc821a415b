package vpc

import (
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// maxFailures and maxError are the limits of SyncNetworksRequest in agent.v1.
	maxFailures = 1000
	maxError    = 1024
)

// progress finds the newest update that all VPCs have applied. Updates are numbered from 1.
type progress struct {
	last     uint64   // number of the newest update
	pending  []update // those that are not acknowledged, and before them the last acknowledged one
	sent     cloud.NetworkAck
	sentOnce bool
}

type update struct {
	seq      uint64
	stream   uint64
	revision int64
}

// add records a new update and returns its number.
func (p *progress) add(stream uint64, revision int64) uint64 {
	p.last++
	p.pending = append(p.pending, update{p.last, stream, revision})
	return p.last
}

// next returns the acknowledgment of all updates that every worker has finished, and whether it differs from the last
// one. A worker that failed has finished: its VPC is in the list of failures.
func (p *progress) next(workers map[cloud.VPCID]*worker) (cloud.NetworkAck, bool) {
	done := p.last
	var failures []cloud.VPCFailure
	for id, w := range workers {
		if w.since != 0 {
			done = min(done, w.since-1)
		}
		if w.err != nil {
			failures = append(failures, cloud.VPCFailure{VPC: id, Error: shorten(w.err.Error())})
		}
	}
	for len(p.pending) > 1 && p.pending[1].seq <= done {
		p.pending = p.pending[1:]
	}
	if len(p.pending) == 0 || p.pending[0].seq > done {
		return cloud.NetworkAck{}, false
	}
	slices.SortFunc(failures, func(a, b cloud.VPCFailure) int { return strings.Compare(string(a.VPC), string(b.VPC)) })
	ack := cloud.NetworkAck{
		Stream: p.pending[0].stream, Revision: p.pending[0].revision, Failures: failures[:min(len(failures), maxFailures)],
	}
	same := p.sentOnce && ack.Stream == p.sent.Stream && ack.Revision == p.sent.Revision &&
		slices.Equal(ack.Failures, p.sent.Failures)
	p.sent, p.sentOnce = ack, true
	return ack, !same
}

// shorten returns at most maxError bytes of valid UTF-8.
func shorten(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxError)], "") }
