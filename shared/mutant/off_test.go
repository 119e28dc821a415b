//go:build !mutant

package mutant

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// known returns the values of the constants in doc.go, which are the names of the mutants, by the constants' names.
func known(t *testing.T) map[string]string {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "doc.go", nil, 0)
	require.NoError(t, err)
	all := map[string]string{}
	for _, d := range file.Decls {
		group, ok := d.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			values := spec.(*ast.ValueSpec)
			for i, value := range values.Values {
				name, err := strconv.Unquote(value.(*ast.BasicLit).Value)
				require.NoError(t, err)
				all[values.Names[i].Name] = name
			}
		}
	}
	require.GreaterOrEqual(t, len(all), 55)
	return all
}

// TestNoMutantInNormalBuilds checks that in a build without the tag mutant, as the programs are built, On returns false
// for every mutant, even if TRIVET_MUTANT names it.
func TestNoMutantInNormalBuilds(t *testing.T) {
	for _, name := range known(t) {
		t.Setenv("TRIVET_MUTANT", name)
		require.False(t, On(name), name)
		require.Empty(t, Environ())
	}
}

// TestEveryMutantIsUsed checks that the code calls On for every known mutant, and that a test activates it.
func TestEveryMutantIsUsed(t *testing.T) {
	inCode, inTests := map[string]bool{}, map[string]bool{}
	use := regexp.MustCompile(`\bmutant\.([A-Z]\w*)`)
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && strings.HasPrefix(d.Name(), ".") && !strings.HasPrefix(d.Name(), ".."):
			return filepath.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		used := inCode
		if strings.HasSuffix(path, "_test.go") {
			used = inTests
		}
		for _, m := range use.FindAllSubmatch(text, -1) {
			used[string(m[1])] = true
		}
		return nil
	}))
	for constant := range known(t) {
		require.True(t, inCode[constant], "no code can be broken by %s", constant)
		require.True(t, inTests[constant], "no test activates %s", constant)
	}
}
