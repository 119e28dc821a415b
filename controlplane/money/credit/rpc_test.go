package credit

import (
	"context"
	"log/slog"
	"math"
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

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
)

// dial serves CreditService in memory and returns a client of it.
func (w *world) dial(t *testing.T) creditv1.CreditServiceClient {
	g, _ := rpc.New(rpc.Options{Verifier: people(), Log: slog.New(slog.DiscardHandler), Metrics: grpcprom.NewServerMetrics(), Public: true})
	w.credits.Register(g)
	listener := bufconn.Listen(1 << 20)
	served := make(chan struct{})
	go func() { defer close(served); _ = g.Serve(listener) }()
	t.Cleanup(func() { g.Stop(); <-served })
	conn, err := grpc.NewClient("passthrough:///member", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return creditv1.NewCreditServiceClient(conn)
}

func caller(t *testing.T, who string, more ...string) context.Context {
	return metadata.AppendToOutgoingContext(t.Context(), append([]string{"authorization", "Bearer " + who}, more...)...)
}

// TestRPCStory calls every method of CreditService for one project, and checks responses and permissions.
func TestRPCStory(t *testing.T) {
	w := newWorld(t)
	c := w.dial(t)
	ada, bill, admin := caller(t, "ada"), caller(t, "bill"), caller(t, "admin")

	_, err := c.CreateWallet(ada, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "web"})
	require.Equal(t, codes.PermissionDenied, status.Code(err), "a project:member must not create wallets")
	made, err := c.CreateWallet(bill, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "web", InitialBalance: 100})
	require.NoError(t, err)
	require.EqualValues(t, 100, made.GetAvailable())
	_, err = c.CreateWallet(bill, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "web"})
	require.Equal(t, codes.AlreadyExists, status.Code(err))
	begin := w.clock.Now().UnixMilli()
	w.clock.Advance(time.Minute)

	watching, stop := context.WithCancel(ada)
	stream, err := c.WatchTransactions(watching, &creditv1.WatchTransactionsRequest{FromSequence: 2})
	require.NoError(t, err)

	const own = "00000000-0000-4000-8000-00000000000a"
	reserve := &creditv1.CreateReservationRequest{Amount: 60, ReservationId: own, Description: "VM web", ResourceType: "vm", TtlSeconds: 60}
	r, err := c.CreateReservation(ada, reserve)
	require.NoError(t, err)
	require.Equal(t, own, r.GetId())
	require.Equal(t, w.clock.Now().UnixMilli()+60_000, r.GetExpiresAt())
	again, err := c.CreateReservation(ada, reserve)
	require.NoError(t, err)
	require.Equal(t, r.String(), again.String(), "a repeated call with the same reservation ID must return the same reservation")
	reserve.Amount++
	_, err = c.CreateReservation(ada, reserve)
	require.Equal(t, codes.AlreadyExists, status.Code(err))
	_, err = c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: 41})
	require.Equal(t, codes.ResourceExhausted, status.Code(err))
	committed, err := c.CommitReservation(ada, &creditv1.CommitReservationRequest{ReservationId: own, ActualAmount: 50, ResourceId: "vm-1"})
	require.NoError(t, err)
	require.EqualValues(t, 50, committed.GetWallet().GetBalance())
	require.Equal(t, creditv1.ReservationStatus_RESERVATION_STATUS_COMMITTED, committed.GetReservation().GetStatus())
	_, err = c.ReleaseReservation(ada, &creditv1.ReleaseReservationRequest{ReservationId: own})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))

	var header metadata.MD
	topUp := &creditv1.TopUpWalletRequest{ProjectId: "web", Amount: 7, Description: "voucher"}
	for _, replayed := range []int{0, 1} {
		moved, err := c.TopUpWallet(caller(t, "bill", "idempotency-key", "v"), topUp, grpc.Header(&header))
		require.NoError(t, err)
		require.EqualValues(t, 57, moved.GetWallet().GetBalance())
		require.EqualValues(t, 5, moved.GetTransaction().GetSequence())
		require.Equal(t, "bill", moved.GetTransaction().GetCreatedBy())
		require.Len(t, header.Get("idempotency-replayed"), replayed)
	}
	charged, err := c.ChargeWallet(bill, &creditv1.ChargeWalletRequest{ProjectId: "web", Amount: 2, ResourceId: "vm-1"})
	require.NoError(t, err)
	refunded, err := c.RefundCharge(bill, &creditv1.RefundChargeRequest{ProjectId: "web", ChargeSequence: charged.GetTransaction().GetSequence(), Amount: 1})
	require.NoError(t, err)
	require.Equal(t, charged.GetTransaction().GetSequence(), refunded.GetTransaction().GetChargeSequence())

	for n := uint64(2); n <= 7; n++ {
		tx, err := stream.Recv()
		require.NoError(t, err)
		require.Equal(t, n, tx.GetSequence())
	}
	stop()
	_, err = stream.Recv()
	require.Equal(t, codes.Canceled, status.Code(err))

	list, err := c.ListTransactions(ada, &creditv1.ListTransactionsRequest{ResourceId: "vm-1", Types: []creditv1.TransactionType{
		creditv1.TransactionType_TRANSACTION_TYPE_CHARGE, creditv1.TransactionType_TRANSACTION_TYPE_BILLING_CHARGE,
	}})
	require.NoError(t, err)
	require.Len(t, list.GetTransactions(), 2)
	statement, err := c.GetStatement(ada, &creditv1.GetStatementRequest{From: begin + 1})
	require.NoError(t, err)
	require.EqualValues(t, 100, statement.GetOpeningBalance())
	require.EqualValues(t, 56, statement.GetClosingBalance())
	require.Len(t, statement.GetSums(), 6)
	held, err := c.ListReservations(ada, &creditv1.ListReservationsRequest{Status: creditv1.ReservationStatus_RESERVATION_STATUS_COMMITTED})
	require.NoError(t, err)
	require.Len(t, held.GetReservations(), 1)
	one, err := c.GetReservation(bill, &creditv1.GetReservationRequest{ProjectId: "web", ReservationId: own})
	require.NoError(t, err)
	require.Equal(t, held.GetReservations()[0].String(), one.String())

	suspended, err := c.SuspendWallet(bill, &creditv1.SuspendWalletRequest{ProjectId: "web"})
	require.NoError(t, err)
	require.Equal(t, creditv1.WalletStatus_WALLET_STATUS_SUSPENDED, suspended.GetStatus())
	_, err = c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: 1})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	_, err = c.ResumeWallet(bill, &creditv1.ResumeWalletRequest{ProjectId: "web"})
	require.NoError(t, err)
	free, err := c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: 1})
	require.NoError(t, err)
	_, err = c.CloseWallet(bill, &creditv1.CloseWalletRequest{ProjectId: "web"})
	require.Equal(t, codes.FailedPrecondition, status.Code(err))
	released, err := c.ReleaseReservation(ada, &creditv1.ReleaseReservationRequest{ReservationId: free.GetId(), Reason: "no more"})
	require.NoError(t, err)
	require.True(t, released.GetReleased())
	closed, err := c.CloseWallet(bill, &creditv1.CloseWalletRequest{ProjectId: "web"})
	require.NoError(t, err)
	require.Equal(t, creditv1.WalletStatus_WALLET_STATUS_CLOSED, closed.GetStatus())
	seen, err := c.GetWallet(ada, &creditv1.GetWalletRequest{})
	require.NoError(t, err)
	require.Equal(t, closed.String(), seen.String())
	wallets, err := c.ListWallets(bill, &creditv1.ListWalletsRequest{})
	require.NoError(t, err)
	require.Len(t, wallets.GetWallets(), 1)

	audit, err := c.AuditLedger(admin, &creditv1.AuditLedgerRequest{})
	require.NoError(t, err)
	found, err := audit.Recv()
	require.NoError(t, err)
	require.Empty(t, found.GetProblem())
	require.EqualValues(t, 9, found.GetTransactions())
	audit, err = c.AuditLedger(bill, &creditv1.AuditLedgerRequest{})
	require.NoError(t, err)
	_, err = audit.Recv()
	require.Equal(t, codes.PermissionDenied, status.Code(err))
}

// TestRPCArguments makes calls with invalid arguments or without permission. Each error must name the field or the
// reason, and no call may make a transaction.
func TestRPCArguments(t *testing.T) {
	w := funded(t, 100)
	c := w.dial(t)
	ada, bill := caller(t, "ada"), caller(t, "bill")
	only := func(_ any, err error) error { return err }
	long := string(make([]byte, 2000))
	for _, d := range []struct {
		name string
		err  error
		code codes.Code
		says string
	}{
		{"no project", only(c.GetWallet(bill, &creditv1.GetWalletRequest{})), codes.InvalidArgument, "project_id"},
		{"a malformed project ID", only(c.GetWallet(bill, &creditv1.GetWalletRequest{ProjectId: "a/b"})), codes.InvalidArgument, "project_id"},
		{"a malformed project ID, by a caller without a role", only(c.GetWallet(caller(t, "none"), &creditv1.GetWalletRequest{ProjectId: "a/b"})), codes.PermissionDenied, "no role"},
		{"a malformed org ID", only(c.GetWallet(bill, &creditv1.GetWalletRequest{OrgId: "a b", ProjectId: "web"})), codes.InvalidArgument, "org_id"},
		{"another org", only(c.GetWallet(bill, &creditv1.GetWalletRequest{OrgId: "evil", ProjectId: "web"})), codes.NotFound, "Wallet not found"},
		{"another project", only(c.GetWallet(ada, &creditv1.GetWalletRequest{ProjectId: "lair"})), codes.NotFound, "no project lair"},
		{"a wallet without an org", only(c.CreateWallet(bill, &creditv1.CreateWalletRequest{ProjectId: "new"})), codes.InvalidArgument, "org_id"},
		{"a negative initial balance", only(c.CreateWallet(bill, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "empty", InitialBalance: -1})), codes.InvalidArgument, "initial_balance"},
		{"a project that does not exist", only(c.CreateWallet(bill, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "nope"})), codes.NotFound, "no project nope"},
		{"an earlier incarnation's transactions, for a project:member", only(c.ListTransactions(ada, &creditv1.ListTransactionsRequest{Incarnation: new(int64)})), codes.PermissionDenied, "incarnation"},
		{"a top-up of 0", only(c.TopUpWallet(bill, &creditv1.TopUpWalletRequest{ProjectId: "web"})), codes.InvalidArgument, "amount"},
		{"a top-up by a project:member", only(c.TopUpWallet(ada, &creditv1.TopUpWalletRequest{ProjectId: "web", Amount: 1})), codes.PermissionDenied, "TopUpWallet"},
		{"a wallet created by a project:member", only(c.CreateWallet(ada, &creditv1.CreateWalletRequest{OrgId: "acme", ProjectId: "web", InitialBalance: 1})), codes.PermissionDenied, "CreateWallet"},
		{"a negative top-up", only(c.TopUpWallet(bill, &creditv1.TopUpWalletRequest{ProjectId: "web", Amount: -1})), codes.InvalidArgument, "amount"},
		{"a top-up beyond 2^63-1", only(c.TopUpWallet(bill, &creditv1.TopUpWalletRequest{ProjectId: "web", Amount: math.MaxInt64})), codes.InvalidArgument, "can count no more"},
		{"a negative charge", only(c.ChargeWallet(bill, &creditv1.ChargeWalletRequest{ProjectId: "web", Amount: -1})), codes.InvalidArgument, "amount"},
		{"a negative reservation", only(c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: -1})), codes.InvalidArgument, "amount"},
		{"a reservation of 2^63-1", only(c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: math.MaxInt64})), codes.ResourceExhausted, ""},
		{"a reservation of -2^63", only(c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: math.MinInt64})), codes.InvalidArgument, "amount"},
		{"a long description", only(c.TopUpWallet(bill, &creditv1.TopUpWalletRequest{ProjectId: "web", Amount: 1, Description: long})), codes.InvalidArgument, "description"},
		{"a malformed resource ID", only(c.ChargeWallet(bill, &creditv1.ChargeWalletRequest{ProjectId: "web", Amount: 1, ResourceId: "a\n"})), codes.InvalidArgument, "resource_id"},
		{"a refund without a transaction", only(c.RefundCharge(bill, &creditv1.RefundChargeRequest{ProjectId: "web", Amount: 1})), codes.NotFound, "no transaction 0"},
		{"a reservation of 0", only(c.CreateReservation(ada, &creditv1.CreateReservationRequest{})), codes.InvalidArgument, "amount"},
		{"a malformed reservation ID", only(c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: 1, ReservationId: "r"})), codes.InvalidArgument, "reservation_id"},
		{"a ttl of a year", only(c.CreateReservation(ada, &creditv1.CreateReservationRequest{Amount: 1, TtlSeconds: 365 * 86400})), codes.InvalidArgument, "ttl_seconds"},
		{"no reservation ID", only(c.CommitReservation(ada, &creditv1.CommitReservationRequest{})), codes.InvalidArgument, "reservation_id"},
		{"a negative actual amount", only(c.CommitReservation(ada, &creditv1.CommitReservationRequest{ReservationId: "00000000-0000-4000-8000-00000000000a", ActualAmount: -1})), codes.InvalidArgument, "actual_amount"},
		{"a reservation that does not exist", only(c.ReleaseReservation(ada, &creditv1.ReleaseReservationRequest{ReservationId: "00000000-0000-4000-8000-00000000000a"})), codes.NotFound, "no reservation"},
		{"an unknown transaction type", only(c.ListTransactions(ada, &creditv1.ListTransactionsRequest{Types: []creditv1.TransactionType{257}})), codes.InvalidArgument, "types"},
		{"a negative transaction type", only(c.ListTransactions(ada, &creditv1.ListTransactionsRequest{Types: []creditv1.TransactionType{-255}})), codes.InvalidArgument, "types"},
		{"a page size that is too large", only(c.ListTransactions(ada, &creditv1.ListTransactionsRequest{PageSize: 1001})), codes.InvalidArgument, "page_size"},
		{"a statement that ends before it begins", only(c.GetStatement(ada, &creditv1.GetStatementRequest{From: 5, To: 4})), codes.InvalidArgument, "to"},
		{"an unknown reservation status", only(c.ListReservations(ada, &creditv1.ListReservationsRequest{Status: 257})), codes.InvalidArgument, "status"},
		{"the list of all wallets, for a project:member", only(c.ListWallets(ada, &creditv1.ListWalletsRequest{})), codes.PermissionDenied, "ListWallets"},
	} {
		t.Run(d.name, func(t *testing.T) {
			require.Equal(t, d.code, status.Code(d.err), "%v", d.err)
			require.ErrorContains(t, d.err, d.says)
		})
	}
	require.EqualValues(t, 1, w.wallet().Sequence, "no call may have made a transaction")
	w.clean()
}
