package list

import (
	"maps"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	"github.com/trivet-cloud/trivet/shared/filter"
)

// maxDepth is the maximum number of messages that contain each other on the path of a field that a filter can compare.
const maxDepth = 4

type field = filter.Field[protoreflect.Message]

// Field is a field of messages that a filter can compare.
type Field = field

// fieldsOf returns the fields of T that the command line can compare with a filter, by name: those of the JSON output
// that are text, numbers, times, booleans, enums, lists of text or enums, and maps of text. A field of a message in T has the name of both with a dot
// between them. It returns nil if T is not a message.
func fieldsOf[T any]() map[string]field {
	var zero T
	m, ok := any(zero).(proto.Message)
	if !ok {
		return nil
	}
	fields := map[string]field{}
	same := func(m protoreflect.Message) protoreflect.Message { return m }
	addFields(fields, m.ProtoReflect().Descriptor(), "", same, 1)
	return fields
}

// addFields adds the fields of a message to fields. prefix is put before their names. of returns the message for an object
// of the list.
func addFields(to map[string]field, d protoreflect.MessageDescriptor, prefix string, of func(protoreflect.Message) protoreflect.Message, depth int) {
	for i := range d.Fields().Len() {
		fd := d.Fields().Get(i)
		value := func(m protoreflect.Message) protoreflect.Value { return of(m).Get(fd) }
		name := prefix + string(fd.Name())
		switch {
		case fd.IsMap():
			if fd.MapKey().Kind() == protoreflect.StringKind && fd.MapValue().Kind() == protoreflect.StringKind {
				to[name] = filter.Pairs(func(m protoreflect.Message) map[string]string { return pairs(value(m).Map()) })
			}
		case fd.IsList():
			if text := textOf(fd); text != nil {
				to[name] = filter.Texts(func(m protoreflect.Message) []string { return texts(value(m).List(), text) })
			}
		case fd.Kind() == protoreflect.MessageKind:
			if depth < maxDepth {
				inner := func(m protoreflect.Message) protoreflect.Message { return value(m).Message() }
				addFields(to, fd.Message(), name+".", inner, depth+1)
			}
		default:
			if f, ok := scalar(fd, value); ok {
				to[name] = f
			}
		}
	}
}

// scalar returns the filter field for a field of a message that has one value. It returns false for bytes.
func scalar(fd protoreflect.FieldDescriptor, value func(protoreflect.Message) protoreflect.Value) (field, bool) {
	switch kind := fd.Kind(); {
	case kind == protoreflect.BytesKind:
		return field{}, false
	case kind == protoreflect.BoolKind:
		return filter.Word("", []string{"TRUE", "FALSE"}, func(m protoreflect.Message) string {
			return strings.ToUpper(value(m).String())
		}), true
	case kind == protoreflect.EnumKind:
		prefix, words := show.EnumNames(fd.Enum())
		return filter.Word(prefix, words, func(m protoreflect.Message) string { return show.EnumName(fd.Enum(), value(m).Enum()) }), true
	case kind == protoreflect.StringKind:
		return filter.Text(func(m protoreflect.Message) string { return value(m).String() }), true
	case show.IsTime(fd):
		return filter.Time(func(m protoreflect.Message) int64 { return value(m).Int() }), true
	}
	return filter.Number(nil, func(m protoreflect.Message) float64 { return number(value(m)) }), true
}

func number(v protoreflect.Value) float64 {
	switch n := v.Interface().(type) {
	case int32:
		return float64(n)
	case int64:
		return float64(n)
	case uint32:
		return float64(n)
	case uint64:
		return float64(n)
	}
	return v.Float()
}

// textOf returns the function that converts an element of a list to the text of the JSON output. It returns nil if the
// elements are neither text nor enums.
func textOf(fd protoreflect.FieldDescriptor) func(protoreflect.Value) string {
	switch fd.Kind() {
	case protoreflect.StringKind:
		return protoreflect.Value.String
	case protoreflect.EnumKind:
		return func(v protoreflect.Value) string { return show.EnumName(fd.Enum(), v.Enum()) }
	}
	return nil
}

func texts(l protoreflect.List, text func(protoreflect.Value) string) (all []string) {
	for i := range l.Len() {
		all = append(all, text(l.Get(i)))
	}
	return all
}

func pairs(m protoreflect.Map) map[string]string {
	out := map[string]string{}
	m.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		out[k.String()] = v.String()
		return true
	})
	return out
}

// addColumns adds the columns of a table to fields, for those who write filters by the table: each column whose name is not
// that of a field. In a filter, the name is in lower case, with underscores for other characters than letters and digits.
// A column with an age is compared as the time at which the age began, such as the time of creation.
func addColumns[T any](fields map[string]field, columns []Column[T]) {
	for _, c := range columns {
		name := filterName(c.Name)
		if _, ok := fields[name]; ok {
			continue
		}
		of := func(m protoreflect.Message) T { return m.Interface().(T) }
		switch {
		case c.Words != nil:
			fields[name] = filter.Word("", c.Words, func(m protoreflect.Message) string { return c.Text(of(m)) })
		case c.time != nil:
			fields[name] = filter.Time(func(m protoreflect.Message) int64 { return c.time(of(m)) })
		case c.number != nil:
			fields[name] = filter.Number(c.units, func(m protoreflect.Message) float64 { return c.number(of(m)) })
		default:
			fields[name] = filter.Text(func(m protoreflect.Message) string { return c.Text(of(m)) })
		}
	}
}

// filterName returns the name of a column in filters.
func filterName(column string) string {
	return strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return '_'
	}, strings.ToLower(column))
}

// filtered returns a copy of k that lists only the objects that match the filter. A filter compares the fields of the
// messages and the columns. filtered returns a *session.Usage error for a filter that cannot be compiled.
func (k *Kind[T]) filtered(text string, columns []Column[T]) (*Kind[T], error) {
	fields := fieldsOf[T]()
	addColumns(fields, columns)
	maps.Copy(fields, k.Fields)
	for name, words := range k.Words {
		fields[name] = filter.Word("", words, func(m protoreflect.Message) string {
			return m.Get(m.Descriptor().Fields().ByName(protoreflect.Name(name))).String()
		})
	}
	match, err := filter.Compile(text, fields)
	if err != nil {
		return nil, session.Usagef("--filter: %s", strings.TrimPrefix(err.Error(), "filter: "))
	}
	out := *k
	out.Keep = func(o T) bool {
		m, ok := any(o).(proto.Message)
		return ok && match(m.ProtoReflect()) && (k.Keep == nil || k.Keep(o))
	}
	return &out, nil
}

// hasLabels reports whether the objects of a list have labels.
func hasLabels(fields map[string]field) bool {
	_, ok := fields["labels"]
	return ok
}

// example returns a filter for the help of a command. It returns "" if the objects have none of the usual fields. If byAPI is
// true, the API filters the objects, which then have the field state.
func example(byAPI bool, fields map[string]field) string {
	if byAPI {
		return "state = RUNNING"
	}
	for _, name := range []string{"name", "id", "user_id"} {
		if _, ok := fields[name]; ok {
			return name + ` = "web-*"`
		}
	}
	return ""
}
