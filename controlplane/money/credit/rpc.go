package credit

import (
	"context"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Register registers CreditService (credit.v1).
func (s *Service) Register(g grpc.ServiceRegistrar) {
	creditv1.RegisterCreditServiceServer(g, &server{s: s})
}

type server struct {
	creditv1.UnsafeCreditServiceServer
	s *Service
}

const service = "/credit.v1.CreditService/"

// request is implemented by every request that names one wallet.
type request interface {
	GetOrgId() string
	GetProjectId() string
}

func admit(ctx context.Context, method auth.Method, in request) (cloud.Tenant, error) {
	for _, id := range []struct{ field, value string }{{"org_id", in.GetOrgId()}, {"project_id", in.GetProjectId()}} {
		if id.value == "" {
			continue
		}
		if err := cloud.CheckCallerID(id.field, id.value); err != nil {
			// A caller who is not authorized for this method in any project must get the error of the authorization,
			// not the error about the ID.
			if _, refused := auth.Admit(ctx, service+method, "", ""); refused != nil && !fault.Is(refused, fault.InvalidArgument) && !auth.Undecided(refused) {
				return cloud.Tenant{}, refused
			}
			return cloud.Tenant{}, err
		}
	}
	return auth.Admit(ctx, service+method, in.GetOrgId(), in.GetProjectId())
}

// execute authorizes the caller for the wallet that the request names, and executes the command c on that wallet.
func (r *server) execute(ctx context.Context, method auth.Method, in interface {
	request
	proto.Message
}, c ledger.Command) (*Result, error) {
	t, err := admit(ctx, method, in)
	if err != nil {
		return nil, err
	}
	done, err := r.s.Execute(ctx, Request{Tenant: t, Command: c, Body: rpc.BodyHash(in)})
	if err != nil {
		return nil, err
	}
	rpc.Replayed(ctx, done.Replayed)
	return &done, nil
}

func (r *server) CreateWallet(ctx context.Context, in *creditv1.CreateWalletRequest) (*creditv1.Wallet, error) {
	return walletOnly(r.execute(ctx, "CreateWallet", in, ledger.Command{Op: ledger.DoCreate, Amount: in.GetInitialBalance()}))
}

func (r *server) GetWallet(ctx context.Context, in *creditv1.GetWalletRequest) (*creditv1.Wallet, error) {
	t, err := admit(ctx, "GetWallet", in)
	if err != nil {
		return nil, err
	}
	w, err := r.s.Wallet(ctx, t)
	if err != nil {
		return nil, err
	}
	return walletRPC(w), nil
}

func (r *server) ListWallets(ctx context.Context, in *creditv1.ListWalletsRequest) (*creditv1.ListWalletsResponse, error) {
	if _, err := auth.Admit(ctx, service+"ListWallets", "", ""); err != nil {
		return nil, err
	}
	list, next, err := r.s.Wallets(ctx, cloud.OrgID(in.GetOrgId()), in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	return &creditv1.ListWalletsResponse{Wallets: all(list, walletRPC), NextPageToken: next}, nil
}

func (r *server) TopUpWallet(ctx context.Context, in *creditv1.TopUpWalletRequest) (*creditv1.TransactionResponse, error) {
	return moved(r.execute(ctx, "TopUpWallet", in, ledger.Command{Op: ledger.DoTopUp, Amount: in.GetAmount(), Description: in.GetDescription()}))
}

func (r *server) ChargeWallet(ctx context.Context, in *creditv1.ChargeWalletRequest) (*creditv1.TransactionResponse, error) {
	return moved(r.execute(ctx, "ChargeWallet", in, ledger.Command{
		Op: ledger.DoCharge, Amount: in.GetAmount(), Description: in.GetDescription(), ResourceID: in.GetResourceId(),
	}))
}

func (r *server) RefundCharge(ctx context.Context, in *creditv1.RefundChargeRequest) (*creditv1.TransactionResponse, error) {
	return moved(r.execute(ctx, "RefundCharge", in, ledger.Command{
		Op: ledger.DoRefund, Charge: in.GetChargeSequence(), Amount: in.GetAmount(), Description: in.GetDescription(),
	}))
}

func (r *server) SuspendWallet(ctx context.Context, in *creditv1.SuspendWalletRequest) (*creditv1.Wallet, error) {
	return walletOnly(r.execute(ctx, "SuspendWallet", in, ledger.Command{Op: ledger.DoSuspend}))
}

func (r *server) ResumeWallet(ctx context.Context, in *creditv1.ResumeWalletRequest) (*creditv1.Wallet, error) {
	return walletOnly(r.execute(ctx, "ResumeWallet", in, ledger.Command{Op: ledger.DoResume}))
}

func (r *server) CloseWallet(ctx context.Context, in *creditv1.CloseWalletRequest) (*creditv1.Wallet, error) {
	return walletOnly(r.execute(ctx, "CloseWallet", in, ledger.Command{Op: ledger.DoClose}))
}

func (r *server) ListTransactions(ctx context.Context, in *creditv1.ListTransactionsRequest) (*creditv1.ListTransactionsResponse, error) {
	t, err := admit(ctx, "ListTransactions", in)
	if err != nil {
		return nil, err
	}
	q := Filter{Reservation: in.GetReservationId(), ResourceID: in.GetResourceId(), Period: Period{in.GetFrom(), in.GetTo()}}
	for _, which := range in.GetTypes() {
		if _, known := creditv1.TransactionType_name[int32(which)]; !known || which == 0 {
			return nil, fault.Invalid("types", "unknown value %d", which)
		}
		if !slices.Contains(q.Types, ledger.Type(which)) {
			q.Types = append(q.Types, ledger.Type(which))
		}
	}
	if in.Incarnation != nil {
		if c := auth.CallerOf(ctx); !c.Has(cloud.BillingAdmin, cloud.Tenant{}) && !c.Has(cloud.SystemAdmin, cloud.Tenant{}) {
			return nil, fault.New(fault.PermissionDenied, "only %s and %s may name an incarnation: leave it out for the wallet of the project",
				cloud.BillingAdmin, cloud.SystemAdmin)
		}
		q.Of = new(cloud.Incarnation(in.GetIncarnation()))
	}
	list, next, err := r.s.Transactions(ctx, t, q, in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	return &creditv1.ListTransactionsResponse{Transactions: all(list, transactionRPC), NextPageToken: next}, nil
}

func (r *server) WatchTransactions(in *creditv1.WatchTransactionsRequest, out grpc.ServerStreamingServer[creditv1.Transaction]) error {
	t, err := admit(out.Context(), "WatchTransactions", in)
	if err != nil {
		return err
	}
	return r.s.Watch(out.Context(), t, in.GetFromSequence(), func(tx *ledger.Transaction) error { return out.Send(transactionRPC(tx)) })
}

func (r *server) GetStatement(ctx context.Context, in *creditv1.GetStatementRequest) (*creditv1.Statement, error) {
	t, err := admit(ctx, "GetStatement", in)
	if err != nil {
		return nil, err
	}
	s, period, err := r.s.Statement(ctx, t, Period{in.GetFrom(), in.GetTo()})
	if err != nil {
		return nil, err
	}
	out := &creditv1.Statement{
		ProjectId: string(t.Project), From: period.From, To: period.To, OpeningBalance: s.Opening, ClosingBalance: s.Closing, Transactions: s.Transactions,
	}
	for _, which := range ledger.Types() {
		if amount := s.Of(which); amount != 0 {
			out.Sums = append(out.Sums, &creditv1.TypeSum{Type: creditv1.TransactionType(which), Amount: amount})
		}
	}
	return out, nil
}

func (r *server) CreateReservation(ctx context.Context, in *creditv1.CreateReservationRequest) (*creditv1.Reservation, error) {
	done, err := r.execute(ctx, "CreateReservation", in, ledger.Command{
		Op: ledger.DoReserve, Amount: in.GetAmount(), Description: in.GetDescription(), ResourceType: in.GetResourceType(), TTL: in.GetTtlSeconds(),
		Reservation: in.GetReservationId(),
	})
	if err != nil {
		return nil, err
	}
	return reservationRPC(done.Reservation), nil
}

func (r *server) GetReservation(ctx context.Context, in *creditv1.GetReservationRequest) (*creditv1.Reservation, error) {
	t, err := admit(ctx, "GetReservation", in)
	if err != nil {
		return nil, err
	}
	found, err := r.s.Reservation(ctx, t, in.GetReservationId())
	if err != nil {
		return nil, err
	}
	return reservationRPC(found), nil
}

func (r *server) ListReservations(ctx context.Context, in *creditv1.ListReservationsRequest) (*creditv1.ListReservationsResponse, error) {
	t, err := admit(ctx, "ListReservations", in)
	if err != nil {
		return nil, err
	}
	if _, known := creditv1.ReservationStatus_name[int32(in.GetStatus())]; !known {
		return nil, fault.Invalid("status", "unknown value %d", in.GetStatus())
	}
	list, next, err := r.s.Reservations(ctx, t, ledger.ReservationStatus(in.GetStatus()), in.GetPageSize(), in.GetPageToken())
	if err != nil {
		return nil, err
	}
	return &creditv1.ListReservationsResponse{Reservations: all(list, reservationRPC), NextPageToken: next}, nil
}

func (r *server) CommitReservation(ctx context.Context, in *creditv1.CommitReservationRequest) (*creditv1.CommitReservationResponse, error) {
	done, err := r.execute(ctx, "CommitReservation", in, ledger.Command{
		Op: ledger.DoCommit, Reservation: in.GetReservationId(), Amount: in.GetActualAmount(), ResourceID: in.GetResourceId(),
	})
	if err != nil {
		return nil, err
	}
	return &creditv1.CommitReservationResponse{Wallet: walletRPC(&done.Wallet), Reservation: reservationRPC(done.Reservation)}, nil
}

func (r *server) ReleaseReservation(ctx context.Context, in *creditv1.ReleaseReservationRequest) (*creditv1.ReleaseReservationResponse, error) {
	done, err := r.execute(ctx, "ReleaseReservation", in, ledger.Command{
		Op: ledger.DoRelease, Reservation: in.GetReservationId(), Description: in.GetReason(),
	})
	if err != nil {
		return nil, err
	}
	return &creditv1.ReleaseReservationResponse{
		Released: done.Released, Wallet: walletRPC(&done.Wallet), Reservation: reservationRPC(done.Reservation),
	}, nil
}

func (r *server) AuditLedger(_ *creditv1.AuditLedgerRequest, out grpc.ServerStreamingServer[creditv1.AuditLedgerResponse]) error {
	if _, err := auth.Admit(out.Context(), service+"AuditLedger", "", ""); err != nil {
		return err
	}
	return r.s.Audit(out.Context(), func(f Finding) error {
		return out.Send(&creditv1.AuditLedgerResponse{
			ProjectId: string(f.Project), Problem: f.Problem, Transactions: f.Transactions, Reservations: f.Reservations,
			Incarnation: int64(f.Incarnation),
		})
	})
}

// The functions below convert ledger types to types of credit.v1. The numbers of statuses and types are the same on
// both sides (part 3 of the wire contract).

func walletRPC(w *ledger.Wallet) *creditv1.Wallet {
	return &creditv1.Wallet{
		ProjectId: string(w.Project), OrgId: string(w.Org), Balance: w.Balance(), Reserved: w.Reserved(), Available: w.Available(),
		TotalDeposited: w.Deposited(), TotalConsumed: w.Consumed(), Status: creditv1.WalletStatus(w.Status), PendingReservations: w.Pending,
		Sequence: w.Sequence, CreatedAt: w.CreatedAt, UpdatedAt: w.UpdatedAt, Incarnation: int64(w.Incarnation),
	}
}

func transactionRPC(tx *ledger.Transaction) *creditv1.Transaction {
	return &creditv1.Transaction{
		Id: tx.ID, ProjectId: string(tx.Project), Sequence: tx.Sequence, Type: creditv1.TransactionType(tx.Type), Amount: tx.Amount,
		BalanceAfter: tx.BalanceAfter, Description: tx.Description, ResourceId: tx.ResourceID, ReservationId: tx.Reservation,
		ChargeSequence: tx.Charge, CreatedAt: tx.At, CreatedBy: tx.By,
	}
}

func reservationRPC(r *ledger.Reservation) *creditv1.Reservation {
	return &creditv1.Reservation{
		Id: r.ID, ProjectId: string(r.Project), Amount: r.Amount, Status: creditv1.ReservationStatus(r.Status), Description: r.Description,
		ResourceType: r.ResourceType, ResourceId: r.ResourceID, Charged: r.Charged, CreatedAt: r.CreatedAt, CreatedBy: r.CreatedBy,
		ExpiresAt: r.Deadline, EndedAt: r.EndedAt,
	}
}

// all returns a new list with translate(e) for each element e of list.
func all[A, B any](list []*A, translate func(*A) *B) []*B {
	out := make([]*B, len(list))
	for i, a := range list {
		out[i] = translate(a)
	}
	return out
}

// walletOnly converts the result of an operation to a response that contains only the wallet.
func walletOnly(done *Result, err error) (*creditv1.Wallet, error) {
	if err != nil {
		return nil, err
	}
	return walletRPC(&done.Wallet), nil
}

// moved converts the result of an operation that makes exactly one transaction. The response contains the wallet and
// that transaction.
func moved(done *Result, err error) (*creditv1.TransactionResponse, error) {
	if err != nil {
		return nil, err
	}
	return &creditv1.TransactionResponse{Wallet: walletRPC(&done.Wallet), Transaction: transactionRPC(&done.Transactions[0])}, nil
}
