package etcdrpc

import (
	"context"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// leaderlessElections is the number of election timeouts without a leader after which streams that require a leader
// end, as in etcd. They do not end at once, because reopening streams costs more than waiting.
const leaderlessElections = 3

// streamSet holds the open streams that require a leader.
type streamSet struct {
	mu  sync.Mutex
	all map[*context.CancelCauseFunc]struct{}
}

// add adds a stream. The function cancel ends the stream. The caller must call remove when the stream has ended.
func (s *streamSet) add(cancel context.CancelCauseFunc) (remove func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.all == nil {
		s.all = map[*context.CancelCauseFunc]struct{}{}
	}
	s.all[&cancel] = struct{}{}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.all, &cancel)
	}
}

// cancelAll ends all streams with ErrGRPCNoLeader.
func (s *streamSet) cancelAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for cancel := range s.all {
		(*cancel)(rpctypes.ErrGRPCNoLeader)
	}
	clear(s.all)
}

// run ends the streams whenever there has been no leader for leaderlessElections election timeouts, until ctx ends.
func (s *streamSet) run(ctx context.Context, service *kv.Service) {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	hadLeader := true
	for {
		changed := service.LeaderChanged()
		switch now := service.Leader() != 0; {
		case now == hadLeader:
		case now:
			timer.Stop()
		default:
			timer.Reset(leaderlessElections * service.Election())
		}
		hadLeader = service.Leader() != 0
		select {
		case <-changed:
		case <-timer.C:
			if !hadLeader {
				s.cancelAll()
				timer.Reset(leaderlessElections * service.Election()) // for streams that begin before there is a leader
			}
		case <-ctx.Done():
			return
		}
	}
}
