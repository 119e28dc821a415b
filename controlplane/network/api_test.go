package network

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestAPI runs the scripts in testdata/api. A command is the name of an RPC, and its input the request as JSON. The
// output is the response, or the error with its reason, field and details. Arguments:
//
//	as=acme|evil  the tenant of the caller; acme if absent. admin is an operator without a tenant
//	key=K         the idempotency key
//	let=NAME      stores the ID in the response. $NAME in later requests is replaced by it, and the output shows $NAME
//	fields=(a, b) shows only these fields of the response
//
// Further commands: "after seconds=N" moves the clock and frees rested addresses, "records" shows the number of records
// in each table, and "bulk count=N" repeats the RPC named method, with $i replaced by the number of the repetition.
func TestAPI(t *testing.T) {
	datadriven.Walk(t, "testdata/api", func(t *testing.T, path string) {
		s := &script{world: newWorld(t), ids: map[string]string{}}
		s.server = &server{s: s.networks}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string { return s.run(t, d) })
	})
}

type script struct {
	*world
	server networkv1.NetworkServiceServer
	ids    map[string]string // by name
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	switch d.Cmd {
	case "after":
		var seconds int
		d.ScanArgs(t, "seconds", &seconds)
		s.clock.Advance(time.Duration(seconds) * time.Second)
		require.NoError(t, s.networks.FreeRested(t.Context()))
		return ""
	case "records":
		counts := s.records()
		var lines []string
		for name, n := range counts {
			lines = append(lines, fmt.Sprintf("%s %d\n", name, n))
		}
		slices.Sort(lines)
		return strings.Join(lines, "")
	case "bulk":
		var count int
		var method string
		d.ScanArgs(t, "count", &count)
		d.ScanArgs(t, "method", &method)
		for i := range count {
			if _, err := s.call(t, d, method, strings.ReplaceAll(d.Input, "$i", fmt.Sprint(i))); err != nil {
				return fmt.Sprintf("after %d: %s", i, s.describe(err))
			}
		}
		return ""
	}
	out, err := s.call(t, d, d.Cmd, d.Input)
	if err != nil {
		return s.describe(err)
	}
	return s.show(t, d, out)
}

// call calls an RPC of the service with a request in JSON.
func (s *script) call(t *testing.T, d *datadriven.TestData, method, input string) (proto.Message, error) {
	input = s.expand(input)
	f := reflect.ValueOf(s.server).MethodByName(method)
	require.True(t, f.IsValid(), "%s: no RPC %s", d.Pos, method)
	in := reflect.New(f.Type().In(1).Elem()).Interface().(proto.Message)
	if input != "" {
		require.NoError(t, protojson.Unmarshal([]byte(input), in), d.Pos)
	}
	at, key, admin := acme, "", false
	for _, a := range d.CmdArgs {
		switch {
		case a.Key == "as" && a.Vals[0] == "evil":
			at = evil
		case a.Key == "as" && a.Vals[0] == "admin":
			admin = true
		case a.Key == "key":
			key = a.Vals[0]
		}
	}
	ctx := s.as(at, key)
	if admin {
		ctx = s.asAdmin(key)
	}
	out := f.Call([]reflect.Value{reflect.ValueOf(&ctx).Elem(), reflect.ValueOf(in)})
	if err, _ := out[1].Interface().(error); err != nil {
		return nil, err
	}
	return out[0].Interface().(proto.Message), nil
}

// expand replaces the names of IDs in a text by the IDs.
func (s *script) expand(text string) string {
	for name, id := range s.ids {
		text = regexp.MustCompile(`\$`+name+`\b`).ReplaceAllString(text, id)
	}
	return text
}

// describe returns the text of an error.
func (s *script) describe(err error) string {
	f, ok := fault.From(err)
	if !ok {
		return "not a fault: " + err.Error()
	}
	text := fmt.Sprintf("%s: %s", f.Kind.RPC(), f.Message)
	if f.Field != "" {
		text += fmt.Sprintf("\nfield=%s", f.Field)
	}
	if f.Reason != "" {
		text += fmt.Sprintf("\nreason=%s", f.Reason)
	}
	if len(f.Details) > 0 {
		details, _ := json.Marshal(f.Details)
		text += "\ndetails=" + string(details)
	}
	return s.anonymous(text)
}

// show returns a response as indented JSON. It stores its ID if the command says so.
func (s *script) show(t *testing.T, d *datadriven.TestData, m proto.Message) string {
	text, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
	require.NoError(t, err)
	var fields map[string]any
	require.NoError(t, json.Unmarshal(text, &fields))
	for _, a := range d.CmdArgs {
		switch a.Key {
		case "let":
			s.ids[a.Vals[0]] = fields["id"].(string)
		case "fields":
			for name := range fields {
				if !slices.Contains(a.Vals, name) {
					delete(fields, name)
				}
			}
		}
	}
	out := &bytes.Buffer{}
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	e.SetIndent("", " ")
	require.NoError(t, e.Encode(fields))
	return s.anonymous(out.String())
}

var uuidPattern = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`)

// anonymous replaces IDs by their names, which do not change between runs.
func (s *script) anonymous(text string) string {
	for name, id := range s.ids {
		text = strings.ReplaceAll(text, id, "$"+name)
	}
	return uuidPattern.ReplaceAllString(text, "<id>")
}
