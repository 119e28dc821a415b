package account

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

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

func TestSecretIsHiddenWhenFormatted(t *testing.T) {
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

// TestSecretFile checks that a secret is written to a new file with mode 0600, and never to an existing file.
func TestSecretFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "secret")
	f, err := NewSecretFile(path)
	require.NoError(t, err)
	require.NoError(t, f.Write("hunter2"))
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode().Perm())
	got, err := ReadSecret(path, nil)
	require.NoError(t, err)
	require.Equal(t, Secret("hunter2"), got)

	_, err = NewSecretFile(path)
	require.ErrorIs(t, err, os.ErrExist)
	other, err := NewSecretFile(path + "-2")
	require.NoError(t, err)
	require.NoError(t, other.Remove())
	require.NoFileExists(t, path+"-2")
	_, err = NewSecretFile(filepath.Join(path, "not a directory"))
	require.Error(t, err)
}
