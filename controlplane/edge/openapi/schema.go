package openapi

import (
	"encoding/json"
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
)

// direction tells whether a schema is for requests or for responses. In requests all fields of a message are optional,
// and in responses most are always there.
type direction bool

const (
	input  direction = false
	output direction = true
)

// schema returns the schema of a description in rest.Route: a value of a Go type, or one of the descriptions of package
// protorest.
func (g *generator) schema(of any, d direction) object {
	switch of := of.(type) {
	case protorest.Input:
		return g.requestBody(of)
	case protorest.Output:
		return g.message(of.Message, output)
	case protoreflect.FieldDescriptor:
		return g.field(of, d)
	}
	return g.goType(reflect.TypeOf(of), d, "")
}

// requestBody returns the schema of the body of a route that is served by an RPC.
func (g *generator) requestBody(in protorest.Input) object {
	properties := object{}
	add := func(m protoreflect.MessageDescriptor, wanted func(protoreflect.FieldDescriptor) bool) {
		for i := range m.Fields().Len() {
			if f := m.Fields().Get(i); wanted(f) {
				properties[string(f.Name())] = g.field(f, input)
			}
		}
	}
	tenant := func(f protoreflect.FieldDescriptor) bool { return f.Name() == "org_id" || f.Name() == "project_id" }
	if in.Nested != nil {
		add(in.Message, tenant)
		add(in.Nested.Message(), func(protoreflect.FieldDescriptor) bool { return true })
	} else {
		add(in.Message, func(f protoreflect.FieldDescriptor) bool { return !slices.Contains(in.Omit, f) || tenant(f) })
	}
	return g.objectOf(properties)
}

// message returns a reference to the schema of a message, which it adds to the document if it is not there yet.
func (g *generator) message(m protoreflect.MessageDescriptor, d direction) object {
	name := string(m.FullName())
	if d == input {
		name += ".Input"
	}
	if _, done := g.schemas[name]; !done {
		g.schemas[name] = object{} // a message can contain itself
		g.schemas[name] = g.messageSchema(m, d)
	}
	return ref(name)
}

func (g *generator) messageSchema(m protoreflect.MessageDescriptor, d direction) object {
	properties, required := object{}, []string{}
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		properties[string(f.Name())] = g.field(f, d)
		if d == output && !f.HasPresence() && f.Name() != "next_page_token" {
			required = append(required, string(f.Name()))
		}
	}
	out := g.objectOf(properties, required...)
	if about := g.opts.Comment(m.FullName()); about != "" {
		out["description"] = about
	}
	return out
}

// field returns the schema of a field as package protorest encodes it, with the field's comment.
func (g *generator) field(f protoreflect.FieldDescriptor, d direction) object {
	var out object
	switch {
	case f.IsMap():
		out = object{"type": "object", "additionalProperties": g.value(f.MapValue(), d)}
	case f.IsList():
		out = object{"type": "array", "items": g.value(f, d)}
	default:
		out = g.value(f, d)
	}
	if about := g.opts.Comment(f.FullName()); about != "" {
		out["description"] = about
	}
	return out
}

func (g *generator) value(f protoreflect.FieldDescriptor, d direction) object {
	switch f.Kind() {
	case protoreflect.StringKind:
		return object{"type": "string"}
	case protoreflect.BytesKind:
		return object{"type": "string", "contentEncoding": "base64"}
	case protoreflect.BoolKind:
		return object{"type": "boolean"}
	case protoreflect.DoubleKind, protoreflect.FloatKind:
		return object{"type": "number"}
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind:
		return object{"type": "integer", "format": f.Kind().String(), "minimum": 0}
	case protoreflect.EnumKind:
		return object{"type": "string", "enum": protorest.EnumNames(f.Enum(), d == output)}
	case protoreflect.MessageKind:
		if only := protorest.CollectionField(f.Message()); only != nil {
			return g.field(only, d)
		}
		return g.message(f.Message(), d)
	}
	return object{"type": "integer", "format": f.Kind().String()}
}

// goType returns the schema of the JSON of a Go type. Structs with a name get a schema of their own in the document. A
// field with the tag api:"required" is required in requests, and one with api:"null" can be null in responses. For a
// struct without a name, the parameter field is the name of the field that has this type, as in Options.GoComment.
func (g *generator) goType(t reflect.Type, d direction, field string) object {
	if t.Kind() == reflect.Pointer {
		return g.goType(t.Elem(), d, field)
	}
	if reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()) {
		return object{"type": "string"}
	}
	switch t.Kind() {
	case reflect.String:
		return object{"type": "string"}
	case reflect.Bool:
		return object{"type": "boolean"}
	case reflect.Uint32, reflect.Uint64:
		return object{"type": "integer", "format": t.Kind().String(), "minimum": 0}
	case reflect.Int, reflect.Int32, reflect.Int64:
		return object{"type": "integer"}
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return object{"type": "string", "contentEncoding": "base64"}
		}
		return object{"type": "array", "items": g.goType(t.Elem(), d, field)}
	case reflect.Map:
		if t.Elem().Kind() == reflect.Interface {
			return object{"type": "object"}
		}
		return object{"type": "object", "additionalProperties": g.goType(t.Elem(), d, field)}
	case reflect.Struct:
		if t.Name() == "" {
			return g.structSchema(t, d, field)
		}
		name := path.Base(t.PkgPath()) + "." + t.Name()
		if _, done := g.schemas[name]; !done {
			g.schemas[name] = object{}
			g.schemas[name] = g.structSchema(t, d, t.PkgPath()+"."+t.Name())
		}
		return ref(name)
	}
	panic(fmt.Sprintf("no schema for %s", t))
}

// structSchema returns the schema of a struct. at is the name of the struct, or of the field that has it as its type.
func (g *generator) structSchema(t reflect.Type, d direction, at string) object {
	properties, required := object{}, []string{}
	for i := range t.NumField() {
		f := t.Field(i)
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		schema := g.goType(f.Type, d, at+"."+f.Name)
		omitted, tag := strings.Contains(options, "omitempty"), f.Tag.Get("api")
		if d == output && (tag == "null" || f.Type.Kind() == reflect.Pointer && !omitted) {
			schema["type"] = []any{schema["type"], "null"}
		}
		if g.opts.GoComment != nil {
			if about := g.opts.GoComment(at + "." + f.Name); about != "" {
				schema["description"] = about
			}
		}
		properties[name] = schema
		if d == output && !omitted || d == input && tag == "required" {
			required = append(required, name)
		}
	}
	return g.objectOf(properties, required...)
}
