package protos

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestCurlExamplesAreStrict checks that the examples with curl in the documentation send the header Trivet-Strict, so
// that readers who change an example notice a misspelled field.
func TestCurlExamplesAreStrict(t *testing.T) {
	pages, err := filepath.Glob("../docs/*.md")
	require.NoError(t, err)
	found := 0
	for _, page := range append(pages, "../README.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for line := range strings.Lines(strings.ReplaceAll(string(text), "\\\n", " ")) {
			if strings.Contains(line, "curl -") && strings.Contains(line, "/api/v1/") {
				found++
				require.Contains(t, line, "Trivet-Strict: true", page)
			}
		}
	}
	require.NotZero(t, found, "the examples were not found")
}
