package store

import "sync"

// inflight holds the keys that the proposals of this member write, until each proposal has ended. An update that read
// such a key waits, because its guards would fail once that proposal is applied: its own proposal would be a log entry
// on all members that changes nothing. It only saves work; the guards alone decide what commits.
type inflight struct {
	mu   sync.Mutex
	keys map[string]*flight
}

// flight is one proposal, or the reservation of the update that goes next.
type flight struct {
	keys []string
	done chan struct{} // closed when the proposal has ended
}

// begin adds the keys that tx writes to own and returns nil, so that tx can be proposed. If another flight has a key
// that tx read, begin returns that flight's done channel; it then adds the keys only if reserve is set, so that no
// later update comes first. Ranges that tx read are not compared. own loses the keys that it had before.
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

// end removes the keys of own and wakes the updates that wait for it.
func (f *inflight) end(own *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.remove(own)
	if own.done != nil {
		close(own.done)
		own.done = nil
	}
}

// remove removes the keys of own, but not those that another flight has taken over since.
func (f *inflight) remove(own *flight) {
	for _, key := range own.keys {
		if f.keys[key] == own {
			delete(f.keys, key)
		}
	}
	own.keys = own.keys[:0]
}
