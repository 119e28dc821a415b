package account

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestALoginIsKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "new", "trivet", "config.yaml")
	_, err := Load(path)
	require.ErrorIs(t, err, ErrNone)

	l := &Login{Endpoints: []string{"a:1", "b:2"}, User: "demo", Org: "o", Project: "p", Token: "eyJ.x.y", TLS: true, CA: "-----BEGIN\n-----END\n", ExpiresAt: time.Unix(1, 0).UTC()}
	require.NoError(t, l.Save(path))
	got, err := Load(path)
	require.NoError(t, err)
	require.Equal(t, l, got)

	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	l.Token = "other"
	require.NoError(t, l.Save(path))
	entries, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing is left beside it")
}

func TestALoginThatCannotBeUsedSaysWhyAndShowsNoToken(t *testing.T) {
	const token = "eyJ.very.secret"
	for name, tc := range map[string]struct {
		text string
		mode os.FileMode
		want string
	}{
		"others may read":  {"endpoints: [a:1]\ntoken: " + token, 0o640, "chmod 600"},
		"unknown field":    {"endpoints: [a:1]\ntoken: x\n" + token + ": x", 0o600, "log in again"},
		"wrong type":       {"endpoints: [a:1]\ntoken: x\nexpires_at: " + token, 0o600, "log in again"},
		"not YAML":         {"{" + token, 0o600, "log in again"},
		"empty":            {"", 0o600, "log in again"},
		"without a token":  {"endpoints: [a:1]", 0o600, "log in again"},
		"without a place":  {"token: " + token, 0o600, "log in again"},
		"longer than sane": {strings.Repeat("# "+token+"\n", 5000), 0o600, "longer than"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.yaml")
			require.NoError(t, os.WriteFile(path, []byte(tc.text), tc.mode))
			_, err := Load(path)
			require.ErrorContains(t, err, tc.want)
			require.NotContains(t, err.Error(), token)
		})
	}
}

func TestALoginThatCannotBeWrittenLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "trivet", "config.yaml")
	require.NoError(t, os.MkdirAll(filepath.Join(path, "in the way"), 0o700))
	require.ErrorContains(t, (&Login{}).Save(path), "write the login")
	entries, err := os.ReadDir(filepath.Join(dir, "trivet"))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

func TestPath(t *testing.T) {
	env := func(pairs ...string) func(string) string {
		return func(k string) string {
			for i := 0; i < len(pairs); i += 2 {
				if pairs[i] == k {
					return pairs[i+1]
				}
			}
			return ""
		}
	}
	p, err := Path(env("XDG_CONFIG_HOME", "/x", "HOME", "/h"))
	require.NoError(t, err)
	require.Equal(t, "/x/trivet/config.yaml", p)
	p, err = Path(env("HOME", "/h"))
	require.NoError(t, err)
	require.Equal(t, "/h/.config/trivet/config.yaml", p)
	_, err = Path(env())
	require.ErrorContains(t, err, "HOME")
}

func TestASecretDoesNotShowItself(t *testing.T) {
	l := Login{Token: "hunter2"}
	for _, text := range []string{fmt.Sprint(l.Token), fmt.Sprintf("%v %+v %#v %s %q", l, l, l, l.Token, l.Token), fmt.Sprint(&l)} {
		require.NotContains(t, text, "hunter2")
	}
}

func TestReadSecret(t *testing.T) {
	path := filepath.Join(t.TempDir(), "password")
	require.NoError(t, os.WriteFile(path, []byte(" with blanks \r\n"), 0o600))
	s, err := ReadSecret(path, nil)
	require.NoError(t, err)
	require.Equal(t, Secret(" with blanks "), s)

	s, err = ReadSecret("-", strings.NewReader("piped"))
	require.NoError(t, err)
	require.Equal(t, Secret("piped"), s)

	_, err = ReadSecret("-", strings.NewReader("\n"))
	require.ErrorContains(t, err, "is empty")
	_, err = ReadSecret("-", strings.NewReader(strings.Repeat("x", maxFile+1)))
	require.ErrorContains(t, err, "longer than")
	_, err = ReadSecret(path+"-not", nil)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestEndpoints(t *testing.T) {
	for in, want := range map[string]string{
		"127.0.0.1":            "127.0.0.1:50051",
		"127.0.0.1:1":          "127.0.0.1:1",
		"a, b:7 ,,a:50051":     "a:50051 b:7",
		"::1":                  "[::1]:50051",
		"[::1]":                "[::1]:50051",
		"[fe80::1%eth0]:5":     "[fe80::1%eth0]:5",
		"":                     "",
		"http://a:1":           "error",
		"https://a":            "a:50051",
		"a:1,https://b:2/":     "a:1 b:2",
		"https://[::1]":        "[::1]:50051",
		"https://a/b":          "error",
		"https://":             "error",
		"a:0":                  "error",
		"a:65536":              "error",
		"a:":                   "error",
		":1":                   "error",
		"a b":                  "error",
		"user@a":               "error",
		"1::2::3":              "error",
		"[a":                   "error",
		"[]":                   "error",
		strings.Repeat("a", 3): "aaa:50051",
	} {
		got, secure, err := Endpoints(in)
		if want == "error" {
			require.ErrorContains(t, err, "is not an endpoint", "%q gave %q", in, got)
			continue
		}
		require.NoError(t, err, in)
		require.Equal(t, want, strings.Join(got, " "), in)
		require.Equal(t, strings.Contains(in, "https://"), secure, in)
	}
	many := make([]string, MaxEndpoints+1)
	for i := range many {
		many[i] = fmt.Sprintf("a:%d", i+1)
	}
	_, _, err := Endpoints(many...)
	require.ErrorContains(t, err, "at most 16")
}

func FuzzEndpoints(f *testing.F) {
	for _, s := range []string{"a", "a:1,b", "[::1]:2", "::1", "http://a"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got, _, err := Endpoints(s)
		if err != nil {
			return
		}
		again, _, err := Endpoints(got...)
		require.NoError(t, err)
		require.Equal(t, got, again)
	})
}
