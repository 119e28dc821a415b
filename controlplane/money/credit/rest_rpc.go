package credit

import (
	"net/http"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/protorest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// rpcRoutes registers the routes that are served by RPCs. The wire contract has none of them, so their errors do not
// have the codes and the status 500 of its routes, but those of the identity API.
func (s *Service) rpcRoutes(r *rest.Server) {
	const wallets, wallet, reservations = "/api/v1/wallets", "/api/v1/wallets/{project_id}", "/api/v1/reservations"
	rows := []protorest.Row{
		{Method: http.MethodGet, Path: wallets, RPC: "ListWallets"},
		{Method: http.MethodPost, Path: wallet + "/charge", RPC: "ChargeWallet"},
		{Method: http.MethodPost, Path: wallet + "/refund", RPC: "RefundCharge"},
		{Method: http.MethodPost, Path: wallet + "/suspend", RPC: "SuspendWallet"},
		{Method: http.MethodPost, Path: wallet + "/resume", RPC: "ResumeWallet"},
		{Method: http.MethodPost, Path: wallet + "/close", RPC: "CloseWallet"},
		{Method: http.MethodGet, Path: wallet + "/statement", RPC: "GetStatement"},
		{Method: http.MethodGet, Path: wallet + "/events", RPC: "WatchTransactions", Event: "transaction"},
		{Method: http.MethodGet, Path: reservations, RPC: "ListReservations"},
		{Method: http.MethodGet, Path: reservations + "/{reservation_id}", RPC: "GetReservation"},
	}
	codes := fault.Identity
	for i := range rows {
		rows[i].Codes = &codes
	}
	protorest.Serve(r, &creditv1.CreditService_ServiceDesc, &server{s: s}, rows)
}
