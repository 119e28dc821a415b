package protorest

import (
	"encoding/base64"
	"math"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Encode returns a message as it is encoded in JSON. Fields that are not set have their default value in JSON. Only
// optional fields and the token of the next page are left out if they are not set.
func Encode(m protoreflect.Message) map[string]any {
	out := map[string]any{}
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if (f.HasPresence() || f.Name() == "next_page_token") && !m.Has(f) {
			continue
		}
		out[string(f.Name())] = encodeField(f, m.Get(f))
	}
	return out
}

func encodeField(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	if f.IsMap() {
		out := map[string]any{}
		for key, value := range v.Map().Range {
			out[key.String()] = encodeValue(f.MapValue(), value)
		}
		return out
	}
	if !f.IsList() {
		return encodeValue(f, v)
	}
	out := make([]any, 0, v.List().Len())
	for i := range v.List().Len() {
		out = append(out, encodeValue(f, v.List().Get(i)))
	}
	return out
}

func encodeValue(f protoreflect.FieldDescriptor, v protoreflect.Value) any {
	switch f.Kind() {
	case protoreflect.EnumKind:
		return enumText(f.Enum(), v.Enum())
	case protoreflect.MessageKind:
		if only := CollectionField(f.Message()); only != nil {
			return encodeField(only, v.Message().Get(only))
		}
		return Encode(v.Message())
	}
	return v.Interface()
}

// CollectionField returns the field of a message type with a single field that is a list or a map. It returns nil for
// other message types.
func CollectionField(d protoreflect.MessageDescriptor) protoreflect.FieldDescriptor {
	if d.Fields().Len() == 1 && (d.Fields().Get(0).IsList() || d.Fields().Get(0).IsMap()) {
		return d.Fields().Get(0)
	}
	return nil
}

// Decode sets the fields of a message from decoded JSON. The parameter at is the path of the message in its request
// with a final dot, or empty for the request itself. Decode returns InvalidArgument for a value whose type is not the
// field's. Unknown fields are ignored or, if strict is set, refused with InvalidArgument.
func Decode(m protoreflect.Message, at string, body map[string]any, strict bool) error {
	for key, value := range body {
		f := m.Descriptor().Fields().ByName(protoreflect.Name(key))
		if f == nil && strict {
			return rest.UnknownField(at + key)
		}
		if f == nil || value == nil {
			continue
		}
		if err := decodeField(m, f, decoding{at + key, strict}, value); err != nil {
			return err
		}
	}
	return nil
}

// decoding holds the path of the field that is decoded, and whether unknown fields are refused.
type decoding struct {
	at     string
	strict bool
}

func decodeField(m protoreflect.Message, f protoreflect.FieldDescriptor, at decoding, value any) error {
	if f.IsMap() {
		return decodeMap(m.Mutable(f).Map(), f, at, value)
	}
	if !f.IsList() {
		v, err := decodeValue(m.NewField(f), f, at, value)
		if err == nil {
			m.Set(f, v)
		}
		return err
	}
	all, ok := value.([]any)
	if !ok {
		return wrongType(at.at, "an array")
	}
	list := m.Mutable(f).List()
	for i, one := range all {
		v, err := decodeValue(list.NewElement(), f, decoding{at.at + "[" + strconv.Itoa(i) + "]", at.strict}, one)
		if err != nil {
			return err
		}
		list.Append(v)
	}
	return nil
}

// decodeMap adds the members of a JSON object to a map field. Keys are strings.
func decodeMap(m protoreflect.Map, f protoreflect.FieldDescriptor, at decoding, value any) error {
	all, ok := value.(map[string]any)
	if !ok {
		return wrongType(at.at, "an object")
	}
	for key, one := range all {
		v, err := decodeValue(m.NewValue(), f.MapValue(), decoding{at.at + "." + key, at.strict}, one)
		if err != nil {
			return err
		}
		m.Set(protoreflect.ValueOfString(key).MapKey(), v)
	}
	return nil
}

// decodeValue converts decoded JSON to a value of the field f. The parameter into is a new value of this field, which
// decodeValue fills if the field is a message.
func decodeValue(
	into protoreflect.Value, f protoreflect.FieldDescriptor, from decoding, value any,
) (protoreflect.Value, error) {
	at := from.at
	switch f.Kind() {
	case protoreflect.StringKind:
		if s, ok := value.(string); ok {
			return protoreflect.ValueOfString(s), nil
		}
		return into, wrongType(at, "a string")
	case protoreflect.BytesKind:
		if s, ok := value.(string); ok {
			if b, err := base64.StdEncoding.DecodeString(s); err == nil {
				return protoreflect.ValueOfBytes(b), nil
			}
		}
		return into, wrongType(at, "a string in base64")
	case protoreflect.BoolKind:
		if b, ok := value.(bool); ok {
			return protoreflect.ValueOfBool(b), nil
		}
		return into, wrongType(at, "true or false")
	case protoreflect.EnumKind:
		s, ok := value.(string)
		if !ok {
			return into, wrongType(at, "a string")
		}
		return decodeEnum(f.Enum(), at, s)
	case protoreflect.MessageKind:
		if only := CollectionField(f.Message()); only != nil {
			return into, decodeField(into.Message(), only, from, value)
		}
		body, ok := value.(map[string]any)
		if !ok {
			return into, wrongType(at, "an object")
		}
		return into, Decode(into.Message(), at+".", body, from.strict)
	}
	n, ok := value.(float64)
	if !ok || n != math.Trunc(n) {
		return into, wrongType(at, "an integer")
	}
	return decodeNumber(f, at, n)
}

func decodeNumber(f protoreflect.FieldDescriptor, at string, n float64) (v protoreflect.Value, err error) {
	switch {
	case f.Kind() == protoreflect.Uint32Kind && n >= 0 && n <= math.MaxUint32:
		return protoreflect.ValueOfUint32(uint32(n)), nil
	case f.Kind() == protoreflect.Int32Kind && n >= math.MinInt32 && n <= math.MaxInt32:
		return protoreflect.ValueOfInt32(int32(n)), nil
	case f.Kind() == protoreflect.Uint64Kind && n >= 0 && n <= 1<<53:
		return protoreflect.ValueOfUint64(uint64(n)), nil
	case f.Kind() == protoreflect.Int64Kind && n >= -1<<53 && n <= 1<<53:
		return protoreflect.ValueOfInt64(int64(n)), nil
	}
	return v, fault.Invalid(at, "%v is out of range", n).With("constraint", "range")
}

func decodeEnum(e protoreflect.EnumDescriptor, at, text string) (protoreflect.Value, error) {
	for i := range e.Values().Len() {
		if v := e.Values().Get(i); v.Number() != 0 && enumText(e, v.Number()) == text {
			return protoreflect.ValueOfEnum(v.Number()), nil
		}
	}
	return protoreflect.Value{}, fault.Invalid(
		at, "must be %s, got %q", strings.Join(EnumNames(e, false), " or "), text[:min(len(text), 64)],
	).
		With("constraint", "enum")
}

// EnumNames returns the names of the values of an enum in JSON, sorted. The name of the value 0 is among them if zero is
// set: responses can have it.
func EnumNames(e protoreflect.EnumDescriptor, zero bool) (names []string) {
	for i := range e.Values().Len() {
		if n := e.Values().Get(i).Number(); n != 0 || zero {
			names = append(names, enumText(e, n))
		}
	}
	slices.Sort(names)
	return names
}

func wrongType(at, want string) error {
	return fault.Invalid(at, "must be %s", want).With("constraint", "type")
}

// enumText returns the name of an enum value in JSON: the generated name in lower case without its prefix, such as
// active for STATUS_ACTIVE.
func enumText(e protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := e.Values().ByNumber(n)
	if v == nil {
		return ""
	}
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), enumPrefix(e)))
}

// enumPrefix returns the common prefix of the names of an enum's values, derived from the name of the first value.
func enumPrefix(e protoreflect.EnumDescriptor) string {
	return strings.TrimSuffix(string(e.Values().Get(0).Name()), "UNSPECIFIED")
}
