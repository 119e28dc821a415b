package protodoc

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Reference returns the reference of a package in Markdown: its services with their methods, its messages with their
// fields, and its enums. It returns an error for a package without files.
func (f *Files) Reference(pkg protoreflect.FullName) (string, error) {
	r := reference{files: f}
	fmt.Fprintf(&r.out, "# %s\n\n", pkg)
	r.out.WriteString("Generated from the `.proto` files by `go test ./protos -rewrite`.\n")
	var files []protoreflect.FileDescriptor
	for _, file := range f.All {
		if file.Package() == pkg {
			files = append(files, file)
		}
	}
	if len(files) == 0 {
		return "", fmt.Errorf("package %s: %w", pkg, os.ErrNotExist)
	}
	slices.SortFunc(files, func(a, b protoreflect.FileDescriptor) int { return strings.Compare(a.Path(), b.Path()) })
	for _, file := range files {
		for i := range file.Services().Len() {
			r.service(file.Services().Get(i))
		}
	}
	r.out.WriteString("\n## Messages\n")
	for _, file := range files {
		for i := range file.Messages().Len() {
			r.message(file.Messages().Get(i))
		}
	}
	r.enums(files)
	return r.out.String(), nil
}

// reference is a page while it is written.
type reference struct {
	files *Files
	out   strings.Builder
}

// comment writes the comment of a declaration as paragraphs.
func (r *reference) comment(d protoreflect.Descriptor) {
	if text := r.files.Comment(d.FullName()); text != "" {
		fmt.Fprintf(&r.out, "\n%s\n", text)
	}
}

func (r *reference) service(s protoreflect.ServiceDescriptor) {
	fmt.Fprintf(&r.out, "\n## %s\n", s.Name())
	r.comment(s)
	for i := range s.Methods().Len() {
		m := s.Methods().Get(i)
		stream := map[bool]string{true: "stream "}
		fmt.Fprintf(&r.out, "\n### %s\n\n`rpc %s(%s%s) returns (%s%s)`: %s, %s\n", m.Name(), m.Name(),
			stream[m.IsStreamingClient()], m.Input().Name(), stream[m.IsStreamingServer()], m.Output().Name(),
			link(m.Input(), s.ParentFile().Package()), link(m.Output(), s.ParentFile().Package()))
		r.comment(m)
	}
}

func (r *reference) message(m protoreflect.MessageDescriptor) {
	if m.IsMapEntry() {
		return
	}
	fmt.Fprintf(&r.out, "\n### %s\n", shortName(m))
	r.comment(m)
	if m.Fields().Len() > 0 {
		r.out.WriteString("\n| field | number | type | meaning |\n|---|---|---|---|\n")
	}
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		about := strings.ReplaceAll(r.files.Comment(f.FullName()), "\n\n", " ")
		if one := f.ContainingOneof(); one != nil && !one.IsSynthetic() {
			about = strings.TrimSpace("One of " + string(one.Name()) + ". " + about)
		}
		fmt.Fprintf(&r.out, "| `%s` | %d | %s | %s |\n", f.Name(), f.Number(), typeName(f), strings.ReplaceAll(about, "|", `\|`))
	}
	for i := range m.Messages().Len() {
		r.message(m.Messages().Get(i))
	}
}

func (r *reference) enums(files []protoreflect.FileDescriptor) {
	title := "\n## Enums\n"
	for _, file := range files {
		for i := range file.Enums().Len() {
			e := file.Enums().Get(i)
			fmt.Fprintf(&r.out, "%s\n### %s\n", title, shortName(e))
			title = ""
			r.comment(e)
			r.out.WriteString("\n| value | number | meaning |\n|---|---|---|\n")
			for j := range e.Values().Len() {
				v := e.Values().Get(j)
				fmt.Fprintf(&r.out, "| `%s` | %d | %s |\n", v.Name(), v.Number(), strings.ReplaceAll(r.files.Comment(v.FullName()), "\n\n", " "))
			}
		}
	}
}

// shortName returns the name of a declaration without its package.
func shortName(d protoreflect.Descriptor) string {
	return strings.TrimPrefix(string(d.FullName()), string(d.ParentFile().Package())+".")
}

// link returns a link to the section of a message or an enum, as seen from the page of the given package.
func link(d protoreflect.Descriptor, from protoreflect.FullName) string {
	pkg := d.ParentFile().Package()
	name := shortName(d)
	anchor := "#" + strings.ToLower(strings.ReplaceAll(name, ".", ""))
	switch {
	case strings.HasPrefix(string(pkg), "google."):
		return "`" + string(d.FullName()) + "`"
	case pkg != from:
		return fmt.Sprintf("[%s](%s.md%s)", d.FullName(), pkg, anchor)
	}
	return fmt.Sprintf("[%s](%s)", name, anchor)
}

// typeName returns the type of a field, with a link if it is a message or an enum.
func typeName(f protoreflect.FieldDescriptor) string {
	from := f.ParentFile().Package()
	one := func(f protoreflect.FieldDescriptor) string {
		switch f.Kind() {
		case protoreflect.MessageKind:
			return link(f.Message(), from)
		case protoreflect.EnumKind:
			return link(f.Enum(), from)
		}
		return f.Kind().String()
	}
	switch {
	case f.IsMap():
		return "map of " + one(f.MapKey()) + " to " + one(f.MapValue())
	case f.IsList():
		return "repeated " + one(f)
	case f.HasOptionalKeyword():
		return "optional " + one(f)
	}
	return one(f)
}
