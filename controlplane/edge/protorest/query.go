package protorest

import (
	"net/http"
	"net/url"
	"strconv"
	"unicode/utf8"

	"github.com/gorilla/mux"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// readParameters sets those fields of a request that are parameters of the query or variables of the path.
func readParameters(q *http.Request, m protoreflect.Message) error {
	for key, values := range q.URL.Query() {
		f := m.Descriptor().Fields().ByName(protoreflect.Name(key))
		switch {
		case f == nil || !inQuery(f):
			continue // strict requests were checked before
		case f.IsList():
			for _, text := range values {
				v, err := decodeText(f, text)
				if err != nil {
					return err
				}
				m.Mutable(f).List().Append(v)
			}
		default:
			v, err := decodeText(f, values[0])
			if err != nil {
				return err
			}
			m.Set(f, v)
		}
	}
	return readVariables(q, m)
}

// inQuery reports whether a field of a request can be a parameter of the query. Maps and messages cannot.
func inQuery(f protoreflect.FieldDescriptor) bool {
	return f.Kind() != protoreflect.MessageKind && f.Kind() != protoreflect.BytesKind
}

// readVariables sets the fields of a request that are variables of the path.
func readVariables(q *http.Request, m protoreflect.Message) error {
	for key := range mux.Vars(q) {
		text, err := variable(q, key)
		if err != nil {
			return err
		}
		f := variableField(m.Descriptor(), key)
		v, err := decodeText(f, text)
		if err != nil {
			return err
		}
		m.Set(f, v)
	}
	return nil
}

// variable returns the value of a variable of the path, percent-decoded.
func variable(q *http.Request, name string) (string, error) {
	text, err := url.PathUnescape(mux.Vars(q)[name])
	if err != nil {
		return "", fault.Invalid(name, "is not escaped correctly in the path").Because(err)
	}
	return text, nil
}

// decodeText converts the text of a parameter to a value of the field f, or of an element of the list f.
func decodeText(f protoreflect.FieldDescriptor, text string) (v protoreflect.Value, err error) {
	at := string(f.Name())
	switch f.Kind() {
	case protoreflect.StringKind:
		if !utf8.ValidString(text) {
			return v, wrongType(at, "UTF-8")
		}
		return protoreflect.ValueOfString(text), nil
	case protoreflect.BoolKind:
		switch text {
		case "true", "false":
			return protoreflect.ValueOfBool(text == "true"), nil
		}
		return v, wrongType(at, "true or false")
	case protoreflect.EnumKind:
		return decodeEnum(f.Enum(), at, text)
	}
	if f.Kind() == protoreflect.Uint64Kind {
		n, err := strconv.ParseUint(text, 10, 64)
		if err != nil {
			return v, wrongType(at, "an integer from 0")
		}
		return protoreflect.ValueOfUint64(n), nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return v, wrongType(at, "an integer")
	}
	if f.Kind() == protoreflect.Int64Kind {
		return protoreflect.ValueOfInt64(n), nil
	}
	return decodeNumber(f, at, float64(n))
}
