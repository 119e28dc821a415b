// Package protos contains the protobuf contracts of Trivet's APIs. Its tests check that RPCs and HTTP paths are
// documented.
package protos

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var rpcLine = regexp.MustCompile(`^\s*rpc (\w+)\(`)

// TestEveryRPCHasAComment checks that every RPC has a comment that begins with the name of the RPC.
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

// TestEveryPathIsDocumented checks that docs/api.md or an OpenAPI document contains every HTTP path that a member serves.
// It takes the paths from testdata/authorization_matrix.txt of package controlplane, which TestAuthorizationMatrix there writes and
// checks.
func TestEveryPathIsDocumented(t *testing.T) {
	table, err := os.ReadFile("../controlplane/testdata/authorization_matrix.txt")
	require.NoError(t, err)
	page, err := os.ReadFile("../docs/api.md")
	require.NoError(t, err)
	documents, err := filepath.Glob("../docs/api/*.json")
	require.NoError(t, err)
	for _, name := range documents {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		page = append(page, strings.ReplaceAll(string(text), `": {`, "`")...)
	}
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
