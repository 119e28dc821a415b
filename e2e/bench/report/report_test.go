package report

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/usage"
)

func TestOrderChangesFromRoundToRound(t *testing.T) {
	calm, err := usage.NewCalm(0)
	require.NoError(t, err)
	r, order := &Run{Calm: calm}, ""
	require.NoError(t, r.InTurn(t.Context(), 3,
		func(int) error { order += "a"; return nil },
		func(int) error { order += "b"; return nil },
	))
	require.Equal(t, "abbaab", order)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, r.InTurn(ctx, 1, func(int) error { return nil }), context.Canceled)
}

// TestRunPart checks that a part that fails or exceeds its timeout is a failure of the run and not an error, and that
// the end of the run is an error.
func TestRunPart(t *testing.T) {
	r := &Run{}
	require.NoError(t, r.RunPart(t.Context(), "good", time.Minute, func(context.Context) error { return nil }))
	require.NoError(t, r.RunPart(t.Context(), "bad", time.Minute, func(context.Context) error { return errors.New("broken") }))
	wait := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	require.NoError(t, r.RunPart(t.Context(), "slow", time.Millisecond, wait))
	require.Equal(t, []string{"bad: broken", "slow: context deadline exceeded"}, r.Failures)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, r.RunPart(ctx, "ended", time.Minute, wait), context.Canceled)
}

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
