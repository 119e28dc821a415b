package protorest

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"

	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// TestMaps checks how maps, enums and 64-bit integers look in JSON, and that values of other types are refused.
func TestMaps(t *testing.T) {
	in := &vmv1.CreateVolumeRequest{
		Name: "data", SizeGib: 1 << 40, Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED, Labels: map[string]string{"a": "b", "c": ""},
	}
	text, err := json.Marshal(Encode(in.ProtoReflect()))
	require.NoError(t, err)
	require.JSONEq(t, `{"name":"data","org_id":"","project_id":"","size_gib":1099511627776,"driver":"managed","storage_class":"",
		"image_id":"","metadata":{},"labels":{"a":"b","c":""}}`, string(text))
	var body map[string]any
	require.NoError(t, json.Unmarshal(text, &body))
	out := &vmv1.CreateVolumeRequest{}
	delete(body, "metadata")
	require.NoError(t, Decode(out.ProtoReflect(), "", body, true))
	require.Equal(t, in.String(), out.String())

	for _, bad := range []string{`{"labels":[]}`, `{"labels":{"a":1}}`, `{"labels":"a=b"}`} {
		body = nil
		require.NoError(t, json.Unmarshal([]byte(bad), &body))
		require.True(t, fault.Is(Decode(out.ProtoReflect(), "", body, true), fault.InvalidArgument), bad)
	}
}

// TestBytes checks that bytes are in base64 in JSON, and that other texts are refused.
func TestBytes(t *testing.T) {
	in := &guestv1.RunGuestCommandRequest{Command: []string{"cat"}, Stdin: []byte{0, 255, 'a'}}
	text, err := json.Marshal(Encode(in.ProtoReflect()))
	require.NoError(t, err)
	require.Contains(t, string(text), `"stdin":"AP9h"`)
	var body map[string]any
	require.NoError(t, json.Unmarshal(text, &body))
	out := &guestv1.RunGuestCommandRequest{}
	require.NoError(t, Decode(out.ProtoReflect(), "", body, true))
	require.Equal(t, in.String(), out.String())
	for _, bad := range []any{"*", 1.0, true, []any{"AP9h"}} {
		err := Decode(out.ProtoReflect(), "", map[string]any{"stdin": bad}, true)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%v", bad)
		require.ErrorContains(t, err, "stdin")
	}
}
