package protorest_test

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/emptypb"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest/resttest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// images sends the ID of the image in pieces of one byte. It fails before the first piece for the image "none", and
// after the last one for the image "broken".
type images struct {
	storagev1.UnimplementedImageDataServiceServer
}

func (images) DownloadImage(in *storagev1.DownloadImageRequest, out grpc.ServerStreamingServer[storagev1.DownloadImageResponse]) error {
	if in.GetImageId() == "none" {
		return fault.New(fault.NotFound, "no such image")
	}
	for _, b := range []byte(in.GetImageId())[in.GetOffset():] {
		if err := out.Send(&storagev1.DownloadImageResponse{Data: []byte{b}}); err != nil {
			return err
		}
	}
	if in.GetImageId() == "broken" {
		return fault.New(fault.Unavailable, "the host is gone")
	}
	return nil
}

// views sends one change.
type views struct {
	operatorv1.UnimplementedVmViewServiceServer
}

func (views) WatchVms(in *operatorv1.WatchVmsRequest, out grpc.ServerStreamingServer[operatorv1.WatchVmsResponse]) error {
	return out.Send(&operatorv1.WatchVmsResponse{Change: &operatorv1.VmListChange{
		Type: operatorv1.VmListChangeType_VM_LIST_CHANGE_TYPE_REMOVED, VmId: in.GetFilter(),
	}})
}

// users keeps the last request.
type users struct {
	identityv1.UnimplementedIdentityServiceServer
	audit    *identityv1.ListAuditRecordsRequest
	password *identityv1.SetPasswordRequest
	deleted  *identityv1.DeleteUserRequest
}

func (u *users) ListAuditRecords(_ context.Context, in *identityv1.ListAuditRecordsRequest) (*identityv1.ListAuditRecordsResponse, error) {
	u.audit = in
	return &identityv1.ListAuditRecordsResponse{}, nil
}

func (u *users) SetPassword(_ context.Context, in *identityv1.SetPasswordRequest) (*emptypb.Empty, error) {
	u.password = in
	return &emptypb.Empty{}, nil
}

func (u *users) DeleteUser(_ context.Context, in *identityv1.DeleteUserRequest) (*emptypb.Empty, error) {
	u.deleted = in
	return &emptypb.Empty{}, nil
}

// serve starts a server with routes of the three services. The returned function makes a call as an administrator, and
// returns the response with its body. The error is that of reading the body.
func serve(t *testing.T, impl *users) func(method, path, body string) (*http.Response, string, error) {
	s := resttest.NewServer(fault.VM, "vm", resttest.Callers{"admin": resttest.Admin()})
	protorest.Serve(s, &storagev1.ImageDataService_ServiceDesc, images{}, []protorest.Row{
		{Method: http.MethodGet, Path: "/images/{image_id}", RPC: "DownloadImage", Media: "application/octet-stream"},
	})
	protorest.Serve(s, &operatorv1.VmViewService_ServiceDesc, views{}, []protorest.Row{
		{Method: http.MethodGet, Path: "/events", RPC: "WatchVms", Event: "change"},
	})
	protorest.Serve(s, &identityv1.IdentityService_ServiceDesc, impl, []protorest.Row{
		{Method: http.MethodGet, Path: "/audit", RPC: "ListAuditRecords"},
		{Method: http.MethodPost, Path: "/users/{user_id}/password", RPC: "SetPassword"},
		{Method: http.MethodDelete, Path: "/users/{user_id}", RPC: "DeleteUser"},
	})
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return func(method, path, body string) (*http.Response, string, error) {
		q, err := http.NewRequestWithContext(t.Context(), method, server.URL+path, strings.NewReader(body))
		require.NoError(t, err)
		q.Header.Set("Authorization", "Bearer admin")
		q.Header.Set(rest.StrictHeader, "true")
		a, err := http.DefaultClient.Do(q)
		require.NoError(t, err)
		defer a.Body.Close()
		text, err := io.ReadAll(a.Body)
		return a, string(text), err
	}
}

// TestDownload checks the bytes of a download, and that a client notices when it fails.
func TestDownload(t *testing.T) {
	call := serve(t, &users{})
	a, body, err := call(http.MethodGet, "/images/content?offset=3", "")
	require.NoError(t, err)
	require.Equal(t, "tent", body)
	require.Equal(t, "application/octet-stream", a.Header.Get("Content-Type"))

	a, body, err = call(http.MethodGet, "/images/none", "")
	require.NoError(t, err)
	require.Equal(t, http.StatusNotFound, a.StatusCode)
	require.Contains(t, body, "no such image")

	_, body, err = call(http.MethodGet, "/images/broken", "")
	require.Error(t, err, "the client takes a part for the complete response: %q", body)

	a, body, err = call(http.MethodHead, "/images/content", "")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, a.StatusCode)
	require.Empty(t, body)
}

// TestEvents checks how the messages of a stream are sent as events.
func TestEvents(t *testing.T) {
	a, body, err := serve(t, &users{})(http.MethodGet, "/events?filter=x", "")
	require.NoError(t, err)
	require.Equal(t, "text/event-stream", a.Header.Get("Content-Type"))
	require.Equal(t, "event: change\ndata: {\"change\":{\"timestamp\":0,\"type\":\"removed\",\"vm_id\":\"x\"}}\n\n", body)
}

// TestParameters checks how parameters of the query and variables of the path become fields of a request.
func TestParameters(t *testing.T) {
	impl := &users{}
	call := serve(t, impl)
	a, body, err := call(http.MethodGet, "/audit?since=1700000000000&page_size=5&principal=a%20b", "")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, a.StatusCode, body)
	require.Equal(t, []any{int64(1700000000000), int32(5), "a b"}, []any{impl.audit.GetSince(), impl.audit.GetPageSize(), impl.audit.GetPrincipal()})

	for query, field := range map[string]string{
		"since=x": "since", "page_size=99999999999": "page_size", "principal=%ff": "principal", "principle=a": "principle", "page_size=1.5": "page_size",
	} {
		a, body, err = call(http.MethodGet, "/audit?"+query, "")
		require.NoError(t, err)
		require.Equal(t, http.StatusBadRequest, a.StatusCode, query)
		require.Contains(t, body, `"field":"`+field+`"`, query)
	}

	_, _, err = call(http.MethodPost, "/users/ada%40example.com/password", `{"password":"p","user_id":"eve"}`)
	require.NoError(t, err)
	require.Equal(t, "ada@example.com", impl.password.GetUserId(), "the path decides about the user")
	_, body, err = call(http.MethodDelete, "/users/ada%40example.com", "")
	require.NoError(t, err)
	require.Equal(t, "ada@example.com", impl.deleted.GetUserId())
	require.Contains(t, body, `{"id":"ada@example.com","deleted":true}`)
}
