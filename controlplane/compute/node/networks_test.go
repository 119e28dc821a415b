package node

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// fakeNetworks implements NetworkController for tests: it answers each request with a response of the same revision. It
// charges one changed record for each failure.
type fakeNetworks struct{}

func (fakeNetworks) Sync(
	_ cloud.NodeID, term uint64, first *agentv1.SyncNetworksRequest, stream agentv1.AgentService_SyncNetworksServer,
	charge func(context.Context, int) error,
) error {
	ctx, end := context.WithCancelCause(stream.Context())
	go func() {
		for r := first; ; {
			err := stream.Send(&agentv1.SyncNetworksResponse{Term: term, Revision: r.GetAppliedRevision(), Complete: true})
			if err == nil {
				r, err = stream.Recv()
			}
			if err == nil {
				err = charge(ctx, len(r.GetFailures()))
			}
			if err != nil {
				end(err)
				return
			}
		}
	}()
	<-ctx.Done()
	return context.Cause(ctx)
}

// sync opens a SyncNetworks stream and sends the first request.
func (a agent) sync(t *testing.T, ctx context.Context) agentv1.AgentService_SyncNetworksClient {
	s, err := a.SyncNetworks(ctx)
	require.NoError(t, err)
	require.NoError(t, s.Send(&agentv1.SyncNetworksRequest{Protocol: Protocol, AppliedRevision: 1}))
	return s
}

// TestSyncNetworks checks that a SyncNetworks stream ends with the leadership, with the address of the next leader, and
// when the host's certificate expires.
func TestSyncNetworks(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	a := w.host(1, 1)
	s := a.sync(t, ctx)
	m, err := s.Recv()
	require.NoError(t, err)
	require.EqualValues(t, 1, m.GetTerm())

	_, err = w.host(2, 1).sync(t, ctx).Recv()
	refused(t, err, codes.FailedPrecondition, "member 1 leads")
	w.leadership.Elect(2)
	_, err = s.Recv()
	refused(t, err, codes.FailedPrecondition, "member 2 leads")
	require.Equal(t, "NOT_LEADER", rpc.FaultOf(err).Reason)
	require.Equal(t, w.addresses[2], rpc.FaultOf(err).Details["leader"])
	w.leadership.Elect(0)
	_, err = a.sync(t, ctx).Recv()
	refused(t, err, codes.Unavailable, "no leader")

	w.leadership.Elect(1)
	short := w.with(1, w.certificate(mtls.Node, string(a.id), time.Now(), time.Second))
	s = short.sync(t, ctx)
	_, err = s.Recv()
	require.NoError(t, err)
	_, err = s.Recv()
	refused(t, err, codes.Unauthenticated, "expired")
}

// TestSyncNetworksRefused sends requests that exceed a limit.
func TestSyncNetworksRefused(t *testing.T) {
	w := newWorld(t)
	a := w.host(1, 1)
	other, err := a.SyncNetworks(limited(t))
	require.NoError(t, err)
	require.NoError(t, other.Send(&agentv1.SyncNetworksRequest{Protocol: 2}))
	_, err = other.Recv()
	refused(t, err, codes.FailedPrecondition, "upgrade the older")
	vpc := string(testVM(1))
	for says, failures := range map[string][]*agentv1.VpcFailure{
		"at most 1000":       make([]*agentv1.VpcFailure, maxFailures+1),
		"failures.vpc_id":    {{VpcId: "../x"}},
		"at most 1024 bytes": {{VpcId: vpc, Error: strings.Repeat("x", maxFailureText+1)}},
	} {
		s := a.sync(t, limited(t))
		_, err = s.Recv()
		require.NoError(t, err)
		require.NoError(t, s.Send(&agentv1.SyncNetworksRequest{AppliedRevision: 1, Failures: failures}))
		_, err = s.Recv()
		refused(t, err, codes.InvalidArgument, says)
	}
	for says, reports := range map[string][]*agentv1.BackendHealth{
		"at most 1000":                 make([]*agentv1.BackendHealth, maxBackendHealth+1),
		"backend_health.vpc_id":        {{ServiceIpId: vpc, PortId: vpc}},
		"backend_health.service_ip_id": {{VpcId: vpc, PortId: vpc}},
		"either port_id or address":    {{VpcId: vpc, ServiceIpId: vpc}},
		"backend_health.port_id":       {{VpcId: vpc, ServiceIpId: vpc, PortId: "x"}},
		"backend_health.address":       {{VpcId: vpc, ServiceIpId: vpc, Address: "x"}},
	} {
		s := a.sync(t, limited(t))
		_, err = s.Recv()
		require.NoError(t, err)
		require.NoError(t, s.Send(&agentv1.SyncNetworksRequest{AppliedRevision: 1, BackendHealth: reports}))
		_, err = s.Recv()
		refused(t, err, codes.InvalidArgument, says)
	}
}
