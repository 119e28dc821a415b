package account

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func put(name string, l *Login) func(*Book) error {
	return func(b *Book) error {
		b.Contexts[name], b.Current = l, name
		return nil
	}
}

func TestSavedLogins(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "trivet", "config.yaml")
	b, err := Load(path)
	require.NoError(t, err)
	require.Empty(t, b.Contexts)

	l := &Login{Endpoints: []string{"a:1", "b:2"}, User: "demo", Org: "o", Project: "p", Token: "eyJ.x.y", TLS: true, CA: "-----BEGIN\n-----END\n", ExpiresAt: time.Unix(1, 0).UTC()}
	out := &Login{Endpoints: []string{"a:1"}, User: "eve", Provider: "corp"}
	require.NoError(t, Update(t.Context(), path, put("out", out)))
	require.NoError(t, Update(t.Context(), path, put("prod", l)))
	got, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, &Book{Current: "prod", Contexts: map[string]*Login{"prod": l, "out": out}}, got)
	require.Equal(t, []string{"out", "prod"}, got.Names())

	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 2, "the directory must have only the file and its lock")
	for _, e := range entries {
		info, err := e.Info()
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode().Perm(), e.Name())
	}
}

// TestFileWithoutContextsIsConverted checks that Load returns a file in the format before contexts as the context
// "default", and that the next Update keeps that login beside a new one.
func TestFileWithoutContextsIsConverted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	const before = "endpoints:\n    - a:1\nuser: demo\norg: o\nproject: p\ntoken: eyJ.x.y\nexpires_at: 2026-03-02T00:00:00Z\n"
	require.NoError(t, os.WriteFile(path, []byte(before), 0o600))
	was := &Login{Endpoints: []string{"a:1"}, User: "demo", Org: "o", Project: "p", Token: "eyJ.x.y", ExpiresAt: time.Date(2026, 3, 2, 0, 0, 0, 0, time.UTC)}
	b, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, &Book{Current: Before, Contexts: map[string]*Login{Before: was}}, b)
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, before, string(text), "Load must not change the file")

	other := &Login{Endpoints: []string{"b:1"}, Token: "t"}
	require.NoError(t, Update(t.Context(), path, put("other", other)))
	b, err = Load(path)
	require.NoError(t, err)
	require.Equal(t, &Book{Current: "other", Contexts: map[string]*Login{Before: was, "other": other}}, b)
}

func TestUnusableFileIsReportedAndKept(t *testing.T) {
	const token = "eyJ.very.secret"
	for name, tc := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"a file that others may read":  {"endpoints: [a:1]\ntoken: " + token, 0o640, "chmod 600"},
		"unknown field":                {"endpoints: [a:1]\ntoken: x\n" + token + ": x", 0o600, "log in again"},
		"unknown field in a context":   {"contexts: {a: {endpoints: [a:1], x: " + token + "}}", 0o600, "log in again"},
		"wrong type":                   {"endpoints: [a:1]\ntoken: x\nexpires_at: " + token, 0o600, "log in again"},
		"not YAML":                     {"{" + token, 0o600, "log in again"},
		"empty":                        {"", 0o600, "log in again"},
		"without a token":              {"endpoints: [a:1]", 0o600, "log in again"},
		"without endpoints":            {"token: " + token, 0o600, "log in again"},
		"a context without endpoints":  {"contexts: {a: {token: " + token + "}}", 0o600, "log in again"},
		"an empty context":             {"contexts: {a: }", 0o600, "log in again"},
		"an invalid name of a context": {"contexts: {'a b': {endpoints: [a:1]}}", 0o600, "log in again"},
		"fields of both formats":       {"endpoints: [a:1]\ntoken: x\ncontexts: {}", 0o600, "log in again"},
		"the same context twice":       {"contexts: {a: {endpoints: [a:1]}, a: {endpoints: [b:1]}}", 0o600, "log in again"},
		"longer than the limit":        {strings.Repeat("# "+token+"\n", maxBook/10), 0o600, "longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.yaml")
			require.NoError(t, os.WriteFile(path, []byte(tc.text), tc.mode))
			_, err := Load(path)
			require.ErrorContains(t, err, tc.want)
			require.NotContains(t, err.Error(), token)
			err = Update(t.Context(), path, func(*Book) error { panic("Update of an unusable file must not call its function") })
			require.ErrorContains(t, err, tc.want)
			left, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, tc.text, string(left))
		})
	}
}

func TestFailedWriteKeepsFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "config.yaml")
	require.NoError(t, Update(t.Context(), path, put("a", &Login{Endpoints: []string{"a:1"}})))
	was, err := os.ReadFile(path)
	require.NoError(t, err)

	require.ErrorContains(t, Update(t.Context(), path, func(b *Book) error {
		b.Current = "changed"
		return fmt.Errorf("no")
	}), "no")
	require.ErrorContains(t, Update(t.Context(), path, func(b *Book) error {
		for n := range MaxContexts {
			b.Contexts[fmt.Sprint("n", n)] = &Login{Endpoints: []string{"a:1"}}
		}
		return nil
	}), "at most 32 contexts")
	require.ErrorContains(t, Update(t.Context(), path, put("b", &Login{Endpoints: []string{"a:1"}, Token: Secret(strings.Repeat("x", maxBook))})), "longer than")
	now, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(was), string(now))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2)
}

// TestConcurrentLogins checks that all logins are in the file after 8 goroutines have saved 3 logins each, and that
// Load always succeeds meanwhile.
func TestConcurrentLogins(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			for m := range 3 {
				name := fmt.Sprintf("%d-%d", n, m)
				if err := Update(t.Context(), path, put(name, &Login{Endpoints: []string{"a:1"}, User: name})); err != nil {
					t.Error(err)
				}
				if _, err := Load(path); err != nil {
					t.Error(err) // the file was not complete
				}
			}
		})
	}
	wg.Wait()
	b, err := Load(path)
	require.NoError(t, err)
	require.Len(t, b.Contexts, 24)
}

func TestLockWaitEndsWithContext(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	f, err := os.OpenFile(path+".lock", os.O_CREATE|os.O_RDWR, 0o600)
	require.NoError(t, err)
	defer f.Close()
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorContains(t, Update(ctx, path, func(*Book) error { panic("Update must not call its function without the lock") }), "another process holds")
	require.NoFileExists(t, path)
}

func TestCheckContext(t *testing.T) {
	for _, good := range []string{"prod", "ada/web@10.0.0.1", "ada@[::1]:7000", strings.Repeat("a", 200)} {
		require.NoError(t, CheckContext(good), good)
	}
	for _, bad := range []string{"", "-prod", "a b", "a\n", "é", strings.Repeat("a", 201)} {
		require.Error(t, CheckContext(bad), bad)
	}
}
