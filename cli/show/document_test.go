package show

import (
	"bytes"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	_ "github.com/trivet-cloud/trivet/protos/console/v1"
	_ "github.com/trivet-cloud/trivet/protos/credit/v1"
	_ "github.com/trivet-cloud/trivet/protos/guest/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	_ "github.com/trivet-cloud/trivet/protos/network/v1"
	_ "github.com/trivet-cloud/trivet/protos/operator/v1"
	_ "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// TestKindsOf64BitFields writes the kind of every 64-bit field of the services for users to testdata/fields.txt. A new field changes
// the file: check that it is a time only if it holds Unix milliseconds, and add it to times if its name does not say so.
func TestKindsOf64BitFields(t *testing.T) {
	datadriven.RunTest(t, "testdata/fields.txt", func(t *testing.T, _ *datadriven.TestData) string {
		var lines []string
		eachMessage(func(m protoreflect.MessageDescriptor) {
			for i := range m.Fields().Len() {
				fd := m.Fields().Get(i)
				switch fd.Kind() {
				case protoreflect.Int64Kind, protoreflect.Uint64Kind, protoreflect.Sint64Kind, protoreflect.Fixed64Kind, protoreflect.Sfixed64Kind:
					lines = append(lines, fmt.Sprintf("%-7s %s", map[bool]string{true: "time", false: "number"}[IsTime(fd)], fd.FullName()))
				}
			}
		})
		slices.Sort(lines)
		return strings.Join(lines, "\n") + "\n"
	})
}

// TestTimesExist checks that each entry of times is a signed 64-bit field that the rule on names does not cover.
func TestTimesExist(t *testing.T) {
	for name := range times {
		d, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
		require.NoError(t, err, name)
		fd := d.(protoreflect.FieldDescriptor)
		require.Equal(t, protoreflect.Int64Kind, fd.Kind(), name)
		require.False(t, strings.HasSuffix(string(name), "_at"), name)
	}
}

// TestEnumNames checks that all enums have names from which Word can remove the prefix.
func TestEnumNames(t *testing.T) {
	eachFile(func(f protoreflect.FileDescriptor) {
		for i := range f.Enums().Len() {
			e := f.Enums().Get(i)
			prefix, ok := strings.CutSuffix(string(e.Values().ByNumber(0).Name()), "UNSPECIFIED")
			require.True(t, ok, e.FullName())
			for j := range e.Values().Len() {
				require.True(t, strings.HasPrefix(string(e.Values().Get(j).Name()), prefix), e.Values().Get(j).FullName())
			}
		}
	})
}

func eachFile(f func(protoreflect.FileDescriptor)) {
	protoregistry.GlobalFiles.RangeFiles(func(d protoreflect.FileDescriptor) bool {
		if strings.Contains(d.Options().(*descriptorpb.FileOptions).GetGoPackage(), "trivet-cloud/trivet/protos") {
			f(d)
		}
		return true
	})
}

func eachMessage(f func(protoreflect.MessageDescriptor)) {
	var walk func(protoreflect.MessageDescriptors)
	walk = func(all protoreflect.MessageDescriptors) {
		for i := range all.Len() {
			f(all.Get(i))
			walk(all.Get(i).Messages())
		}
	}
	eachFile(func(d protoreflect.FileDescriptor) { walk(d.Messages()) })
}

// compact returns a document as JSON.
func compact(t *testing.T, doc any) string {
	text, err := Compact(doc)
	require.NoError(t, err)
	return string(text)
}

func TestDocument(t *testing.T) {
	require.Equal(t, `{"vm_id":"1","event_type":"CREATED","vm":null,"timestamp":"1970-01-01T00:00:00.005Z"}`,
		compact(t, Document(&vmv1.VmEvent{VmId: "1", EventType: vmv1.VmEventType_VM_EVENT_TYPE_CREATED, Timestamp: 5})))
	require.Equal(t, `{"vm_id":"","event_type":null,"vm":null,"timestamp":null}`, compact(t, Document(&vmv1.VmEvent{})))
	require.Equal(t, `{"id":"<d>","source":{"image_id":null,"volume_id":"v","blank":null},"size_gib":20,"bus":"77","cache":null,"boot_index":1}`,
		compact(t, Document(&vmv1.DiskSpec{Id: "<d>", SizeGib: 20, BootIndex: 1, Bus: 77,
			Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: "v"}}})))
	// An optional limit that is 0 differs from one that is not set.
	quota := compact(t, Document(&identityv1.Quota{Vcpus: proto.Uint64(0), MemoryMib: proto.Uint64(math.MaxUint64)}))
	require.Contains(t, quota, `"vcpus":0,"memory_mib":18446744073709551615,"storage_gib":null`)
	require.Contains(t, compact(t, Document(&vmv1.VirtualMachine{Labels: map[string]string{"b": "2", "a": "1"}})), `"labels":{"a":"1","b":"2"}`)
	require.Contains(t, compact(t, Document(&vmv1.ResourceUsage{CpuPercent: math.NaN()})), `"cpu_percent":null`)
}

func TestDocumentsOfAnEmptyList(t *testing.T) {
	require.Equal(t, `{"items":[],"next_page_token":""}`, compact(t, Documents(nil, "")))
}

func TestItemKeepsTheOrderOfKeys(t *testing.T) {
	doc, err := Item(struct {
		B int      `json:"b"`
		A []string `json:"a"`
		C any      `json:"c"`
		D uint64   `json:"d"`
		E float64  `json:"e"`
	}{1, nil, map[string]bool{}, math.MaxUint64, 1.5})
	require.NoError(t, err)
	require.Equal(t, Object{{"b", int64(1)}, {"a", nil}, {"c", Object{}}, {"d", uint64(math.MaxUint64)}, {"e", 1.5}}, doc)
	_, err = Item(func() {})
	require.Error(t, err)
}

func TestFormats(t *testing.T) {
	doc := Documents([]any{
		Object{{"name", "web"}, {"vcpus", uint64(2)}, {"labels", Object{{"a/b", "x: y"}}}, {"at", "2026-03-01T12:00:00.000Z"}, {"none", nil}},
		Object{{"name", "d\x1bb"}, {"vcpus", uint64(16)}, {"labels", Object{}}, {"at", nil}, {"none", true}},
	}, "")
	for format, want := range map[string]string{
		"yaml": `items:
  - name: web
    vcpus: 2
    labels:
      a/b: 'x: y'
    at: "2026-03-01T12:00:00.000Z"
    none: null
  - name: "d\eb"
    vcpus: 16
    labels: {}
    at: null
    none: true
next_page_token: ""
`,
		"csv": `key,value
items[0].name,web
items[0].vcpus,2
items[0].labels.a/b,x: y
items[0].at,2026-03-01T12:00:00.000Z
items[0].none,
items[1].name,d\x1bb
items[1].vcpus,16
items[1].at,
items[1].none,true
next_page_token,
`,
		"jsonpath={.items[*].vcpus}":                                          "2 16\n",
		"jsonpath=.items[0].name":                                             "web\n",
		"jsonpath=items[0].name":                                              "web\n",
		`jsonpath={range .items[*]}{.name}{" "}{.vcpus}{"\n"}{end}`:           "web 2\nd\x1bb 16\n",
		`jsonpath={.items[?(@.vcpus>2)].vcpus}`:                               "16\n",
		"jsonpath={.items[0].labels}":                                         `{"a/b":"x: y"}` + "\n",
		"jsonpath={.items[0].nothing}":                                        "",
		"template={{range .items}}{{if gt .vcpus 2}}{{.vcpus}}{{end}}{{end}}": "16\n",
		`template={{(index .items 0).name}}`:                                  "web\n",
	} {
		f, err := ParseFormat(format)
		require.NoError(t, err, format)
		for range 2 { // an expression can be evaluated again
			var b bytes.Buffer
			require.NoError(t, f.Print(&b, doc), format)
			require.Equal(t, want, b.String(), format)
		}
	}
}

func TestStreams(t *testing.T) {
	for format, want := range map[string]string{"json": "{\"a\":1}\n{\"a\":1}\n", "yaml": "---\na: 1\n---\na: 1\n", "jsonpath={.a}": "1\n1\n"} {
		f, err := ParseFormat(format)
		require.NoError(t, err)
		var b bytes.Buffer
		for range 2 {
			require.NoError(t, f.PrintItem(&b, Object{{"a", int64(1)}}))
		}
		require.Equal(t, want, b.String(), format)
	}
}

func TestBadFormats(t *testing.T) {
	for format, want := range map[string]string{
		"xml": "want one of table, wide", "": "want one of", "json=x": "json has no expression", "jsonpath": "want jsonpath=EXPRESSION",
		"jsonpath={.items[}": "", "template=": "want template=TEXT", "template={{.a": "unclosed action",
	} {
		_, err := ParseFormat(format)
		require.ErrorContains(t, err, want, format)
	}
	f, err := ParseFormat("template={{.nothing}}")
	require.NoError(t, err)
	require.ErrorContains(t, f.Print(&bytes.Buffer{}, Object{}), "nothing")
}
