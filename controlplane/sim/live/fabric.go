package live

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
)

// endpoint is the name of a network endpoint: "m1" to "m3" are the members, "h1" and following the hosts.
type endpoint string

// Errors of the network. After errLost the message may have arrived; after errNoRoute it has not.
var (
	errLost    = errors.New("the connection broke")
	errNoRoute = errors.New("cannot be reached")
)

// retransmitTime is how long a message is retransmitted before the connection counts as broken, like TCP_USER_TIMEOUT.
const retransmitTime = 3 * time.Second

// fabric is the network between all parties. It delays messages, and its connections can be cut.
type fabric struct {
	mu      sync.Mutex
	rng     *rand.Rand
	cuts    map[[2]endpoint]bool // from, to
	changed chan struct{}        // closed when cuts change
}

func newFabric(rng *rand.Rand) *fabric {
	return &fabric{rng: rng, cuts: map[[2]endpoint]bool{}, changed: make(chan struct{})}
}

// cut blocks the direction from a to b.
func (n *fabric) cut(a, b endpoint) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cuts[[2]endpoint{a, b}] = true
	n.announce()
}

// healNetwork ends all cuts.
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

// open reports whether the direction from a to b is open, and returns a channel that is closed when that may have
// changed.
func (n *fabric) open(a, b endpoint) (bool, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.cuts[[2]endpoint{a, b}], n.changed
}

// delay returns a random network delay.
func (n *fabric) delay() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.rng.IntN(50) == 0 {
		return time.Duration(n.rng.IntN(200)) * time.Millisecond
	}
	return time.Duration(100+n.rng.IntN(2000)) * time.Microsecond
}

// pass waits for the network delay of a message from a to b and, while the direction is cut, up to patience longer.
func (n *fabric) pass(ctx context.Context, a, b endpoint) error {
	if err := sleep(ctx, n.delay()); err != nil {
		return err
	}
	return n.until(ctx, a, b, retransmitTime)
}

// until waits until the direction from a to b is open. It returns errLost after most.
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

// sleep waits for a duration of virtual time, or until ctx ends.
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
