package snapfile

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSorter(t *testing.T) {
	for _, c := range []struct{ records, room, runs int }{
		{0, 100, 0}, {1, 1, 0}, {2, 1, 1}, {1000, 1 << 20, 0}, {1000, 1 << 10, 43}, {1000, 1, 999},
	} {
		dir := t.TempDir()
		s := newSorter(dir, c.room)
		random := rand.New(rand.NewPCG(1, 2))
		var want []string
		for i := range c.records {
			key, value := fmt.Sprint("k", random.IntN(300)), strings.Repeat("v", random.IntN(20))+fmt.Sprintf(" %06d", i)
			want = append(want, key+" "+value)
			require.NoError(t, s.add([]byte(key), []byte(value)))
		}
		require.Len(t, s.runs, c.runs)
		require.Empty(t, listDir(t, dir))
		slices.SortStableFunc(want, func(a, b string) int {
			return strings.Compare(strings.Fields(a)[0], strings.Fields(b)[0])
		})
		for range 2 {
			var got []string
			for e, err := range s.sorted() {
				require.NoError(t, err)
				got = append(got, string(e.key)+" "+string(e.value))
			}
			require.Equal(t, want, got)
		}
		for range s.sorted() {
			break
		}
		require.NoError(t, s.close())
	}
}

func TestSorterFileErrors(t *testing.T) {
	s := newSorter(filepath.Join(t.TempDir(), "missing"), 1)
	require.NoError(t, s.add([]byte("a"), nil))
	require.ErrorIs(t, s.add([]byte("b"), nil), os.ErrNotExist)
	require.NoError(t, s.close())

	s = newSorter(t.TempDir(), 1)
	require.NoError(t, s.add([]byte("a"), nil))
	require.NoError(t, s.add([]byte("b"), nil))
	require.NoError(t, s.file.Truncate(1))
	var last error
	for _, err := range s.sorted() {
		last = err
	}
	require.ErrorContains(t, last, "read sorted run")
	require.NoError(t, s.close())
}
