package main

import (
	"context"
	"log/slog"
	"net"
	"testing"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/trivet-cloud/trivet/controlplane/audit"
	"github.com/trivet-cloud/trivet/controlplane/auth"
	"github.com/trivet-cloud/trivet/controlplane/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/credit"
	"github.com/trivet-cloud/trivet/controlplane/identity"
	"github.com/trivet-cloud/trivet/controlplane/image"
	"github.com/trivet-cloud/trivet/controlplane/lead"
	"github.com/trivet-cloud/trivet/controlplane/member"
	"github.com/trivet-cloud/trivet/controlplane/node"
	"github.com/trivet-cloud/trivet/controlplane/operator"
	"github.com/trivet-cloud/trivet/controlplane/rpc"
	"github.com/trivet-cloud/trivet/controlplane/store/storetest"
	"github.com/trivet-cloud/trivet/controlplane/vm"
	"github.com/trivet-cloud/trivet/controlplane/volume"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// alone is the leadership of the only member.
type alone struct{}

func (alone) Leader() (uint64, uint64) { return 1, 1 }
func (alone) Changed() <-chan struct{} { return nil }

// publicServices is every public service over a store in memory.
func publicServices(t *testing.T) (*grpc.ClientConn, *grpc.Server, *clusterkey.Key, *time.Time) {
	now := time.Now()
	records := storetest.Memory(t, func() time.Time { return now })
	commands := lead.NewCommands(1, alone{}, nil)
	key := clusterkey.Generate()
	authority, err := key.Authority()
	require.NoError(t, err)
	log := slog.New(slog.DiscardHandler)
	identities := identity.New(identity.Options{
		Store: records, Commands: commands, Key: key, Log: log, Issuer: "https://cloud.example",
		Audit: audit.New(audit.Options{Store: records, Commands: commands, Log: log}),
	})
	require.NoError(t, identities.Bootstrap(t.Context()))
	files, err := image.OpenFiles(t.TempDir())
	require.NoError(t, err)
	images := image.New(image.Options{Store: records, Commands: commands, Files: files, Self: 1, Members: 1, Log: log})
	nodes := node.New(node.Options{Store: records, Commands: commands, Leadership: alone{}, Self: 1, Authority: authority, Log: log, Now: time.Now})
	vms := vm.New(vm.Options{Store: records, Commands: commands, Nodes: nodes, Log: log})
	nodes.Attach(vms, files)
	g, _ := rpc.New(rpc.Options{Verifier: identities, Log: log, Metrics: grpcprom.NewServerMetrics(), Public: true})
	identities.Register(g)
	images.Register(g)
	nodes.Register(g)
	vms.Register(g)
	volume.Register(g)
	credit.New(credit.Options{Store: records, Commands: commands, Log: log}).Register(g)
	operator.Register(g, operator.Options{Commands: commands, Members: member.New(member.Options{Store: records, Commands: commands, Self: 1, Log: log}), Nodes: nodes, VMs: vms})
	listener := bufconn.Listen(1 << 20)
	go g.Serve(listener)
	t.Cleanup(g.Stop)
	conn, err := grpc.NewClient("passthrough:///member", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn, g, key, &now
}

// ours are the services that Admit guards.
func ours(service string) bool {
	switch service {
	case "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection":
		return false
	}
	return true
}

// call calls any method with an empty request: every message's fields are optional, so Empty is one of each.
func call(ctx context.Context, conn *grpc.ClientConn, method string, streaming bool) error {
	if !streaming {
		return conn.Invoke(ctx, method, &emptypb.Empty{}, &emptypb.Empty{})
	}
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return err
	}
	if err := s.SendMsg(&emptypb.Empty{}); err != nil {
		return err
	}
	if err := s.CloseSend(); err != nil {
		return err
	}
	return s.RecvMsg(&emptypb.Empty{})
}

// Every method that is served × every sort of bad token: nothing but the right refusal.
func TestEveryMethodRefuses(t *testing.T) {
	conn, g, key, _ := publicServices(t)
	now := time.Now()
	token := func(key *clusterkey.Key, at time.Time, ttl time.Duration) string {
		text, err := identity.HostToken(key, cloud.Tenant{}, at, ttl)
		require.NoError(t, err)
		return text
	}
	good := token(key, now, time.Hour)
	tokens := map[string]struct {
		header string
		code   codes.Code
	}{
		"none":            {"", codes.Unauthenticated},
		"garbage":         {"Bearer garbage", codes.Unauthenticated},
		"another scheme":  {"Basic " + good, codes.Unauthenticated},
		"another cluster": {"Bearer " + token(clusterkey.Generate(), now, time.Hour), codes.Unauthenticated},
		"expired":         {"Bearer " + token(key, now.Add(-2*time.Hour), time.Hour), codes.Unauthenticated},
		"changed":         {"Bearer " + good[:len(good)-6] + "AAAAAA", codes.Unauthenticated},
		"alg none":        {"Bearer eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiJ9.", codes.Unauthenticated},
	}
	methods := 0
	for service, info := range g.GetServiceInfo() {
		if !ours(service) {
			continue
		}
		for _, m := range info.Methods {
			method := "/" + service + "/" + m.Name
			if auth.Open[auth.Method(method)] != "" && m.Name != "HeartbeatNode" {
				continue
			}
			methods++
			for name, c := range tokens {
				ctx := t.Context()
				if c.header != "" {
					ctx = metadata.AppendToOutgoingContext(ctx, "authorization", c.header)
				}
				err := call(ctx, conn, method, m.IsServerStream)
				if service == "vmcontroller.v1.NodeService" && m.Name == "HeartbeatNode" && name == "none" {
					require.Equal(t, codes.PermissionDenied, status.Code(err), "a heartbeat is a host's, on its own port")
					continue
				}
				require.Equal(t, c.code, status.Code(err), "%s with token %q: %v", method, name, err)
			}
			// The administrator gets past the door everywhere.
			err := call(metadata.AppendToOutgoingContext(t.Context(), "authorization", "Bearer "+good), conn, method, m.IsServerStream)
			require.NotEqual(t, codes.Unauthenticated, status.Code(err), "%s: %v", method, err)
			if m.Name != "HeartbeatNode" && m.Name != "ClusterStatus" {
				require.NotEqual(t, codes.PermissionDenied, status.Code(err), "%s: %v", method, err)
				require.NotEqual(t, codes.Internal, status.Code(err), "%s: %v", method, err)
			}
		}
	}
	require.Greater(t, methods, 60)
}
