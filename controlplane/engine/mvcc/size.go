package mvcc

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"
)

// Size returns the logical size of the keyspace with its history, in bytes: keys and values of all versions that Scrub
// has not removed, and 32 bytes for each version. It is meant for quotas: it reads nothing, and does not depend on
// compression. Stats has the size of the files.
func (e *Engine) Size() int64 {
	v := e.published.Load()
	return max(v.written-v.gen.freed.Load(), v.live)
}

// SizeInUse returns the part of Size that live versions take. It is the same on all members.
func (e *Engine) SizeInUse() int64 { return e.published.Load().live }

// Written returns the total size of all versions ever written, counted as by Size, including compacted ones. It is the
// same on all members.
func (e *Engine) Written() int64 { return e.published.Load().written }

// loadFreed reads from db how many bytes Scrub has removed.
func (g *generation) loadFreed() error {
	b, closer, err := g.db.Get([]byte{tableFreed})
	if errors.Is(err, pebble.ErrNotFound) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read size: %w", err)
	}
	freed, n := binary.Uvarint(b)
	if n != len(b) || int64(freed) < 0 {
		err = fmt.Errorf("%w: freed bytes %x", ErrCorrupt, b)
	}
	g.freed.Store(int64(freed))
	return errors.Join(err, closer.Close())
}
