package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// plain returns a gRPC connection without TLS to host:port. Its source address is source, unless that is empty.
func plain(t *testing.T, address, source string) *grpc.ClientConn {
	t.Helper()
	dial := func(ctx context.Context, to string) (net.Conn, error) {
		d := net.Dialer{}
		if source != "" {
			d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(source)}
		}
		return d.DialContext(ctx, "tcp", to)
	}
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(dial))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// changes makes those calls of etcd's API that change the member id or permissions, or return all data, without a
// credential. It returns the error of each by the name of its method.
func changes(ctx context.Context, conn *grpc.ClientConn, id uint64) map[string]error {
	cluster, maintenance, users := pb.NewClusterClient(conn), pb.NewMaintenanceClient(conn), pb.NewAuthClient(conn)
	away := []string{fmt.Sprintf("https://127.9.9.%d:9", id)}
	out := map[string]error{}
	_, out["MemberUpdate"] = cluster.MemberUpdate(ctx, &pb.MemberUpdateRequest{ID: id, PeerURLs: away})
	_, out["MemberRemove"] = cluster.MemberRemove(ctx, &pb.MemberRemoveRequest{ID: id})
	_, out["MemberAdd"] = cluster.MemberAdd(ctx, &pb.MemberAddRequest{PeerURLs: away})
	_, out["MemberPromote"] = cluster.MemberPromote(ctx, &pb.MemberPromoteRequest{ID: id})
	_, out["MoveLeader"] = maintenance.MoveLeader(ctx, &pb.MoveLeaderRequest{TargetID: id})
	// These two would let the caller make the calls above as root, the administrator of etcd's Auth.
	_, out["UserAdd"] = users.UserAdd(ctx, &pb.AuthUserAddRequest{Name: "root", Password: "mine"})
	_, out["AuthEnable"] = users.AuthEnable(ctx, &pb.AuthEnableRequest{})
	file, err := maintenance.Snapshot(ctx, &pb.SnapshotRequest{})
	if err == nil {
		_, err = file.Recv()
	}
	out["Snapshot"] = err
	return out
}

// TestLocalProcessCannotChangeMembers checks that a process on a member's host cannot move or remove voters without a
// credential, and that its attempts are in the audit log. It also checks that an administrator can change a member's
// address only to one at which that member presents its certificate.
func TestLocalProcessCannotChangeMembers(t *testing.T) {
	w := newWorld(t)
	ctx := w.context(2 * time.Minute)
	w.voters(1, 1, 2, 3)
	for member, host := range w.trio.Members {
		conn := plain(t, host+":50051", "")
		for id := range w.trio.Members {
			for name, err := range changes(ctx, conn, uint64(id)) {
				require.Equal(t, codes.PermissionDenied, status.Code(err), "%s of %d at member %d: %v", name, id, member, err)
			}
		}
		list, err := pb.NewClusterClient(conn).MemberList(ctx, &pb.MemberListRequest{Linearizable: true})
		require.NoError(t, err, "the list of members must be readable")
		for _, m := range list.GetMembers() {
			require.Contains(t, m.GetPeerURLs()[0], w.trio.Members[int(m.GetID())])
		}
	}
	for id := range w.trio.Members {
		for at := range w.trio.Members {
			a, err := w.rest(at, "").Do(ctx, kvPort, http.MethodDelete, fmt.Sprint("/api/v1/cluster/members/", id), nil)
			require.NoError(t, err)
			require.Equal(t, http.StatusPreconditionFailed, a.Status, a.Raw)
			require.Equal(t, "PRECONDITION_FAILED", a.Error.Code)
			require.Contains(t, a.Error.Message, "would have 2 voters")
		}
	}
	// The key-value REST API accepts these calls; they must be in the audit log too.
	a, err := w.rest(1, "").Do(ctx, kvPort, http.MethodPost, "/api/v1/cluster/members", map[string]any{"node_id": 7, "raft_addr": "127.0.0.7:2380"})
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, a.Status, a.Raw)
	a, err = w.rest(2, "").Do(ctx, kvPort, http.MethodDelete, "/api/v1/cluster/members/7", nil)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, a.Status, a.Raw)

	// An administrator must not be able to give member 2 an address at which no process listens, or that of another member.
	operator := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+w.adminToken)
	cluster := pb.NewClusterClient(plain(t, w.trio.Members[1]+":50051", ""))
	_, err = cluster.MemberUpdate(operator, &pb.MemberUpdateRequest{ID: 2, PeerURLs: []string{"https://127.9.9.2:9"}})
	require.Equal(t, codes.FailedPrecondition, status.Code(err), "%v", err)
	require.ErrorContains(t, err, "member 2 did not show its certificate at https://127.9.9.2:9")
	_, err = cluster.MemberUpdate(operator, &pb.MemberUpdateRequest{ID: 2, PeerURLs: []string{"https://127.0.0.3:2380"}})
	require.Error(t, err)
	// The member's present address must be accepted.
	_, err = cluster.MemberUpdate(operator, &pb.MemberUpdateRequest{ID: 2, PeerURLs: []string{"https://" + w.trio.Members[2] + ":2380"}})
	require.NoError(t, err)

	w.voters(2, 1, 2, 3)
	require.NoError(t, w.trio.Ready(ctx))
	const service = "/etcdserverpb.Cluster/"
	w.audited(ctx, service+"MemberUpdate", "PERMISSION_DENIED", "", "")
	w.audited(ctx, service+"MemberRemove", "PERMISSION_DENIED", "", "")
	w.audited(ctx, service+"MemberRemove", "FAILED_PRECONDITION", "", "DELETE /api/v1/cluster/members/")
	w.audited(ctx, service+"MemberAdd", "OK", "", "node_id=7 raft_addr=127.0.0.7:2380")
	w.audited(ctx, service+"MemberRemove", "OK", "", "DELETE /api/v1/cluster/members/7")
	w.audited(ctx, service+"MemberUpdate", "FAILED_PRECONDITION", "admin", "id=2 peer_urls=https://127.9.9.2:9")
	w.audited(ctx, service+"MemberUpdate", "OK", "admin", "id=2 ")
}

// audited waits until the audit log has a record of a call from loopback with this method, outcome and principal, whose
// target contains the text target.
func (w *world) audited(ctx context.Context, method, outcome, principal, target string) {
	w.t.Helper()
	require.NoError(w.t, lab.Until(ctx, fmt.Sprintf("the audit has %s, %s, by %q, of %s", method, outcome, principal, target), func(ctx context.Context) error {
		list, err := w.admin.Identity.ListAuditRecords(ctx, &identityv1.ListAuditRecordsRequest{Method: method, Outcome: outcome, Principal: principal})
		if err != nil {
			return err
		}
		for _, r := range list.GetRecords() {
			if r.GetPrincipal() == principal && strings.Contains(r.GetTarget(), target) && net.ParseIP(r.GetAddress()).IsLoopback() {
				return nil
			}
		}
		return errors.New("the audit log does not have the record")
	}))
}

// TestASourceOnLoopbackIsNotLoopback calls a member at an address outside of loopback, from source addresses on
// loopback. It checks that such calls are refused, although calls to a loopback address need no credential.
func TestASourceOnLoopbackIsNotLoopback(t *testing.T) {
	w := newWorld(t, moved, func(w *world) { w.trio.Extra = []string{"--insecure-plaintext"} })
	ctx := w.context(time.Minute)
	for _, source := range []string{"127.0.0.1", "127.0.0.0", beyond} {
		conn := plain(t, beyond+":50051", source)
		for name, err := range changes(ctx, conn, 1) {
			require.Equal(t, codes.PermissionDenied, status.Code(err), "%s from %s: %v", name, source, err)
		}
		_, err := pb.NewClusterClient(conn).MemberList(ctx, &pb.MemberListRequest{})
		require.Equal(t, codes.PermissionDenied, status.Code(err), "from %s: %v", source, err)
		_, err = pb.NewKVClient(conn).Put(ctx, &pb.PutRequest{Key: []byte("a"), Value: []byte("1")})
		require.Equal(t, codes.PermissionDenied, status.Code(err), "from %s: %v", source, err)

		d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(source)}}
		client := &http.Client{Transport: &http.Transport{DialContext: d.DialContext}}
		defer client.CloseIdleConnections()
		for path, want := range map[string]int{
			":8081/api/v1/kv/a": http.StatusForbidden, ":8083/api/v1/users": http.StatusForbidden, ":8084/metrics": http.StatusNotFound,
		} {
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+beyond+path, nil)
			require.NoError(t, err)
			a, err := client.Do(r)
			require.NoError(t, err)
			a.Body.Close()
			require.Equal(t, want, a.StatusCode, "%s from %s", path, source)
		}
	}
}
