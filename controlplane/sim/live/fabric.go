package live

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"
)

// party is one end of the network: "m1" to "m3" are members, "h1" and on hosts.
type party string

// Errors of the network: what was sent may have arrived, or cannot have.
var (
	errLost    = errors.New("the connection broke")
	errNoRoute = errors.New("cannot be reached")
)

// patience is how long bytes are sent again before a connection counts as broken, as TCP_USER_TIMEOUT has it.
const patience = 3 * time.Second

// fabric is the network between all parties. It keeps order on a connection, takes its time, and breaks.
type fabric struct {
	mu      sync.Mutex
	rng     *rand.Rand
	cuts    map[[2]party]bool // from, to
	changed chan struct{}     // closed when cuts change
}

func newFabric(rng *rand.Rand) *fabric {
	return &fabric{rng: rng, cuts: map[[2]party]bool{}, changed: make(chan struct{})}
}

// cut stops what goes from a to b.
func (n *fabric) cut(a, b party) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cuts[[2]party{a, b}] = true
	n.announce()
}

// mend lets everything pass again.
func (n *fabric) mend() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.cuts)
	n.announce()
}

func (n *fabric) announce() {
	close(n.changed)
	n.changed = make(chan struct{})
}

// open says whether something passes from a to b, and gives what is closed when that may have changed.
func (n *fabric) open(a, b party) (bool, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.cuts[[2]party{a, b}], n.changed
}

// delay is how long a packet takes.
func (n *fabric) delay() time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.rng.IntN(50) == 0 {
		return time.Duration(n.rng.IntN(200)) * time.Millisecond
	}
	return time.Duration(100+n.rng.IntN(2000)) * time.Microsecond
}

// pass returns when something sent from a has arrived at b. While the way is cut it is sent again, for a while.
func (n *fabric) pass(ctx context.Context, a, b party) error {
	if err := sleep(ctx, n.delay()); err != nil {
		return err
	}
	return n.until(ctx, a, b, patience)
}

// until waits for the way from a to b to be open.
func (n *fabric) until(ctx context.Context, a, b party, most time.Duration) error {
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

// sleep lets virtual time pass.
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
