package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestPageOfVMs checks that a story executes each command of docs/vms.md.
func TestPageOfVMs(t *testing.T) {
	page, err := os.ReadFile(filepath.Join("..", "docs", "vms.md"))
	require.NoError(t, err)
	story, err := os.ReadFile(filepath.Join("testdata", "vm-policy.txt"))
	require.NoError(t, err)
	commands := 0
	for line := range strings.Lines(string(page)) {
		if args, ok := strings.CutPrefix(line, "trivet "); ok {
			commands++
			require.Contains(t, string(story), "\ntrivet\n"+args+"----\n")
		}
	}
	require.NotZero(t, commands)
}
