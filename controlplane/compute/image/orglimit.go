package image

import (
	"sync"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// orgLimit limits how many places each org takes at a time.
type orgLimit struct {
	max int

	mu    sync.Mutex // guards taken
	taken map[cloud.OrgID]int
}

func newOrgLimit(max int) *orgLimit { return &orgLimit{max: max, taken: map[cloud.OrgID]int{}} }

// take takes a place for an org. It returns false if the org has max places. After the work, the caller calls give.
func (l *orgLimit) take(org cloud.OrgID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken[org] >= l.max {
		return false
	}
	l.taken[org]++
	return true
}

// give returns a place of an org.
func (l *orgLimit) give(org cloud.OrgID) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.taken[org]--; l.taken[org] == 0 {
		delete(l.taken, org)
	}
}
