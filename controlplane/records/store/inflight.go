package store

import "sync"

// inflight holds the keys that this member's running proposals write. An update that read such a key waits until that
// proposal has ended, because its own log entry would be refused as a conflict once the proposal is applied. The wait
// only saves useless log entries; the guards of each entry alone detect conflicts.
type inflight struct {
	mu   sync.Mutex
	keys map[string]*flight
}

// flight is one proposal that is being replicated, or the reservation of an update that waits for one.
type flight struct {
	keys []string
	done chan struct{} // closed when the proposal has ended
}

// begin replaces the keys of own by the keys that tx writes and returns nil; tx can then be proposed. If another flight
// writes a key that tx read, begin returns that flight's done channel instead. In this case it adds the keys of tx only
// if reserve is set, which makes later updates wait for this one. begin does not check the ranges that tx read.
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

// end removes the keys of own and closes its done channel, for which other updates wait.
func (f *inflight) end(own *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(own)
	if own.done != nil {
		close(own.done)
		own.done = nil
	}
}

// remove removes the keys of own from f, except keys that another flight has replaced since.
func (f *inflight) remove(own *flight) {
	for _, key := range own.keys {
		if f.keys[key] == own {
			delete(f.keys, key)
		}
	}
	own.keys = own.keys[:0]
}
