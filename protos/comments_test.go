// Package protos holds the contracts. Its tests check that they are documented.
package protos

import (
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var rpcLine = regexp.MustCompile(`^\s*rpc (\w+)\(`)

// Every RPC has a comment that begins with its name.
func TestEveryRPCHasAComment(t *testing.T) {
	files, err := fs.Glob(os.DirFS("."), "*/v1/*.proto")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, file := range files {
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		lines := strings.Split(string(text), "\n")
		for i, line := range lines {
			m := rpcLine.FindStringSubmatch(line)
			if m == nil {
				continue
			}
			first := i
			for first > 0 && strings.HasPrefix(strings.TrimSpace(lines[first-1]), "//") {
				first--
			}
			require.True(t, strings.HasPrefix(strings.TrimSpace(lines[first]), "// "+m[1]+" "), "%s: want a comment that begins with %s", file, m[1])
		}
	}
}

var routeLine = regexp.MustCompile(`(?m)^(?:GET|POST|PUT|DELETE) (/\S+)`)

// Every HTTP path that a member serves is in docs/api.md. The paths are listed in testdata/authorization_matrix.txt,
// which TestAuthorizationMatrix of package controlplane writes and checks.
func TestEveryPathIsInTheAPIPage(t *testing.T) {
	table, err := os.ReadFile("../controlplane/testdata/authorization_matrix.txt")
	require.NoError(t, err)
	page, err := os.ReadFile("../docs/api.md")
	require.NoError(t, err)
	var missing []string
	paths := routeLine.FindAllStringSubmatch(string(table), -1)
	require.NotEmpty(t, paths)
	for _, m := range paths {
		path := strings.Replace(m[1], "{key:.*}", "{key}", 1)
		if !strings.Contains(string(page), path+"`") && !slices.Contains(missing, path) {
			missing = append(missing, path)
		}
	}
	require.Empty(t, missing)
}
