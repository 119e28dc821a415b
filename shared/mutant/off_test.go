//go:build !mutant

package mutant

import (
	"go/ast"
	"go/parser"
	"go/token"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestNoMutantInNormalBuilds checks that no known mutant can be on in a build without the tag mutant, which is how the
// programs are built, whatever the environment says.
func TestNoMutantInNormalBuilds(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "doc.go", nil, 0)
	require.NoError(t, err)
	known := 0
	for _, d := range file.Decls {
		group, ok := d.(*ast.GenDecl)
		if !ok || group.Tok != token.CONST {
			continue
		}
		for _, spec := range group.Specs {
			for _, value := range spec.(*ast.ValueSpec).Values {
				name, err := strconv.Unquote(value.(*ast.BasicLit).Value)
				require.NoError(t, err)
				t.Setenv("TRIVET_MUTANT", name)
				require.False(t, On(name), name)
				known++
			}
		}
	}
	require.GreaterOrEqual(t, known, 30)
}
