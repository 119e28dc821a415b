package vmcontrollerv1

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// TestContract checks that the messages, field numbers, enumeration values and RPCs are exactly those of the wire
// contract, with none missing and none added. The expected table was copied from the contract, not from the protos.
func TestContract(t *testing.T) {
	text, err := os.ReadFile("testdata/contract.txt")
	require.NoError(t, err)
	var want []string
	for _, line := range strings.Split(string(text), "\n") {
		if line != "" && !strings.HasPrefix(line, "#") {
			want = append(want, line)
		}
	}
	var got []string
	for _, f := range []protoreflect.FileDescriptor{
		File_vmcontroller_v1_vm_proto, File_vmcontroller_v1_image_proto, File_vmcontroller_v1_volume_proto, File_vmcontroller_v1_node_proto,
	} {
		require.EqualValues(t, "vmcontroller.v1", f.Package())
		got = append(got, lines(f)...)
	}
	require.Empty(t, missing(want, got), "in the specification, not in the protos")
	require.Empty(t, missing(got, want), "in the protos, not in the specification")
}

func missing(of, in []string) (out []string) {
	for _, line := range of {
		if !slices.Contains(in, line) {
			out = append(out, line)
		}
	}
	return out
}

func lines(f protoreflect.FileDescriptor) (out []string) {
	for i := range f.Messages().Len() {
		m := f.Messages().Get(i)
		for j := range m.Fields().Len() {
			field := m.Fields().Get(j)
			out = append(out, fmt.Sprintf("%s.%s %d %s", m.Name(), field.Name(), field.Number(), kind(field)))
		}
	}
	for i := range f.Enums().Len() {
		e := f.Enums().Get(i)
		for j := range e.Values().Len() {
			v := e.Values().Get(j)
			out = append(out, fmt.Sprintf("%s.%s %d", e.Name(), v.Name(), v.Number()))
		}
	}
	for i := range f.Services().Len() {
		s := f.Services().Get(i)
		for j := range s.Methods().Len() {
			m := s.Methods().Get(j)
			stream := ""
			if m.IsStreamingServer() {
				stream = "stream "
			}
			out = append(out, fmt.Sprintf("%s.%s %s -> %s%s", s.Name(), m.Name(), m.Input().Name(), stream, m.Output().Name()))
		}
	}
	return out
}

func kind(f protoreflect.FieldDescriptor) string {
	switch {
	case f.IsMap():
		return "map<string,string>"
	case f.IsList():
		return "repeated " + single(f)
	}
	return single(f)
}

func single(f protoreflect.FieldDescriptor) string {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return string(f.Message().Name())
	case protoreflect.EnumKind:
		return string(f.Enum().Name())
	}
	return f.Kind().String()
}
