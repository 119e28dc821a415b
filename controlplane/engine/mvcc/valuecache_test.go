package mvcc

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

func openCached(t *testing.T, bytes int64) *Engine {
	e, err := Open(vfs.NewMem(), "data", Options{KeyIndex: true, ValueCacheBytes: bytes})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	require.NoError(t, e.AwaitKeyIndex(context.Background()))
	return e
}

// readAt returns the value of key in the snapshot s, or "" if key does not exist.
func readAt(t *testing.T, s *Snapshot, key string) string {
	kv, _, err := s.Get([]byte(key))
	require.NoError(t, err)
	return string(kv.Value)
}

// TestCachedValueIsOfTheSnapshot checks that a snapshot returns the version of its own revision, also when the cache
// has a newer or an older one.
func TestCachedValueIsOfTheSnapshot(t *testing.T) {
	e := openCached(t, 1<<20)
	mustApply(t, e, put(t, 1, "a", "1"))
	old := e.Snapshot()
	defer old.Close()
	require.Equal(t, "1", readAt(t, old, "a"))
	mustApply(t, e, put(t, 2, "a", "2"), put(t, 3, "a", "3"))
	current := e.Snapshot()
	defer current.Close()
	for range 2 {
		require.Equal(t, "3", readAt(t, current, "a"))
		require.Equal(t, "1", readAt(t, old, "a"))
	}

	data, err := command.EncodeTxn(command.Txn{Ops: []command.Op{command.Delete([]byte("a"))}})
	require.NoError(t, err)
	mustApply(t, e, command.Command{Index: 4, Data: data})
	deleted := e.Snapshot()
	defer deleted.Close()
	require.Empty(t, readAt(t, deleted, "a"))
	require.Equal(t, "3", readAt(t, current, "a"))
	mustApply(t, e, put(t, 5, "a", "5"))
	require.Empty(t, readAt(t, deleted, "a"))
	again := e.Snapshot()
	defer again.Close()
	require.Equal(t, "5", readAt(t, again, "a"))
}

// TestCachedKeyIsNotReadFromDisk checks that a key is read from Pebble only once, and from the cache later, also after
// each put.
func TestCachedKeyIsNotReadFromDisk(t *testing.T) {
	e := openCached(t, 1<<20)
	for i := range uint64(10) {
		mustApply(t, e, put(t, i+1, "a", strconv.Itoa(int(i))))
		s := e.Snapshot()
		require.Equal(t, strconv.Itoa(int(i)), readAt(t, s, "a"))
		s.Close()
	}
	require.Equal(t, int64(1), e.Stats().Gets)
}

// TestCachedBytes checks that the cache stays within its size, keeps a key that is read often, and takes no value that
// would need a large part of it.
func TestCachedBytes(t *testing.T) {
	const most = 1 << 20
	e := openCached(t, most)
	cache := e.published.Load().gen.values
	used := func() (bytes int64) {
		cache.mu.Lock()
		defer cache.mu.Unlock()
		for _, m := range []map[string]KV{cache.recent, cache.older} {
			for _, kv := range m {
				bytes += cachedBytes(&kv)
			}
		}
		return bytes
	}
	value := string(make([]byte, 1000))
	index := uint64(0)
	write := func(key, value string) {
		index++
		mustApply(t, e, put(t, index, key, value))
	}
	write("hot", "x")
	for i := range 3000 {
		key := fmt.Sprintf("key/%d", i)
		write(key, value)
		s := e.Snapshot()
		readAt(t, s, key)
		readAt(t, s, "hot")
		s.Close()
		require.LessOrEqual(t, used(), int64(most))
	}
	require.Equal(t, int64(3001), e.Stats().Gets, "the key that is read often must stay in the cache")
	write("large", string(make([]byte, most/4)))
	s := e.Snapshot()
	defer s.Close()
	readAt(t, s, "large")
	_, ok := cache.get([]byte("large"), e.Revision())
	require.False(t, ok)
}

// TestCachedValuesConcurrently checks that Get returns the same version as Range of the same snapshot, while keys are
// written.
func TestCachedValuesConcurrently(t *testing.T) {
	e := openCached(t, 4<<10)
	const writes = 3000
	var readers sync.WaitGroup
	stop := make(chan struct{})
	for r := range 3 {
		readers.Go(func() {
			for i := r; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				s := e.Snapshot()
				key := fmt.Appendf(nil, "key/%d", i%7)
				kv, ok, err := s.Get(key)
				all, rangeErr := s.Range(RangeOptions{Key: key})
				s.Close()
				if err != nil || rangeErr != nil || ok != (len(all.KVs) == 1) ||
					ok && (string(kv.Value) != string(all.KVs[0].Value) || kv.ModRevision != all.KVs[0].ModRevision) {
					t.Errorf("Get returned %v %t %v, Range %v %v", kv, ok, err, all.KVs, rangeErr)
					return
				}
			}
		})
	}
	for i := range uint64(writes) {
		mustApply(t, e, put(t, i+1, fmt.Sprintf("key/%d", i*i%7), fmt.Sprint(i)))
	}
	close(stop)
	readers.Wait()
}
