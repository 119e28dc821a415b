package table

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// TestText checks that a line with a target is shown without figures, that a line that begins with "… " repeats the
// description before it, and that lines of other parts and figures without verdict are left out.
func TestText(t *testing.T) {
	tables := []Table{{Peer: "by hand", Lines: []Line{
		NewLine("io", "read p50", "read: p50", "ms", AtMost(1.05)),
		NewLine("io", "read p99", "… p99", "ms", verdict.Target{}),
		NewLine("io", "write", "write", "ms", Within(5)),
		NewLine("io", "trim", "trim", "ms", verdict.Target{}),
		NewLine("other", "copy", "copy", "s", AtMost(1)),
	}}}
	f := Figures{}
	f.Add("read p50", false, 2)
	f.Add("read p50", true, 1)
	f.Ours("read p99", 7)
	f.Note("read p99", "a note")
	require.Equal(t, `
| what | ours | by hand | ratio | must / aim |  | note |
| --- | --- | --- | --- | --- | --- | --- |
| read: p50 | 2.00 ms | 1.00 ms | 2.00 × | ≤ 1.05 × | **missed** |  |
| read: p99 | 7.00 ms |  |  |  |  | a note |
| write |  |  |  | ≤ 5 ms | not measured |  |

Targets: 0 aims met, 0 met, 1 missed, 1 not measured. Missed: read: p50.
`, f.Text(tables, []string{"io"}, ""))
	require.NotRegexp(t, "missed|not measured|≤|Targets", f.Text(tables, []string{"io"}, "the machine was busy"))
}
