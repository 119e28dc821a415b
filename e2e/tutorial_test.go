package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// step is a command of a page of the documentation, with the output that the page shows.
type step struct {
	command string
	output  []string
}

// consoleSteps returns the commands in the blocks of a Markdown file that are marked as console: lines that begin with
// "$ ". The lines below a command are its output.
func consoleSteps(t *testing.T, path string) (steps []step) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	inside := false
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSuffix(line, "\n")
		command, is := strings.CutPrefix(line, "$ ")
		switch {
		case strings.HasPrefix(line, "```"):
			inside = line == "```console"
		case inside && is:
			steps = append(steps, step{command: command})
		case inside:
			require.NotEmpty(t, steps, "%s: %s is below no command", path, line)
			last := &steps[len(steps)-1]
			last.output = append(last.output, line)
		}
	}
	return steps
}

// matches reports whether a printed line is the line of a page: spaces may differ in number, and "…" stands for any
// text.
func matches(shown, printed string) bool {
	words := strings.Fields(shown)
	for i, word := range words {
		words[i] = strings.ReplaceAll(regexp.QuoteMeta(word), "…", ".*")
	}
	return regexp.MustCompile(`^\s*` + strings.Join(words, `\s+`) + `\s*$`).MatchString(printed)
}

// tutorial executes the commands of docs/tutorial.md in one shell, like a person who pastes them. Each must succeed,
// and print what the page shows below it.
func (c *upCloud) tutorial(t *testing.T) {
	steps := consoleSteps(t, filepath.Join(c.root, "docs", "tutorial.md"))
	require.Greater(t, len(steps), 30)
	const marker = "--- step"
	var script strings.Builder
	for i, s := range steps {
		fmt.Fprintf(&script, "%s\ncode=$?; echo; echo '%s' %d: $code\n", s.command, marker, i)
	}
	printed, err := c.shell(c.work, script.String()).CombinedOutput()
	require.NoError(t, err, "%s", printed)
	rest := string(printed)
	for i, s := range steps {
		out, after, found := strings.Cut(rest, fmt.Sprintf("\n%s %d: ", marker, i))
		require.True(t, found, "%s:\n%s", s.command, rest)
		code, after, _ := strings.Cut(after, "\n")
		require.Equal(t, "0", code, "%s:\n%s", s.command, out)
		rest = after
		lines := strings.Split(strings.TrimSuffix(out, "\n"), "\n")
		for j, shown := range s.output {
			require.Less(t, j, len(lines), "%s:\n%s", s.command, out)
			require.True(t, matches(shown, lines[j]), "docs/tutorial.md shows below %q\n%s\ninstead of\n%s", s.command, shown, lines[j])
		}
	}
}
