package mutanttest

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFails runs stories that pass and stories that fail in each of the ways of testing.TB.
func TestFails(t *testing.T) {
	for name, c := range map[string]struct {
		story func(t testing.TB)
		fails bool
		texts []string
	}{
		"passes":            {func(t testing.TB) { t.Log("text") }, false, nil},
		"Fail":              {func(t testing.TB) { t.Fail() }, true, nil},
		"Error":             {func(t testing.TB) { t.Error("a", 1); t.Errorf("%d", 2) }, true, []string{"a1", "2"}},
		"Fatal":             {func(t testing.TB) { t.Fatal("a"); t.Error("b") }, true, []string{"a"}},
		"Fatalf":            {func(t testing.TB) { t.Fatalf("%s", "a"); t.Error("b") }, true, []string{"a"}},
		"require":           {func(t testing.TB) { require.True(t, true); t.Error("end") }, true, []string{"end"}},
		"in a part":         {func(t testing.TB) { Run(t, "part", func(t testing.TB) { t.Fatal("a") }); t.Error("b") }, true, []string{"part: a"}},
		"in a cleanup":      {func(t testing.TB) { t.Cleanup(func() { t.Fatal("a") }) }, true, []string{"a"}},
		"cleanups, reverse": {func(t testing.TB) { t.Cleanup(func() { t.Error("a") }); t.Cleanup(func() { t.Fatal("b") }) }, true, []string{"b", "a"}},
	} {
		t.Run(name, func(t *testing.T) {
			failed, texts := Fails(t, c.story)
			require.Equal(t, c.fails, failed)
			require.Equal(t, c.texts, texts)
		})
	}
	failed, texts := Fails(t, func(t testing.TB) { require.Equal(t, 1, 2); t.Error("not reached") })
	require.True(t, failed)
	require.Len(t, texts, 1)
	require.Contains(t, texts[0], "Not equal")
}

// TestStoryContext checks that the context of a story ends before its cleanups run.
func TestStoryContext(t *testing.T) {
	failed, _ := Fails(t, func(t testing.TB) {
		ctx := t.Context()
		t.Cleanup(func() { require.Error(t, ctx.Err()) })
		require.NoError(t, ctx.Err())
	})
	require.False(t, failed)
}

// TestRun checks that Run starts subtests of a *testing.T.
func TestRun(t *testing.T) {
	var name string
	Run(t, "part", func(t testing.TB) { name = t.Name() })
	require.Equal(t, "TestRun/part", name)
}
