package live

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
)

// endpoint is the network name of a member ("m1" to "m3") or of a host ("h1", "h2" and so on).
type endpoint string

// Errors of the simulated network. After errLost it is unknown whether the message arrived. After errNoRoute it has
// certainly not arrived.
var (
	errLost    = errors.New("the connection broke")
	errNoRoute = errors.New("cannot be reached")
)

// retransmitTime is the time after which the connection counts as broken if a message could not be delivered, like
// TCP_USER_TIMEOUT.
const retransmitTime = 3 * time.Second

// fabric simulates the network between members and hosts. It delays messages. Each of the two directions between two
// endpoints can be cut separately.
type fabric struct {
	mu      sync.Mutex
	rng     *rand.Rand
	cuts    map[[2]endpoint]bool // the cut directions: from, to
	changed chan struct{}        // closed and replaced when cuts changes
}

func newFabric(rng *rand.Rand) *fabric {
	return &fabric{rng: rng, cuts: map[[2]endpoint]bool{}, changed: make(chan struct{})}
}

// cut blocks messages from endpoint a to endpoint b until healNetwork is called. The opposite direction is not
// affected.
func (n *fabric) cut(a, b endpoint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cuts[[2]endpoint{a, b}] = true
	n.announce()
}

// healNetwork ends all cuts of the network.
func (n *fabric) healNetwork() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.cuts)
	n.announce()
}

func (n *fabric) announce() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// open reports whether messages from endpoint a to endpoint b arrive now. The returned channel is closed when any cut
// begins or ends.
func (n *fabric) open(a, b endpoint) (bool, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.cuts[[2]endpoint{a, b}], n.changed
}

// delay returns a random network delay: usually 0.1 to 2.1 ms, and for one message in 50 up to 200 ms.
func (n *fabric) delay() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.rng.IntN(50) == 0 {
		return time.Duration(n.rng.IntN(200)) * time.Millisecond
	}
	return time.Duration(100+n.rng.IntN(2000)) * time.Microsecond
}

// pass simulates the way of one message from endpoint a to endpoint b: it waits for the network delay. If this
// direction is cut, it then waits up to retransmitTime for the end of the cut, and otherwise returns errLost.
func (n *fabric) pass(ctx context.Context, a, b endpoint) error {
	if err := sleep(ctx, n.delay()); err != nil {
		return err
	}
	return n.until(ctx, a, b, retransmitTime)
}

// until waits until the direction from endpoint a to endpoint b is not cut. It returns errLost if that takes longer
// than the duration given as most.
func (n *fabric) until(ctx context.Context, a, b endpoint, most time.Duration) error {
	late := time.NewTimer(most)
	defer late.Stop()
	for {
		open, changed := n.open(a, b)
		if open {
			return nil
		}
		select {
		case <-changed:
		case <-late.C:
			return errLost
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sleep waits for the duration d of virtual time. If ctx ends before, it returns the error of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
