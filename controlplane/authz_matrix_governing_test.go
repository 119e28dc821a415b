package main

import (
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	etcdpb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
)

// onLoopback lists the methods of etcd's API, besides those for keys, leases and watches, that callers on loopback may
// call without a credential.
var onLoopback = []string{
	etcdCluster + "MemberList", etcdMaintenance + "Status", etcdMaintenance + "Alarm", etcdMaintenance + "Defragment",
	etcdMaintenance + "Hash", etcdMaintenance + "HashKV",
	etcdAuth + "Authenticate", etcdAuth + "AuthStatus", etcdAuth + "UserGet", etcdAuth + "UserList", etcdAuth + "RoleGet", etcdAuth + "RoleList",
}

// TestAdministrationRequiresACredential calls etcd's API before etcd's Auth is enabled. Callers on loopback must be
// able to use keys without a credential. Methods that change the cluster or access must require an administrator's
// token, on every port that serves etcd's API.
func TestAdministrationRequiresACredential(t *testing.T) {
	h := startMember(t)
	h.resources["peer"] = "https://" + h.config.Address(h.config.Ports.Peers)
	ports := 0
	for _, d := range h.listeners {
		if d.grpc == nil || byCertificate[d.name] != "" {
			continue
		}
		all, err := d.endpoints()
		require.NoError(t, err)
		ports++
		conn := h.dial(d.address, insecure.NewCredentials())
		for _, r := range etcdRows {
			i := slices.IndexFunc(all, func(e endpoint) bool { return e.name == r.name })
			if i < 0 {
				continue // this port does not serve etcd's API
			}
			keys := slices.ContainsFunc([]string{etcdKV, etcdLease, "/etcdserverpb.Watch/"}, func(p string) bool { return strings.HasPrefix(r.name, p) })
			v := call{endpoint: all[i], conn: conn, body: h.fillPlaceholders(r.body, fillAsWritten)}
			got, message := h.outcome(v)
			if keys || slices.Contains(onLoopback, r.name) {
				require.NotContains(t, []string{"PERMISSION_DENIED", "UNAUTHENTICATED"}, got, "%s: %s", r.name, message)
				continue
			}
			require.Equal(t, "PERMISSION_DENIED", got, "%s at %s: %s", r.name, d.name, message)
			if r.name == etcdAuth+"AuthEnable" {
				continue // it would change the outcome of the calls after it
			}
			v.token = h.hostToken(web, time.Now(), time.Hour)
			got, _ = h.outcome(v)
			require.Equal(t, "PERMISSION_DENIED", got, "%s at %s by an administrator of a project", r.name, d.name)
		}
	}
	require.Positive(t, ports)
}

// TestMembershipChangesAreAudited changes the members by every API. The audit must have a record of each change and of
// each refused one, with the principal or, for a caller without a credential, only the address.
func TestMembershipChangesAreAudited(t *testing.T) {
	h := startMember(t)
	cluster, operator := etcdpb.NewClusterClient(h.public), operatorv1.NewOperatorServiceClient(h.public)
	who := identityv1.NewIdentityServiceClient(h.public)
	rest := func(method, path, body, want string) {
		t.Helper()
		got, message := h.outcome(call{
			endpoint: endpoint{listener: boundListener{address: h.config.Address(h.config.Ports.KV)}, method: method}, path: path, body: body,
		})
		require.Equal(t, want, got, message)
	}
	rest(http.MethodPost, "/api/v1/cluster/members", `{"node_id":7,"raft_addr":"10.0.0.7"}`, "201")
	rest(http.MethodDelete, "/api/v1/cluster/members/7", "", "200")
	rest(http.MethodDelete, "/api/v1/cluster/members/1", "", "412 PRECONDITION_FAILED")
	rest(http.MethodPost, "/admin/member/add", `{"id":"node8","raft_addr":"10.0.0.8"}`, "201")
	rest(http.MethodPost, "/api/v1/cluster/leader/transfer", `{"target_id":1}`, "200")
	_, err := cluster.MemberRemove(h.callContext(), &etcdpb.MemberRemoveRequest{ID: 8})
	require.Equal(t, codes.PermissionDenied, status.Code(err))
	mustCall(h, cluster.MemberRemove, &etcdpb.MemberRemoveRequest{ID: 8})
	added := mustCall(h, cluster.MemberAdd, &etcdpb.MemberAddRequest{PeerURLs: []string{"http://10.0.0.9:2380"}, IsLearner: true})
	mustCall(h, cluster.MemberUpdate, &etcdpb.MemberUpdateRequest{ID: added.Member.ID, PeerURLs: []string{"http://10.0.0.10:2380"}})
	_, err = cluster.MemberPromote(h.adminContext(), &etcdpb.MemberPromoteRequest{ID: added.Member.ID})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	mustCall(h, operator.RemoveMember, &operatorv1.RemoveMemberRequest{Id: added.Member.ID})
	_, err = operator.RemoveMember(h.callContext(), &operatorv1.RemoveMemberRequest{Id: 1})
	require.Equal(t, codes.Unauthenticated, status.Code(err))

	for _, want := range []*identityv1.AuditRecord{
		{Method: etcdCluster + "MemberAdd", Outcome: "OK", Target: "POST /api/v1/cluster/members node_id=7 raft_addr=10.0.0.7"},
		{Method: etcdCluster + "MemberRemove", Outcome: "OK", Target: "DELETE /api/v1/cluster/members/7"},
		{Method: etcdCluster + "MemberRemove", Outcome: "FAILED_PRECONDITION", Target: "DELETE /api/v1/cluster/members/1"},
		{Method: etcdCluster + "MemberAdd", Outcome: "OK", Target: "POST /admin/member/add node_id=8 raft_addr=10.0.0.8"},
		{Method: etcdMaintenance + "MoveLeader", Outcome: "OK", Target: "POST /api/v1/cluster/leader/transfer target_id=1"},
		{Method: etcdCluster + "MemberRemove", Outcome: "PERMISSION_DENIED"}, // refused before its message was read
		{Method: etcdCluster + "MemberRemove", Outcome: "OK", Principal: "admin", Target: "id=8"},
		{Method: etcdCluster + "MemberAdd", Outcome: "OK", Principal: "admin", Target: "peer_urls=http://10.0.0.9:2380 learner=true"},
		{Method: etcdCluster + "MemberUpdate", Outcome: "OK", Principal: "admin", Target: "peer_urls=http://10.0.0.10:2380"},
		{Method: etcdCluster + "MemberPromote", Outcome: "FAILED_PRECONDITION", Principal: "admin", Target: "id="},
		{Method: "/operator.v1.OperatorService/RemoveMember", Outcome: "OK", Principal: "admin"},
		{Method: "/operator.v1.OperatorService/RemoveMember", Outcome: "UNAUTHENTICATED"},
	} {
		h.waitFor(func() bool {
			list := mustCall(h, who.ListAuditRecords, &identityv1.ListAuditRecordsRequest{Method: want.Method, Outcome: want.Outcome})
			return slices.ContainsFunc(list.GetRecords(), func(r *identityv1.AuditRecord) bool {
				return r.GetPrincipal() == want.Principal && strings.Contains(r.GetTarget(), want.Target) &&
					net.ParseIP(r.GetAddress()).IsLoopback() && r.GetRequestId() != ""
			})
		})
	}
}
