package rpc

import (
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// maxTarget bounds what of a request the audit keeps, in bytes.
const maxTarget = 256

// target names what a request is about: its ids and names, and nothing else. What may be secret has another name.
func target(req any) string {
	m, ok := req.(proto.Message)
	if !ok {
		return ""
	}
	var parts []string
	r := m.ProtoReflect()
	fields := r.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		name := string(f.Name())
		if f.Kind() != protoreflect.StringKind || f.IsList() || f.IsMap() || !names(name) {
			continue
		}
		if value := r.Get(f).String(); value != "" {
			parts = append(parts, name+"="+value)
		}
	}
	text := strings.Join(parts, " ")
	if len(text) > maxTarget {
		text = strings.ToValidUTF8(text[:maxTarget], "") + "…"
	}
	return text
}

// names reports whether a field of this name holds an id or a name.
func names(field string) bool {
	return field == "id" || field == "name" || field == "username" || strings.HasSuffix(field, "_id")
}
