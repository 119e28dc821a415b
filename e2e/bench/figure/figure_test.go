package figure

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestQuantile(t *testing.T) {
	for _, c := range []struct {
		samples []int
		q       float64
		want    int
	}{
		{nil, 0.5, 0},
		{[]int{7}, 0.99, 7},
		{[]int{3, 1, 2}, 0.5, 2},
		{[]int{4, 3, 2, 1}, 0.5, 2},
		{[]int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0.99, 10},
		{[]int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, 0.9, 9},
		{[]int{1, 2}, 0, 1},
		{[]int{1, 2}, 1, 2},
	} {
		require.Equal(t, c.want, Quantile(c.samples, c.q), "%v at %v", c.samples, c.q)
	}
	given := []int{2, 1}
	Median(given)
	require.Equal(t, []int{2, 1}, given, "Quantile must not change the samples")
}

func TestMarkdown(t *testing.T) {
	got := Markdown([]Row{
		{What: "start", Ours: "2.0 s", Peer: "1.9 s", Value: 1.05, AtMost: 1.1, Unit: "×", Note: "11 rounds"},
		{What: "list", Ours: "p99 120 ms", Value: 120, AtMost: 100, Unit: "ms"},
		{What: "create", Ours: "p99 30 ms"},
	})
	require.Equal(t, `| what | ours | peer | figure | target |  | note |
| --- | --- | --- | --- | --- | --- | --- |
| start | 2.0 s | 1.9 s | 1.05 × | ≤ 1.1 × | met | 11 rounds |
| list | p99 120 ms |  | 120.00 ms | ≤ 100 ms | **missed** |  |
| create | p99 30 ms |  |  |  |  |  |
`, got)
}

func TestWithoutTargets(t *testing.T) {
	rows := []Row{{What: "list", Ours: "p99 120 ms", Value: 120, AtMost: 100, Unit: "ms"}}
	require.NotContains(t, Markdown(WithoutTargets(rows)), "missed")
	require.Contains(t, Markdown(rows), "missed", "WithoutTargets must not change the rows")
}
