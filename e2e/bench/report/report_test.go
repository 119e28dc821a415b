package report

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestWrite checks when the result of a run is an error. The file has the text in all cases.
func TestWrite(t *testing.T) {
	for name, c := range map[string]struct {
		run      Run
		unusable string
		want     string
	}{
		"good":          {},
		"failed":        {run: Run{Failures: []string{"a: broken", "b: broken"}}, want: "2 parts failed"},
		"disturbed":     {unusable: "the machine was busy", want: "no verdict: the machine was busy"},
		"quick":         {run: Run{Quick: true}, unusable: "a quick run"},
		"quick, failed": {run: Run{Quick: true, Failures: []string{"a"}}, unusable: "a quick run", want: "1 parts failed"},
	} {
		out := filepath.Join(t.TempDir(), "out.md")
		err := c.run.Write(out, "the table\n"+c.run.Remark(c.unusable), c.unusable, "parts")
		if c.want == "" {
			require.NoError(t, err, name)
		} else {
			require.EqualError(t, err, c.want, name)
		}
		text, err := os.ReadFile(out)
		require.NoError(t, err)
		for _, f := range c.run.Failures {
			require.Contains(t, string(text), "- failed: "+f, name)
		}
		if c.unusable != "" {
			require.Contains(t, string(text), "No verdict: "+c.unusable, name)
		}
	}
}
