package jointoken

import (
	"context"
	"encoding/hex"
	"net"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"

	memberv1 "github.com/trivet-cloud/trivet/protos/member/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// method is the name of the gRPC method BringKey in audit records.
const method = "/member.v1.MemberService/BringKey"

// OpenMethod is the full name of the only method for joining members that requires no client certificate.
const OpenMethod = memberv1.MemberService_BringKey_FullMethodName

// Register registers MemberService on the server of port 7443, which accepts clients without a certificate.
func (s *Service) Register(g grpc.ServiceRegistrar) {
	memberv1.RegisterMemberServiceServer(g, &server{s: s})
}

type server struct {
	memberv1.UnsafeMemberServiceServer
	s *Service
}

func (r *server) BringKey(ctx context.Context, in *memberv1.BringKeyRequest) (*memberv1.BringKeyResponse, error) {
	if in.GetProtocol() != Protocol {
		return nil, fault.New(fault.FailedPrecondition, "the joining member uses version %d of member.v1, this member version %d: upgrade the older one", in.GetProtocol(), Protocol)
	}
	parts := strings.Split(strings.TrimSpace(in.GetToken()), ".")
	if len(parts) != 3 || len(in.GetToken()) > maxText {
		return nil, errBad()
	}
	_, key, err := mtls.ParseRequest(in.GetCsr())
	if err != nil {
		return nil, fault.Invalid("csr", "%v", err)
	}
	from := ""
	if p, ok := peer.FromContext(ctx); ok {
		from, _, _ = net.SplitHostPort(p.Addr.String())
	}
	if _, err := admitCommand.Call(ctx, r.s.opts.Commands, admitAsk{ID: parts[0], Secret: parts[1], Key: key, Address: from, RequestID: rpc.RequestID(ctx)}); err != nil {
		return nil, err
	}
	r.s.opts.Log.Warn("sent the cluster key to a joining member", "token", parts[0], "key", hex.EncodeToString(key), "address", from)
	return &memberv1.BringKeyResponse{ClusterKey: r.s.opts.Key.Encode()}, nil
}
