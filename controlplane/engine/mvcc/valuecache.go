package mvcc

import "sync"

// valueCache holds versions that were read, at most one for each key. A reader requests the version that its index
// names, so it never gets an older or a newer one. Apply replaces the version of a key that is in the cache, so that
// keys that are both read and written often, such as counters, are read from memory.
//
// The cache consists of the maps recent and older. New versions are put into recent. When recent has reached half of
// maxBytes, it replaces older, and recent becomes an empty map. That drops the versions that were in older, except
// those that were read meanwhile: get moves them to recent.
type valueCache struct {
	maxBytes int64

	mu            sync.Mutex
	recent, older map[string]KV
	recentBytes   int64
}

// newValueCache returns a cache of up to maxBytes bytes. If maxBytes is 0, it returns nil, which works as a cache that
// is always empty.
func newValueCache(maxBytes int64) *valueCache {
	if maxBytes <= 0 {
		return nil
	}
	return &valueCache{maxBytes: maxBytes, recent: map[string]KV{}}
}

// cachedBytes returns the approximate memory that the cache uses for kv.
func cachedBytes(kv *KV) int64 {
	const overhead = 192 // bytes that the maps and the KV need for an entry
	return int64(overhead + 2*len(kv.Key) + len(kv.Value))
}

// get returns the version of key that was written at revision, if it is in the cache. The caller must not change its
// bytes.
func (c *valueCache) get(key []byte, revision int64) (kv KV, ok bool) {
	if c == nil {
		return KV{}, false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if kv, ok = c.recent[string(key)]; ok {
		return kv, kv.ModRevision == revision
	}
	if kv, ok = c.older[string(key)]; !ok || kv.ModRevision != revision {
		return KV{}, false
	}
	c.set(kv)
	return kv, true
}

// add adds a version that was read. If the cache has the same version of the key or a newer one, it does nothing. The
// caller must not change kv's bytes afterwards.
func (c *valueCache) add(kv KV) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, m := range []map[string]KV{c.recent, c.older} {
		if have, ok := m[string(kv.Key)]; ok && have.ModRevision >= kv.ModRevision {
			return
		}
	}
	c.set(kv)
}

// apply updates the cache after changes were applied. It replaces or removes the cached versions of the changed keys,
// and adds no other keys.
func (c *valueCache) apply(changes []change) {
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range changes {
		h := &changes[i]
		_, recent := c.recent[string(h.key)]
		_, older := c.older[string(h.key)]
		if h.superseded || !recent && !older {
			continue
		}
		if h.deleted {
			c.remove(h.key)
			continue
		}
		state := keyState{Meta: h.after, value: h.value}
		c.set(state.kv(h.key, false))
	}
}

// set stores kv in recent. If kv needs more than an eighth of maxBytes, it is not stored. The caller holds c.mu.
func (c *valueCache) set(kv KV) {
	c.remove(kv.Key)
	size := cachedBytes(&kv)
	if size > c.maxBytes/8 {
		return
	}
	if c.recentBytes+size > c.maxBytes/2 {
		c.recent, c.older, c.recentBytes = make(map[string]KV, len(c.recent)), c.recent, 0
	}
	c.recent[string(kv.Key)] = kv
	c.recentBytes += size
}

// remove removes key from both maps. The caller holds c.mu.
func (c *valueCache) remove(key []byte) {
	delete(c.older, string(key))
	if kv, ok := c.recent[string(key)]; ok {
		c.recentBytes -= cachedBytes(&kv)
		delete(c.recent, string(key))
	}
}
