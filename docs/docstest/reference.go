package docstest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/stretchr/testify/require"
)

// Reference fails t unless the Markdown pages in the directory dir are the reference of the program whose command is
// root. If rewrite is true, it writes the pages instead.
//
// The page NAME.md describes root. If split is true, each command directly below root has a page of its own, with all
// commands below it: NAME-COMMAND.md. The directory must then contain no other pages, and rewrite removes them.
// Otherwise all commands are on the page of root. packaging/build makes manual pages of these pages, so that each of
// them begins with the name and one line of description.
func Reference(t *testing.T, dir string, root *cobra.Command, split, rewrite bool) {
	t.Helper()
	pages := referencePages(t, root, split)
	if rewrite {
		if split {
			require.NoError(t, os.RemoveAll(dir))
		}
		require.NoError(t, os.MkdirAll(dir, 0o755))
		for name, text := range pages {
			require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
		}
		return
	}
	found, err := filepath.Glob(filepath.Join(dir, "*.md"))
	require.NoError(t, err)
	for _, path := range found {
		if !split {
			break
		}
		require.Contains(t, pages, filepath.Base(path), "%s describes no command: run this test with -rewrite", path)
	}
	for name, text := range pages {
		written, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err, "run this test with -rewrite")
		require.Equal(t, text, string(written), "%s is out of date: run this test with -rewrite", name)
	}
}

// referencePages returns the pages of Reference by file name.
func referencePages(t *testing.T, root *cobra.Command, split bool) map[string]string {
	t.Helper()
	root.DisableAutoGenTag = true // which has the date
	pages := map[string]string{}
	if !split {
		pages[root.Name()+".md"] = referencePage(t, below(root))
		return pages
	}
	index := referencePage(t, []*cobra.Command{root}) + "### Commands\n\n"
	for _, c := range children(root) {
		name := root.Name() + "-" + c.Name()
		pages[name+".md"] = referencePage(t, below(c)) +
			fmt.Sprintf("The flags that all commands take are on the page of [%s](%[1]s.md).\n", root.Name())
		index += fmt.Sprintf("- [%s](%s.md): %s\n", c.CommandPath(), name, c.Short)
	}
	pages[root.Name()+".md"] = index
	return pages
}

// children returns the commands directly below c, without the command help, which cobra adds.
func children(c *cobra.Command) []*cobra.Command {
	return slices.DeleteFunc(slices.Clone(c.Commands()), func(c *cobra.Command) bool {
		return !c.IsAvailableCommand() || c.Name() == "help"
	})
}

// below returns c and all commands below it, each before those below it.
func below(c *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{c}
	for _, child := range children(c) {
		all = append(all, below(child)...)
	}
	return all
}

var (
	// inherited matches the section with the flags of the commands above a command.
	inherited = regexp.MustCompile("(?s)### Options inherited from parent commands\n\n```\n.*?\n```\n\n")
	// seeAlso matches the section with links to other commands, which is the last one.
	seeAlso = regexp.MustCompile(`(?s)### SEE ALSO\n.*`)
	// endOfLine matches spaces at the end of a line.
	endOfLine = regexp.MustCompile(`(?m)[ \t]+$`)
)

// referencePage returns a page with a section for each command. The first command is the title of the page.
func referencePage(t *testing.T, commands []*cobra.Command) string {
	t.Helper()
	var out strings.Builder
	for i, c := range commands {
		c.InitDefaultHelpFlag()
		c.Flags().Lookup("help").Hidden = true // every command has it
		var b bytes.Buffer
		require.NoError(t, doc.GenMarkdownCustom(c, &b, func(s string) string { return s }))
		text := seeAlso.ReplaceAllString(inherited.ReplaceAllString(b.String(), ""), "")
		if i == 0 {
			text = strings.TrimPrefix(text, "#")
		}
		out.WriteString(endOfLine.ReplaceAllString(text, ""))
	}
	return out.String()
}
