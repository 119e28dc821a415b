package openapitest

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
)

// GoComments returns a function for openapi.Options.GoComment. It reads the comments from the Go source below root, the
// root directory of the module with the given path. The function panics if a package cannot be parsed.
func GoComments(module, root string) func(field string) string {
	parsed := map[string]map[string]string{}
	return func(field string) string {
		slash := strings.LastIndexByte(field, '/')
		name, rest, _ := strings.Cut(field[slash+1:], ".")
		path := field[:slash+1] + name
		if parsed[path] == nil {
			comments, err := parsePackage(filepath.Join(root, strings.TrimPrefix(path, module)))
			if err != nil {
				panic(err)
			}
			parsed[path] = comments
		}
		return parsed[path][rest]
	}
}

// parsePackage returns the comments of the fields of all structs in a directory, by the name of the type and the field.
func parsePackage(dir string) (map[string]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, fmt.Errorf("list the Go files of %s: %w", dir, err)
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("%s has no Go files", dir)
	}
	comments := map[string]string{}
	for _, path := range files {
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, fmt.Errorf("parse the comments of bodies: %w", err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if ok {
				addFields(comments, spec.Name.Name, spec.Type)
			}
			return !ok
		})
	}
	return comments, nil
}

// addFields adds the comments of the fields of a struct, and of structs without a name that are types of its fields.
func addFields(to map[string]string, at string, of ast.Expr) {
	switch of := of.(type) {
	case *ast.StarExpr:
		addFields(to, at, of.X)
	case *ast.ArrayType:
		addFields(to, at, of.Elt)
	case *ast.StructType:
		for _, f := range of.Fields.List {
			for _, name := range f.Names {
				to[at+"."+name.Name] = strings.Join(strings.Fields(f.Doc.Text()), " ")
				addFields(to, at+"."+name.Name, f.Type)
			}
		}
	}
}
