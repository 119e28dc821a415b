package show

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Object is an object of a document: keys in a fixed order, and their values. A value is nil, a bool, string, int64,
// uint64 or float64, an Object, or a []any of values.
type Object []Member

// Member is a key of an Object with its value.
type Member struct {
	Key   string
	Value any
}

// Document converts a message into the shape that JSON, YAML, jsonpath and template output have:
//
//   - The keys are the names of the fields, in the order of the proto file. All keys are present.
//   - Integers of 64 bits are numbers. Bytes are strings in base64.
//   - An enum is its name without the prefix of the type, such as RUNNING. UNSPECIFIED is nil.
//   - A time is a string such as 2026-03-01T12:00:00.000Z. A time that is not set is nil. IsTime says which fields are
//     times.
//   - A message, an optional field or a member of a oneof that is not set is nil.
func Document(m proto.Message) Object { return object(m.ProtoReflect()) }

// Documents returns the document of a list: its objects under the key "items", and the page token.
func Documents(items []any, nextPageToken string) Object {
	if items == nil {
		items = []any{}
	}
	return Object{{"items", items}, {"next_page_token", nextPageToken}}
}

// Item returns the document of a message, or of another Go value (see Value). It returns a document itself unchanged.
func Item(v any) (any, error) {
	switch v := v.(type) {
	case proto.Message:
		return Document(v), nil
	case Object, []any:
		return v, nil
	}
	return Value(v)
}

// Value returns the document of a Go value by the rules of encoding/json. It returns an error for a value that
// encoding/json cannot encode.
func Value(v any) (any, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode the output: %w", err)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	return decode(d)
}

func object(m protoreflect.Message) Object {
	fields := m.Descriptor().Fields()
	out := make(Object, fields.Len())
	for i := range out {
		fd := fields.Get(i)
		out[i] = Member{string(fd.Name()), field(m, fd)}
	}
	return out
}

func field(m protoreflect.Message, fd protoreflect.FieldDescriptor) any {
	value := m.Get(fd)
	switch {
	case fd.IsMap():
		pairs := map[string]any{}
		value.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
			pairs[k.String()] = single(fd.MapValue(), v)
			return true
		})
		out := Object{}
		for _, k := range slices.Sorted(maps.Keys(pairs)) {
			out = append(out, Member{k, pairs[k]})
		}
		return out
	case fd.IsList():
		out := make([]any, value.List().Len())
		for i := range out {
			out[i] = single(fd, value.List().Get(i))
		}
		return out
	case fd.HasPresence() && !m.Has(fd):
		return nil
	}
	return single(fd, value)
}

// single converts one value of a field, which is an element if the field is repeated.
func single(fd protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch fd.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return object(v.Message())
	case protoreflect.EnumKind:
		if name := EnumName(fd.Enum(), v.Enum()); name != "" {
			return name
		}
		return nil
	case protoreflect.BytesKind:
		return base64.StdEncoding.EncodeToString(v.Bytes())
	case protoreflect.BoolKind:
		return v.Bool()
	case protoreflect.StringKind:
		return strings.ToValidUTF8(v.String(), "\ufffd")
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		if f := v.Float(); !math.IsNaN(f) && !math.IsInf(f, 0) {
			return f
		}
		return nil // JSON has no such number
	case protoreflect.Uint64Kind, protoreflect.Fixed64Kind, protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
		return v.Uint()
	}
	if IsTime(fd) {
		return timeText(v.Int())
	}
	return v.Int()
}

// timeText formats Unix milliseconds, and returns nil for 0.
func timeText(ms int64) any {
	if ms == 0 {
		return nil
	}
	return time.UnixMilli(ms).UTC().Format("2006-01-02T15:04:05.000Z")
}

// EnumName returns the name of an enum value without the prefix of its type, "" for UNSPECIFIED, and the number of a value
// that this program does not know.
func EnumName(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	known := e.Values().ByNumber(n)
	if known == nil {
		return strconv.Itoa(int(n))
	}
	prefix, ok := prefixOf(e)
	if ok && n == 0 {
		return ""
	}
	return strings.TrimPrefix(string(known.Name()), prefix)
}

// EnumNames returns the names of all values of an enum, as EnumName returns them, and the prefix that EnumName removes.
func EnumNames(e protoreflect.EnumDescriptor) (prefix string, all []string) {
	prefix, _ = prefixOf(e)
	for i := range e.Values().Len() {
		if name := EnumName(e, e.Values().Get(i).Number()); name != "" {
			all = append(all, name)
		}
	}
	return prefix, all
}

// prefixOf returns the prefix of the names of an enum's values. It is that of the value 0, whose name ends in UNSPECIFIED.
// Without such a value it returns "" and false.
func prefixOf(e protoreflect.EnumDescriptor) (string, bool) {
	prefix, ok := strings.CutSuffix(string(e.Values().ByNumber(0).Name()), "UNSPECIFIED")
	if !ok {
		return "", false
	}
	return prefix, true
}

// decode reads one JSON value from d and keeps the order of keys.
func decode(d *json.Decoder) (any, error) {
	token, err := d.Token()
	if err != nil {
		return nil, fmt.Errorf("encode the output: %w", err)
	}
	switch t := token.(type) {
	case json.Delim:
		if t == '[' {
			out := []any{}
			for d.More() {
				v, err := decode(d)
				if err != nil {
					return nil, err
				}
				out = append(out, v)
			}
			_, err = d.Token()
			return out, err
		}
		out := Object{}
		for d.More() {
			key, err := d.Token()
			if err != nil {
				return nil, fmt.Errorf("encode the output: %w", err)
			}
			v, err := decode(d)
			if err != nil {
				return nil, err
			}
			out = append(out, Member{key.(string), v})
		}
		_, err = d.Token()
		return out, err
	case json.Number:
		if n, err := strconv.ParseInt(t.String(), 10, 64); err == nil {
			return n, nil
		}
		if n, err := strconv.ParseUint(t.String(), 10, 64); err == nil {
			return n, nil
		}
		return t.Float64()
	}
	return token, nil
}
