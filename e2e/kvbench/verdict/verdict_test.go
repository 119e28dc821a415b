package verdict

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestVerdict(t *testing.T) {
	for _, c := range []struct {
		name   string
		row    Row
		want   string
		target string
	}{
		{"more is better, aim", Row{Ours: []float64{140}, Peer: []float64{100}, Target: AtLeast(1.15, 1.4)}, "aim met", "≥ 1.15 / 1.4"},
		{"more is better, must", Row{Ours: []float64{120}, Peer: []float64{100}, Target: AtLeast(1.15, 1.4)}, "met", "≥ 1.15 / 1.4"},
		{"more is better, missed", Row{Ours: []float64{110}, Peer: []float64{100}, Target: AtLeast(1.15, 1.4)}, "**missed**", "≥ 1.15 / 1.4"},
		{"less is better, aim", Row{Ours: []float64{45}, Peer: []float64{100}, Target: AtMost(0.55, 0.45)}, "aim met", "≤ 0.55 / 0.45"},
		{"less is better, missed", Row{Ours: []float64{56}, Peer: []float64{100}, Target: AtMost(0.55, 0.45)}, "**missed**", "≤ 0.55 / 0.45"},
		{"a bound on our own figure", Row{Ours: []float64{31}, Peer: []float64{9}, Target: Within(100, 30)}, "met", "≤ 100 / 30"},
		{"one bound", Row{Ours: []float64{1.6}, Target: Within(1.5, 1.5)}, "**missed**", "≤ 1.5"},
		{"our own figure of 0", Row{Ours: []float64{0}, Target: Within(0, 0)}, "aim met", "≤ 0"},
		{"a bound of 0", Row{Ours: []float64{1}, Target: Within(0, 0)}, "**missed**", "≤ 0"},
		{"the peer was not run", Row{Ours: []float64{140}, Target: AtLeast(1.15, 1.4)}, "not measured", "≥ 1.15 / 1.4"},
		{"ours was not run", Row{Peer: []float64{140}, Target: Within(1, 1)}, "not measured", "≤ 1"},
		{"no target", Row{Ours: []float64{140}, Peer: []float64{100}}, "", ""},
	} {
		require.Equal(t, c.want, c.row.Verdict(), c.name)
		require.Equal(t, c.target, c.row.Target.String(), c.name)
	}
}

func TestMarkdown(t *testing.T) {
	rows := []Row{
		{What: "put", Unit: "/s", Ours: []float64{9000, 10236, 11000}, Peer: []float64{6000, 8000, 6988}, Target: AtLeast(1.15, 1.4)},
		{What: "CPU per put", Unit: "µs", Ours: []float64{83.33}, Peer: []float64{127}, Target: AtMost(0.8, 0.65), Note: "one round"},
		{What: "longest put", Unit: "ms", Ours: []float64{120, 130}, Peer: []float64{900.123, 4}, Target: Within(100, 30)},
		{What: "leases lost", Ours: []float64{0}, Peer: []float64{0}},
		{What: "restart", Unit: "s", Peer: []float64{2.5}, Target: AtMost(1, 1)},
	}
	require.Equal(t, `| what | ours | etcd | ratio | must / aim |  | note |
| --- | --- | --- | --- | --- | --- | --- |
| put | 10236 /s | 6988 /s | 1.46 × | ≥ 1.15 / 1.4 × | aim met | 3 rounds: ours 9000 to 11000, etcd 6000 to 8000, ratio 1.28 to 1.57 |
| CPU per put | 83.3 µs | 127 µs | 0.66 × | ≤ 0.8 / 0.65 × | met | one round |
| longest put | 120 ms | 4.00 ms | 30.00 × | ≤ 100 / 30 ms | **missed** | 2 rounds: ours 120 to 130, etcd 4.00 to 900, ratio 0.13 to 32.50 |
| leases lost | 0 | 0 |  |  |  |  |
| restart |  | 2.50 s |  | ≤ 1 × | not measured |  |
`, Markdown("etcd", rows))
	require.Equal(t, "Targets: 1 aims met, 1 met, 1 missed, 1 not measured. Missed: longest put.", Summary(rows))

	require.NotRegexp(t, "met|missed|not measured", Markdown("etcd", WithoutTargets(rows)))
	require.Contains(t, Markdown("etcd", rows), "missed", "WithoutTargets must not change the rows")
}

func TestNumber(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 0.034: "0.03", 9.996: "10.00", 12.34: "12.3", 99.96: "100.0", 12345.6: "12346", -150: "-150"} {
		require.Equal(t, want, Number(v))
	}
}
