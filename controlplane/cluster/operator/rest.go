package operator

import (
	"net/http"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// Routes registers the REST API for operators, and of the logs and migrations of VMs (docs/api.md). Each route has the
// fields and the authorization of one RPC.
func (s *Service) Routes(r *rest.Server) {
	const (
		cluster = "/api/v1/cluster"
		member  = cluster + "/members/{id}"
		host    = "/api/v1/nodes/{node_id}"
		vm      = "/api/v1/vms/{vm_id}"
	)
	protorest.Serve(r, &operatorv1.OperatorService_ServiceDesc, &s.server, []protorest.Row{
		{Method: http.MethodGet, Path: cluster, RPC: "ClusterStatus"},
		{Method: http.MethodPost, Path: cluster + "/members", RPC: "AddMember", Creates: true},
		{Method: http.MethodPost, Path: member + "/promote", RPC: "PromoteMember"},
		{Method: http.MethodPost, Path: member + "/remove", RPC: "RemoveMember"},
		{Method: http.MethodPost, Path: member + "/replace", RPC: "ReplaceMember"},
		{Method: http.MethodPost, Path: member + "/transfer-leader", RPC: "TransferLeader"},
		{Method: http.MethodPost, Path: "/api/v1/member-tokens", RPC: "CreateMemberToken", Creates: true},

		{Method: http.MethodPost, Path: "/api/v1/node-tokens", RPC: "CreateNodeToken", Creates: true},
		{Method: http.MethodPost, Path: host + "/evict", RPC: "EvictNode"},
		{Method: http.MethodPost, Path: host + "/fence", RPC: "FenceNode"},
		{Method: http.MethodPost, Path: host + "/ban", RPC: "BanNode"},
		{Method: http.MethodPost, Path: host + "/unban", RPC: "UnbanNode"},
		{Method: http.MethodGet, Path: "/api/v1/node-bans", RPC: "ListBans"},
		{Method: http.MethodGet, Path: host + "/drain", RPC: "GetDrain"},
		{Method: http.MethodPost, Path: host + "/drain/cancel", RPC: "CancelDrain"},
		{Method: http.MethodGet, Path: "/api/v1/capacity", RPC: "GetCapacity"},
		{Method: http.MethodPost, Path: "/api/v1/rebalance", RPC: "RebalanceCluster"},

		{Method: http.MethodGet, Path: vm + "/console/log", RPC: "ReadConsoleLog", Media: "application/octet-stream"},
		{Method: http.MethodGet, Path: vm + "/migration", RPC: "GetMigration"},
		{Method: http.MethodPost, Path: vm + "/migration/cancel", RPC: "CancelMigration"},
		{Method: http.MethodPost, Path: vm + "/rename", RPC: "RenameVm"},
	})
}
