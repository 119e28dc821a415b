package demo

import (
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/account"
)

// TestRemove checks that Remove deletes the contexts of its cloud and no others, and creates no file.
func TestRemove(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trivet", "config.yaml")
	c := &Contexts{Path: path, Members: []string{"127.0.0.1"}, Tokens: map[string]string{"a": "", "b": ""}, First: "a"}
	require.NoError(t, c.Remove(t.Context()))
	require.NoFileExists(t, path)
	require.NoError(t, account.Update(t.Context(), path, func(b *account.Book) error {
		b.Contexts["a"] = &account.Login{Endpoints: c.endpoints()}
		b.Contexts["b"] = &account.Login{Endpoints: []string{"10.0.0.1:50051"}}
		b.Contexts["c"] = &account.Login{Endpoints: c.endpoints()}
		b.Current = "a"
		return nil
	}))
	require.NoError(t, c.Remove(t.Context()))
	b, err := account.Load(path)
	require.NoError(t, err)
	require.Equal(t, []string{"b", "c"}, b.Names())
	require.Empty(t, b.Current)

	require.NoError(t, account.Update(t.Context(), path, func(b *account.Book) error {
		b.Contexts["a"] = &account.Login{Endpoints: c.endpoints()}
		b.Current = "b"
		return nil
	}))
	require.NoError(t, c.Remove(t.Context()))
	b, err = account.Load(path)
	require.NoError(t, err)
	require.Equal(t, "b", b.Current, "the current context of another cloud stays, also if it is logged out")
}

// TestFirstBecomesCurrent checks that First replaces a current context only if that one does not exist or is logged out.
func TestFirstBecomesCurrent(t *testing.T) {
	c := &Contexts{First: "first"}
	for _, test := range []struct {
		name, current string
		want          bool
	}{
		{"no current context", "", true},
		{"a deleted context", "deleted", true},
		{"a context that is logged out", "out", true},
		{"a context that is logged in", "in", false},
		{"itself", "first", true},
	} {
		b := &account.Book{Current: test.current, Contexts: map[string]*account.Login{
			"in": {Token: "t"}, "out": {}, "first": {Token: "t"},
		}}
		require.Equal(t, test.want, c.choose(b), test.name)
		want := "in"
		if test.want {
			want = "first"
		}
		require.Equal(t, want, b.Current, test.name)
	}
}
