package network

import (
	"context"
	"net/netip"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Register registers NetworkService on a gRPC server.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	networkv1.RegisterNetworkServiceServer(g, &server{s: s})
}

type server struct {
	networkv1.UnimplementedNetworkServiceServer
	s *Service
}

const service = "/network.v1.NetworkService/"

// replacement returns the new list of an update. An empty list removes all elements. The slice is never nil: requests
// are passed to the leader as CBOR, which encodes a nil pointer and a pointer to a nil slice in the same way, as null.
// The leader leaves the present list unchanged for null.
func replacement[T any](list []T) *[]T {
	if list == nil {
		list = []T{}
	}
	return &list
}

// request is implemented by every request of NetworkService.
type request interface {
	GetOrgId() string
	GetProjectId() string
}

func admit(ctx context.Context, method auth.Method, in request) (cloud.Tenant, error) {
	return auth.Admit(ctx, service+method, in.GetOrgId(), in.GetProjectId())
}

// listRequest is implemented by every list request of NetworkService.
type listRequest interface {
	GetPageSize() int32
	GetPageToken() string
	GetName() string
}

func pageOf(in listRequest) page {
	return page{Size: in.GetPageSize(), Token: in.GetPageToken(), Name: in.GetName()}
}

// answer converts the result of a call to its response, and marks it as replayed if an earlier call with the same
// idempotency key gave it.
func answer[T any, M proto.Message](ctx context.Context, out Result[T], err error, convert func(*T) M) (M, error) {
	if err != nil {
		var none M
		return none, err
	}
	rpc.Replayed(ctx, out.Replayed)
	return convert(&out.Value), nil
}

// idRequest is implemented by every request that identifies a resource by its ID alone.
type idRequest interface {
	request
	proto.Message
	GetId() string
}

// getOne implements an RPC that returns a resource.
func getOne[ID ~string, T any, M proto.Message](
	ctx context.Context, method auth.Method, in idRequest, get func(context.Context, cloud.Tenant, ID) (*T, error),
	convert func(*T) M,
) (none M, err error) {
	t, err := admit(ctx, method, in)
	if err != nil {
		return none, err
	}
	found, err := get(ctx, t, ID(in.GetId()))
	if err != nil {
		return none, err
	}
	return convert(found), nil
}

// deleteOne implements an RPC that deletes a resource and has an empty response.
func deleteOne[ID ~string, M proto.Message](
	ctx context.Context, method auth.Method, in idRequest,
	remove func(context.Context, cloud.Tenant, ID, [32]byte) (Result[struct{}], error), response M,
) (none M, err error) {
	t, err := admit(ctx, method, in)
	if err != nil {
		return none, err
	}
	out, err := remove(ctx, t, ID(in.GetId()), rpc.BodyHash(in))
	return answer(ctx, out, err, func(*struct{}) M { return response })
}

// convertAll converts the resources of a list.
func convertAll[T, M any](all []*T, convert func(*T) *M) (out []*M) {
	for _, one := range all {
		out = append(out, convert(one))
	}
	return out
}

// prefixOf parses an optional prefix. An empty text gives an invalid prefix.
func prefixOf(field, text string) (netip.Prefix, error) {
	if text == "" {
		return netip.Prefix{}, nil
	}
	return cloud.ParseCIDR(field, text)
}

// addressOf parses an optional address. An empty text gives an invalid address.
func addressOf(field, text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	return cloud.ParseAddr(field, text)
}

func addressesOf(field string, texts []string) ([]netip.Addr, error) {
	var out []netip.Addr
	for _, t := range texts {
		a, err := cloud.ParseAddr(field, t)
		if err != nil {
			return nil, err
		}
		out = append(out, a)
	}
	return out, nil
}

// prefixText returns the text of a prefix, and an empty one for an invalid prefix. addressText does that for addresses.
func prefixText(p netip.Prefix) string {
	if !p.IsValid() {
		return ""
	}
	return p.String()
}

func addressText(a netip.Addr) string {
	if !a.IsValid() {
		return ""
	}
	return a.String()
}

func addressTexts(all []netip.Addr) (out []string) {
	for _, a := range all {
		out = append(out, a.String())
	}
	return out
}
