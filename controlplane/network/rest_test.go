package network

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/reflect/protoreflect"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest/resttest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func (w *world) rest() *rest.Server {
	caller := func(user cloud.UserID, t cloud.Tenant, role cloud.Role) *cloud.Caller {
		return resttest.Bound(user, cloud.Tenant{}, resttest.Role(role, t))
	}
	r := resttest.NewServer(fault.Network, "network", resttest.Callers{
		"ada": caller("ada", acme, cloud.ProjectMember), "eve": caller("eve", evil, cloud.ProjectAdmin),
		"vic": caller("vic", acme, cloud.ProjectViewer), "admin": resttest.Admin(),
	})
	w.networks.Routes(r)
	return r
}

// TestREST runs scripts against the REST API of docs/api.md.
//
// `get|post|patch|delete PATH [as=TOKEN] [key=IDEMPOTENCY-KEY] [strict=true] [let=NAME]` makes a call with the lines below it as the
// body, and prints the status and the response. let stores the ID in the response: $NAME in later commands is replaced
// by it, and the output shows $NAME.
func TestREST(t *testing.T) {
	datadriven.Walk(t, "testdata/rest", func(t *testing.T, path string) {
		s := &script{world: newWorld(t), ids: map[string]string{}}
		handler := openapitest.Handler(t, s.rest())
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			arg := func(key, standard string) string {
				value := standard
				d.MaybeScanArgs(t, key, &value)
				return value
			}
			// datadriven splits an argument at its first equals sign, which here is in the query.
			path := strings.Join(append([]string{d.CmdArgs[0].Key}, d.CmdArgs[0].Vals...), "=")
			q := httptest.NewRequest(
				strings.ToUpper(d.Cmd), "http://127.0.0.1:8087"+s.expand(path), strings.NewReader(s.expand(d.Input)),
			)
			q.Header.Set("Content-Type", "application/json")
			if as := arg("as", "ada"); as != "nobody" {
				q.Header.Set("Authorization", "Bearer "+as)
			}
			q.Header.Set(rest.StrictHeader, arg("strict", "false"))
			if key := arg("key", ""); key != "" {
				q.Header.Set("Idempotency-Key", key)
			}
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, q)
			var body map[string]any
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &body), "%s", w.Body)
			require.Contains(t, body, "meta")
			delete(body, "meta")
			if name := arg("let", ""); name != "" {
				s.ids[name] = body["data"].(map[string]any)["id"].(string)
			}
			out := &bytes.Buffer{}
			fmt.Fprintln(out, w.Code)
			if w.Header().Get("Idempotency-Replayed") != "" {
				fmt.Fprintln(out, "Idempotency-Replayed:", w.Header().Get("Idempotency-Replayed"))
			}
			e := json.NewEncoder(out)
			e.SetEscapeHTML(false)
			e.SetIndent("", " ")
			require.NoError(t, e.Encode(body))
			return s.anonymous(out.String())
		})
	})
}

// TestJSONRoundTrip checks that a message with all fields set has the same content after it was encoded to JSON and
// decoded again.
func TestJSONRoundTrip(t *testing.T) {
	for _, m := range []protoreflect.ProtoMessage{
		&networkv1.CreatePortRequest{}, &networkv1.UpdatePortRequest{}, &networkv1.AddSecurityGroupRuleRequest{},
		&networkv1.CreateRouteTableRequest{},
		&networkv1.UpdateRouteTableRequest{}, &networkv1.CreateServiceIpRequest{}, &networkv1.UpdateSubnetRequest{},
		&networkv1.CreateExternalNetworkRequest{},
		&networkv1.UpdateExternalNetworkRequest{}, &networkv1.UpdateFloatingIpRequest{}, &networkv1.CreateVpcRequest{},
	} {
		in := m.ProtoReflect()
		fill(in)
		text, err := json.Marshal(protorest.Encode(in))
		require.NoError(t, err)
		var body map[string]any
		require.NoError(t, json.Unmarshal(text, &body))
		out := in.New()
		require.NoError(t, protorest.Decode(out, "", body, true), "%s", text)
		require.Equal(t, fmt.Sprint(in.Interface()), fmt.Sprint(out.Interface()))
	}
}

// fill sets all fields of a message to values other than the default.
func fill(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.IsList() {
			list := m.Mutable(f).List()
			list.Append(filled(f, list.NewElement()))
			continue
		}
		if f.IsMap() {
			all := m.Mutable(f).Map()
			all.Set(protoreflect.ValueOfString("a key").MapKey(), filled(f.MapValue(), all.NewValue()))
			continue
		}
		m.Set(f, filled(f, m.NewField(f)))
	}
}

func filled(f protoreflect.FieldDescriptor, v protoreflect.Value) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.StringKind:
		return protoreflect.ValueOfString("text of " + string(f.Name()))
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(1)
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(7)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(7)
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(7)
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(7)
	}
	fill(v.Message())
	return v
}
