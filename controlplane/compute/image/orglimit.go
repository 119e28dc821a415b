package image

import (
	"sync"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// orgLimit is a set of semaphores, one for each org. Each of them has max places.
type orgLimit struct {
	max int

	mu    sync.Mutex // guards taken
	taken map[cloud.OrgID]int
}

func newOrgLimit(max int) *orgLimit { return &orgLimit{max: max, taken: map[cloud.OrgID]int{}} }

// take takes a place for an org without waiting. It returns false if the org already has max places. A caller that got
// a place must return it with give.
func (l *orgLimit) take(org cloud.OrgID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken[org] >= l.max {
		return false
	}
	l.taken[org]++
	return true
}

// give returns a place that take has taken for an org.
func (l *orgLimit) give(org cloud.OrgID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken[org]--; l.taken[org] == 0 {
		delete(l.taken, org)
	}
}
