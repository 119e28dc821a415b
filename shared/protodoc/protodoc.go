// Package protodoc reads .proto files with their comments, which compiled programs do not contain, and generates the
// reference of gRPC services from them. The main type is Files. It is for tests that write and check documentation.
package protodoc

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/bufbuild/protocompile"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Files holds compiled .proto files.
type Files struct {
	All []protoreflect.FileDescriptor
	// comments holds the comments of all declarations, by full name.
	comments map[protoreflect.FullName]string
}

// Load compiles all .proto files below a directory, which is also the directory that imports are relative to.
func Load(dir string) (*Files, error) {
	names, err := filepath.Glob(filepath.Join(dir, "*", "*", "*.proto"))
	if err != nil {
		return nil, err
	}
	for i := range names {
		if names[i], err = filepath.Rel(dir, names[i]); err != nil {
			return nil, err
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("there are no .proto files in %s: %w", dir, os.ErrNotExist)
	}
	compiler := protocompile.Compiler{
		Resolver:       protocompile.WithStandardImports(&protocompile.SourceResolver{ImportPaths: []string{dir}}),
		SourceInfoMode: protocompile.SourceInfoStandard,
	}
	compiled, err := compiler.Compile(context.Background(), names...)
	if err != nil {
		return nil, fmt.Errorf("compile the protos: %w", err)
	}
	f := &Files{comments: map[protoreflect.FullName]string{}}
	for _, file := range compiled {
		f.All = append(f.All, file)
		f.readComments(file)
	}
	return f, nil
}

// Comment returns the comment above a declaration, without the comment signs, or "". A blank line divides paragraphs.
func (f *Files) Comment(name protoreflect.FullName) string { return f.comments[name] }

func (f *Files) readComments(file protoreflect.FileDescriptor) {
	note := func(d protoreflect.Descriptor) {
		f.comments[d.FullName()] = paragraphs(file.SourceLocations().ByDescriptor(d).LeadingComments)
	}
	for i := range file.Services().Len() {
		s := file.Services().Get(i)
		note(s)
		for j := range s.Methods().Len() {
			note(s.Methods().Get(j))
		}
	}
	for i := range file.Enums().Len() {
		noteEnum(file.Enums().Get(i), note)
	}
	for i := range file.Messages().Len() {
		noteMessage(file.Messages().Get(i), note)
	}
}

func noteMessage(m protoreflect.MessageDescriptor, note func(protoreflect.Descriptor)) {
	note(m)
	for i := range m.Fields().Len() {
		note(m.Fields().Get(i))
	}
	for i := range m.Enums().Len() {
		noteEnum(m.Enums().Get(i), note)
	}
	for i := range m.Messages().Len() {
		noteMessage(m.Messages().Get(i), note)
	}
}

func noteEnum(e protoreflect.EnumDescriptor, note func(protoreflect.Descriptor)) {
	note(e)
	for i := range e.Values().Len() {
		note(e.Values().Get(i))
	}
}

// paragraphs joins the lines of each paragraph of a comment.
func paragraphs(comment string) string {
	var out []string
	for _, p := range strings.Split(strings.ReplaceAll(comment, "\n ", "\n"), "\n\n") {
		if p = strings.Join(strings.Fields(p), " "); p != "" {
			out = append(out, p)
		}
	}
	return strings.Join(out, "\n\n")
}
