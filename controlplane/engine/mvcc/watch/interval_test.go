package watch

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestIntervals adds and removes random ranges, and checks that stab finds exactly the watchers whose range contains a
// key.
func TestIntervals(t *testing.T) {
	type span struct {
		start, end string
		w          *Watcher
	}
	rng := rand.New(rand.NewPCG(1, 1))
	text := func() string {
		b := make([]byte, 1+rng.IntN(2))
		for i := range b {
			b[i] = byte('a' + rng.IntN(6))
		}
		return string(b)
	}
	var tree intervalTree
	var all []span
	for range 4000 {
		if rng.IntN(5) < 2 && len(all) > 0 {
			i := rng.IntN(len(all))
			tree.remove(all[i].start, all[i].end, all[i].w)
			all = append(all[:i], all[i+1:]...)
		} else if len(all) < 60 {
			s := span{text(), text(), &Watcher{}}
			if rng.IntN(4) == 0 {
				s.end = ""
			}
			tree.add(s.start, s.end, s.w)
			all = append(all, s)
		}
		key := text()
		want, got := map[*Watcher]bool{}, map[*Watcher]bool{}
		for _, s := range all {
			if s.start <= key && (s.end == "" || key < s.end) {
				want[s.w] = true
			}
		}
		tree.stab([]byte(key), func(w *Watcher) {
			require.False(t, got[w])
			got[w] = true
		})
		require.Equal(t, want, got)
	}
}
