package machine

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// addressInterval is the minimum time between two queries for the addresses of one guest. It limits the time
	// that is lost to guests whose agent does not answer.
	addressInterval = time.Minute
	// addressesValid is how long addresses are reported after the guest agent has listed them.
	addressesValid = 5 * time.Minute
	// addressWithin is the maximum time of one query, and addressesAtOnce the maximum number of concurrent queries.
	addressWithin   = 5 * time.Second
	addressesAtOnce = 4
)

// guestAddresses are the addresses that a guest agent has listed.
type guestAddresses struct {
	asked time.Time // the last query, unless no guest agent runs in the guest
	at    time.Time // the last query that succeeded
	list  []string
}

// valid returns the addresses, or nil if they are too old.
func (a guestAddresses) valid() []string {
	if time.Since(a.at) > addressesValid {
		return nil
	}
	return a.list
}

// ReadGuestAddresses reads the addresses of those guests that have a guest agent and were not asked within
// addressInterval. Measure adds the addresses to its results.
func (s *MachineSet) ReadGuestAddresses(ctx context.Context) {
	var asking sync.WaitGroup
	places := make(chan struct{}, addressesAtOnce)
	for _, v := range s.machines() {
		v.mu.Lock()
		p, due := v.process, time.Since(v.addresses.asked) >= addressInterval
		v.mu.Unlock()
		if p == nil || !due {
			continue
		}
		places <- struct{}{} // blocks for at most addressWithin
		asking.Go(func() {
			defer func() { <-places }()
			v.readAddresses(ctx, p)
		})
	}
	asking.Wait()
}

func (v *VM) readAddresses(ctx context.Context, p *qemu.Process) {
	ctx, cancel := context.WithTimeout(ctx, addressWithin)
	defer cancel()
	all, err := p.GuestAddresses(ctx)
	if errors.Is(err, qemu.ErrNoGuestAgent) {
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.process != p {
		return
	}
	v.addresses.asked = time.Now()
	if err != nil {
		return // such as a guest that is frozen, or whose agent does not know the command
	}
	v.addresses.at, v.addresses.list = time.Now(), cloud.CheckedAddresses(all)
}
