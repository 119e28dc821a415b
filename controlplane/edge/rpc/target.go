package rpc

import (
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// maxTarget is the maximum length in bytes of the text that describes a request in the audit.
const maxTarget = 256

// policy lists the names of request fields whose messages contain new settings. The function target includes the fields
// of these messages in its text.
var policy = []string{"binding", "quota", "identity"}

// credentialFields lists the names of request fields that change a credential. Their values are no secrets.
var credentialFields = []string{"new_secret", "expires_at"}

// target describes a request for the audit: its IDs and names, the roles and settings that it assigns, and the fields of
// credentialFields. It omits all other fields, because they may contain secrets.
func target(req any) string {
	m, ok := req.(proto.Message)
	if !ok {
		return ""
	}
	var parts []string
	r := m.ProtoReflect()
	r.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		name := string(f.Name())
		switch {
		case f.Kind() == protoreflect.MessageKind && !f.IsList() && !f.IsMap() && slices.Contains(policy, name):
			v.Message().Range(func(inner protoreflect.FieldDescriptor, v protoreflect.Value) bool {
				parts = append(parts, name+"."+string(inner.Name())+"="+v.String())
				return true
			})
		case f.Kind() == protoreflect.StringKind && f.IsList() && name == "roles":
			for i := range v.List().Len() {
				parts = append(parts, "role="+v.List().Get(i).String())
			}
		case f.Kind() == protoreflect.StringKind && !f.IsList() && !f.IsMap() && names(name) && v.String() != "":
			parts = append(parts, name+"="+v.String())
		case slices.Contains(credentialFields, name) && (f.Kind() == protoreflect.BoolKind || f.Kind() == protoreflect.Int64Kind):
			parts = append(parts, name+"="+v.String())
		case f.Kind() == protoreflect.Uint64Kind && !f.IsList() && names(name): // the ID of a member
			parts = append(parts, name+"="+v.String())
		}
		return true
	})
	slices.Sort(parts) // Range has no fixed order
	text := strings.Join(parts, " ")
	if len(text) > maxTarget {
		text = strings.ToValidUTF8(text[:maxTarget], "") + "…"
	}
	return text
}

// names returns true if a request field with this name contains an ID or a name.
func names(field string) bool {
	return field == "id" || field == "name" || field == "username" || strings.HasSuffix(field, "_id")
}
