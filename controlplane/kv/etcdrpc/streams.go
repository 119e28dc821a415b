package etcdrpc

import (
	"context"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"

	"github.com/trivet-cloud/trivet/controlplane/kv"
)

// patience is the number of election timeouts without a leader after which streams that require a leader end, as in
// etcd. Reopening streams costs more than waiting.
const patience = 3

// streams holds the open streams that require a leader.
type streams struct {
	mu  sync.Mutex
	all map[*context.CancelCauseFunc]struct{}
}

// add adds a stream. The caller calls remove when the stream has ended.
func (s *streams) add(cancel context.CancelCauseFunc) (remove func()) {
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

// end ends all streams.
func (s *streams) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for cancel := range s.all {
		(*cancel)(rpctypes.ErrGRPCNoLeader)
	}
	clear(s.all)
}

// run ends the streams whenever there has been no leader for patience election timeouts.
func (s *streams) run(ctx context.Context, service *kv.Service) {
	gone := time.NewTimer(time.Hour)
	defer gone.Stop()
	led := true
	for {
		changed := service.LeaderChanged()
		switch now := service.Leader() != 0; {
		case now == led:
		case now:
			gone.Stop()
		default:
			gone.Reset(patience * service.Election())
		}
		led = service.Leader() != 0
		select {
		case <-changed:
		case <-gone.C:
			if !led {
				s.end()
				gone.Reset(patience * service.Election()) // for streams that begin meanwhile
			}
		case <-ctx.Done():
			return
		}
	}
}
