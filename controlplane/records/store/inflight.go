package store

import "sync"

// inflight holds the keys that this member's running proposals write. An update that read such a key waits until that
// proposal has ended, because its own log entry would be refused as a conflict once the proposal is applied. The wait
// only saves useless log entries; the guards of each entry alone detect conflicts.
type inflight struct {
	mu   sync.Mutex
	keys map[string]*flight
}

// flight holds the keys that one running proposal writes, or the keys that an update has reserved while it waits for a
// running proposal.
type flight struct {
	keys []string
	done chan struct{} // closed when the proposal has ended
}

// begin is called before tx is proposed. If no other flight (running proposal or reservation) writes a key that tx
// read, begin makes the keys that tx writes the keys of own and returns nil; tx can then be proposed. Otherwise begin
// returns the done channel of the other flight. In this case own gets the keys of tx only if reserve is true, so that
// later updates wait for this one. begin does not check the ranges that tx read.
func (f *inflight) begin(own *flight, tx *Tx, reserve bool) (busy <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(own)
	for _, g := range tx.reads.guards {
		if other := f.keys[string(g.Key)]; other != nil && len(g.End) == 0 {
			busy = other.done
			break
		}
	}
	if busy != nil && !reserve {
		return busy
	}
	if own.done == nil {
		own.done = make(chan struct{})
	}
	for key := range tx.writes {
		f.keys[key] = own
		own.keys = append(own.keys, key)
	}
	return busy
}

// end removes the keys of own, which is a proposal or reservation that has ended. It closes the done channel of own, so
// that the updates that wait for it continue.
func (f *inflight) end(own *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(own)
	if own.done != nil {
		close(own.done)
		own.done = nil
	}
}

// remove removes the keys of own, a proposal or reservation, from f. It does not remove keys that now belong to another
// one.
func (f *inflight) remove(own *flight) {
	for _, key := range own.keys {
		if f.keys[key] == own {
			delete(f.keys, key)
		}
	}
	own.keys = own.keys[:0]
}
