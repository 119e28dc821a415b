package store

import (
	"sync"
	"time"
)

// Expiring caches one value that is computed from many records, such as the totals that a member exports as metrics. So
// frequent callers do not read all records of a table each time. It may be used concurrently. Callers must not modify
// the value.
type Expiring[V any] struct {
	store *Store
	ttl   time.Duration
	read  func(*View) (V, error)

	mu     sync.Mutex // guards the fields below; held during read, so that concurrent calls of Get share one read
	filled bool
	at     time.Duration // time of the last successful read, on the store's clock Elapsed
	value  V
}

// MetricsTTL is how long the collectors of metrics use values that they have computed from the records.
const MetricsTTL = 30 * time.Second

// NewExpiring returns an Expiring of the value that read computes from the records of s. The value is computed at the
// first call of Get.
func NewExpiring[V any](s *Store, ttl time.Duration, read func(*View) (V, error)) *Expiring[V] {
	return &Expiring[V]{store: s, ttl: ttl, read: read}
}

// Get returns the cached value, which is less than the TTL old. If there is none, Get computes the value from the records
// that are applied on this member (Store.Local), and caches it. An error is returned and not cached.
func (e *Expiring[V]) Get() (V, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	now := e.store.opts.Elapsed()
	if e.filled && now-e.at < e.ttl {
		return e.value, nil
	}
	var value V
	err := e.store.Local(func(v *View) (err error) {
		value, err = e.read(v)
		return err
	})
	if err != nil {
		var none V
		return none, err
	}
	e.filled, e.at, e.value = true, now, value
	return value, nil
}
