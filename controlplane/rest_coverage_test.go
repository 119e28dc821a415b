package main

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
)

// withoutREST lists the RPCs on the port for tenants and operators that have no REST route, with the reason.
var withoutREST = map[auth.Method]string{
	identityService + "IssueToken":    "POST /api/v1/auth/token of the wire contract issues tokens",
	identityService + "VerifyToken":   "POST /api/v1/auth/verify of the wire contract verifies tokens",
	identityService + "ExchangeToken": "a login with an external provider needs a client that follows OpenID's flow, such as trivet login",
	vms + "PrepareVmMigration":        "the control plane calls it, not its users",
	nodes + "HeartbeatNode":           "hosts call it, on a port of their own",
	consoles + "AttachConsole":        "a console is a websocket: POST /api/v1/vms/{vm_id}/console and GET /api/v1/console",
	operators + "BackupCluster":       "a backup has the secrets of all tenants, and trivet cluster backup checks that it is complete",
	credits + "AuditLedger":           "it reads the whole ledger, for trivet wallet audit and tests",
}

// TestEveryRPCHasARoute checks that each RPC for tenants and operators has a REST route or a reason in withoutREST.
func TestEveryRPCHasARoute(t *testing.T) {
	h := startMember(t)
	served := map[auth.Method]bool{}
	for _, l := range h.listeners {
		if routes, ok := l.http.(interface{ Routes() []rest.Route }); ok && l.grpc == nil {
			for _, r := range routes.Routes() {
				served[r.As], served[r.RPC] = true, true
			}
		}
	}
	all, _ := listEndpoints(&matrix{}, h.listeners)
	var rpcs []auth.Method
	for _, e := range all["grpc"] {
		if service, _ := splitMethod(e.name); e.class != etcd && standard[service] == "" {
			rpcs = append(rpcs, auth.Method(e.name))
		}
	}
	require.Greater(t, len(rpcs), 100, "the RPCs were not found")
	for _, m := range rpcs {
		switch reason := withoutREST[m]; {
		case !served[m] && reason == "":
			t.Errorf("%s has neither a REST route nor a reason in withoutREST", m)
		case served[m] && reason != "":
			t.Errorf("%s is in withoutREST, but has a REST route", m)
		}
	}
	for m := range withoutREST {
		require.True(t, slices.Contains(rpcs, m), "%s is in withoutREST, but is not served", m)
	}
}
