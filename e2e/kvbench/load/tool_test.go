package load

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
)

// TestParse checks that Parse returns the figures of real output of the tool, and of shortened and faulty output.
func TestParse(t *testing.T) {
	datadriven.RunTest(t, "testdata/parse", func(t *testing.T, d *datadriven.TestData) string {
		text := d.Input
		if d.HasArg("file") {
			var name string
			d.ScanArgs(t, "file", &name)
			read, err := os.ReadFile(filepath.Join("testdata", name))
			require.NoError(t, err)
			text = string(read)
		}
		all, err := Parse(text)
		if err != nil {
			return "error: " + err.Error() + "\n"
		}
		var b strings.Builder
		for _, s := range all {
			fmt.Fprintf(&b, "%d in %s, %.0f/s, p50 %s, p99 %s, slowest %s, failed %d\n", s.Count(), s.Took.Round(time.Microsecond), s.Rate,
				s.Quantile(50).Round(time.Microsecond), s.Quantile(99).Round(time.Microsecond), s.Slowest.Round(time.Microsecond), s.Failed)
		}
		return b.String()
	})
}

func TestLastKeepsTheEnd(t *testing.T) {
	var l last
	l.to = new(bytes.Buffer)
	for range 100 {
		n, err := l.Write([]byte(strings.Repeat("x", 99) + "\n"))
		require.NoError(t, err)
		require.Equal(t, 100, n)
	}
	_, err := l.Write([]byte("the reason"))
	require.NoError(t, err)
	require.Equal(t, 1024, l.to.Len())
	require.True(t, strings.HasSuffix(l.to.String(), "the reason"))
}
