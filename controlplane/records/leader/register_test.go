package leader_test

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
)

type counter struct{ n int }

func (c *counter) addOnLeader(_ context.Context, by int) (int, error) { c.n += by; return c.n, nil }

var addCommand = leader.NewCommand("counter.add", leader.Once, (*counter).addOnLeader)

// TestCommandRunsOnTheRegisteredService registers one command variable for two services. A call must run on the service
// that is registered with the Commands that it is called with.
func TestCommandRunsOnTheRegisteredService(t *testing.T) {
	one, two := leadertest.Single(), leadertest.Single()
	leader.Register(one, &counter{}, addCommand)
	leader.Register(two, &counter{n: 10}, addCommand)
	for range 2 {
		_, err := addCommand.Call(t.Context(), one, 1)
		require.NoError(t, err)
	}
	got, err := addCommand.Call(t.Context(), two, 1)
	require.NoError(t, err)
	require.Equal(t, 11, got)
}

// TestNotRegistered checks that calling a command or stream that was not registered fails on the leader and on other
// members.
func TestNotRegistered(t *testing.T) {
	l := leadertest.NewLeadership(1)
	for _, c := range leadertest.NewMembers(2, l) {
		_, err := addCommand.Call(t.Context(), c, 1)
		require.EqualError(t, err, "command counter.add is not registered")
		stream := leader.NewStream("counter.list", func(*counter, context.Context, int, func([]byte) error) error { return nil })
		require.EqualError(t, stream.Call(t.Context(), c, 1, nil), "command counter.list is not registered")
	}
}

func TestRegisteredTwice(t *testing.T) {
	c := leadertest.Single()
	leader.Register(c, &counter{}, addCommand)
	require.Panics(t, func() { leader.Register(c, &counter{}, addCommand) })
}

// TestEveryCommandIsRegistered parses all packages of the control plane. Each command that a package declares must be
// passed to leader.Register exactly once.
func TestEveryCommandIsRegistered(t *testing.T) {
	packages := map[string][]*ast.File{}
	require.NoError(t, filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		packages[filepath.Dir(path)] = append(packages[filepath.Dir(path)], f)
		return err
	}))
	commands := 0
	for dir, files := range packages {
		declared, registered := commandsOf(files)
		for _, name := range declared {
			require.Equal(t, 1, registered[name], "%s: leader.Register must have %s once", dir, name)
		}
		commands += len(declared)
	}
	require.Greater(t, commands, 40, "the commands were not found")
}

// commandsOf returns the names of the package-level variables that hold a command, a stream or an exchange, and how often each is
// passed to leader.Register. A variable also counts if its value comes from a function of the package that calls
// NewCommand, NewStream or NewExchange.
func commandsOf(files []*ast.File) (declared []string, registered map[string]int) {
	constructors := map[string]bool{"leader.NewCommand": true, "leader.NewStream": true, "leader.NewExchange": true}
	registered = map[string]int{}
	for _, f := range files {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			ast.Inspect(fn, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok {
					return true
				}
				switch name := nameOf(call.Fun); {
				case name == "leader.NewCommand" || name == "leader.NewStream" || name == "leader.NewExchange":
					constructors[fn.Name.Name] = true
				case name == "leader.Register":
					for _, arg := range call.Args[2:] {
						registered[nameOf(arg)]++
					}
				}
				return true
			})
		}
	}
	for _, f := range files {
		for _, d := range f.Decls {
			vars, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range vars.Specs {
				v, ok := spec.(*ast.ValueSpec)
				if !ok {
					continue
				}
				for i, value := range v.Values {
					if call, ok := value.(*ast.CallExpr); ok && constructors[nameOf(call.Fun)] {
						declared = append(declared, v.Names[i].Name)
					}
				}
			}
		}
	}
	return declared, registered
}

// nameOf returns the expression e as text if it has the form x or x.y, without type arguments, and "" for any other
// expression.
func nameOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return nameOf(e.X) + "." + e.Sel.Name
	case *ast.IndexExpr:
		return nameOf(e.X)
	case *ast.IndexListExpr:
		return nameOf(e.X)
	}
	return ""
}
