package image

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSourceURL(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	for source, want := range map[string]string{
		"/srv/a.img":        "file:///srv/a.img",
		"/srv/a b#c?%41":    "file:///srv/a%20b%23c%3F%2541",
		"/srv/../etc/x":     "file:///etc/x",
		"a.img":             "file://" + dir + "/a.img",
		"file:///srv/a":     "file:///srv/a",
		"https://host/a":    "https://host/a",
		"gopher://anything": "gopher://anything",
	} {
		got, err := sourceURL(source)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}
