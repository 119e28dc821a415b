package netdev

import (
	"context"
	"fmt"
	"sync"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// lock waits for the lock of a VPC and returns the function that releases it. It returns an error for IDs that cannot
// be part of a file name.
func (h *Host) lock(ctx context.Context, id cloud.VPCID) (unlock func(), err error) {
	if !validID.MatchString(string(id)) {
		return nil, fmt.Errorf("VPC ID %q is not a file name", id)
	}
	if id == reservedID {
		return nil, fmt.Errorf("VPC ID %q is reserved", id)
	}
	return h.locks.lock(ctx, id)
}

// vpcLocks holds a lock for each VPC that is in use. The zero value has none.
type vpcLocks struct {
	mu    sync.Mutex
	inUse map[cloud.VPCID]*vpcLock
}

type vpcLock struct {
	free  chan struct{} // has one element while nobody holds the lock
	users int           // holders and waiters
}

// lock waits for the lock of a VPC and returns the function that releases it. It returns the error of ctx when ctx ends
// before.
func (l *vpcLocks) lock(ctx context.Context, id cloud.VPCID) (unlock func(), err error) {
	l.mu.Lock()
	if l.inUse == nil {
		l.inUse = map[cloud.VPCID]*vpcLock{}
	}
	one := l.inUse[id]
	if one == nil {
		one = &vpcLock{free: make(chan struct{}, 1)}
		one.free <- struct{}{}
		l.inUse[id] = one
	}
	one.users++
	l.mu.Unlock()

	select {
	case <-one.free:
		return func() {
			one.free <- struct{}{}
			l.leave(id, one)
		}, nil
	case <-ctx.Done():
		l.leave(id, one)
		return nil, ctx.Err()
	}
}

func (l *vpcLocks) leave(id cloud.VPCID, one *vpcLock) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if one.users--; one.users == 0 {
		delete(l.inUse, id)
	}
}
