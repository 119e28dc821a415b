package main

import (
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/status"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger/ledgertest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	ourfault "github.com/trivet-cloud/trivet/shared/fault"
)

// fakeCredits serves the methods of credit.v1 that the commands use, with the real ledger in memory.
type fakeCredits struct {
	creditv1.UnimplementedCreditServiceServer
	mu   sync.Mutex
	book *ledgertest.Memory
	log  []*creditv1.Transaction
	made int
	// late is the time by which the ledger's clock is ahead of now.
	late time.Duration
}

func newCredits() *fakeCredits { return &fakeCredits{book: ledgertest.NewMemory()} }

type aboutWallet interface {
	GetOrgId() string
	GetProjectId() string
}

func (f *fakeCredits) do(in aboutWallet, c ledger.Command) (*ledger.Outcome, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	project := cloud.ProjectID(in.GetProjectId())
	if project == "" {
		project = "default"
	}
	c.At, c.By, c.Tenant = now.Add(f.late).UnixMilli(), "demo", cloud.Tenant{Org: "default", Project: project}
	for i := range c.IDs {
		f.made++
		c.IDs[i] = fmt.Sprintf("00000000-0000-7000-9000-%012d", f.made)
	}
	if c.Op == ledger.DoReserve && c.Reservation == "" {
		c.Reservation = id(len(f.log))
	}
	out, err := f.book.Do(project, c)
	if refused, ok := ourfault.From(err); ok {
		return nil, failed(refused.Kind.RPC(), refused.Field, "%s", refused.Message)
	}
	for _, tx := range out.Transactions {
		f.log = append(f.log, &creditv1.Transaction{
			Id: tx.ID, ProjectId: string(tx.Project), Sequence: tx.Sequence, Type: creditv1.TransactionType(tx.Type), Amount: tx.Amount,
			BalanceAfter: tx.BalanceAfter, Description: tx.Description, ResourceId: tx.ResourceID, ReservationId: tx.Reservation,
			CreatedAt: tx.At, CreatedBy: tx.By,
		})
	}
	return &out, err
}

func shownWallet(w *ledger.Wallet) *creditv1.Wallet {
	return &creditv1.Wallet{
		ProjectId: string(w.Project), OrgId: string(w.Org), Balance: w.Balance(), Reserved: w.Reserved(), Available: w.Available(),
		TotalDeposited: w.Deposited(), TotalConsumed: w.Consumed(), Status: creditv1.WalletStatus(w.Status), Sequence: w.Sequence,
		PendingReservations: w.Pending, CreatedAt: w.CreatedAt, UpdatedAt: w.UpdatedAt,
	}
}

func shownReservation(r *ledger.Reservation) *creditv1.Reservation {
	return &creditv1.Reservation{
		Id: r.ID, ProjectId: string(r.Project), Amount: r.Amount, Status: creditv1.ReservationStatus(r.Status), Description: r.Description,
		ResourceType: r.ResourceType, ResourceId: r.ResourceID, Charged: r.Charged, CreatedAt: r.CreatedAt, ExpiresAt: r.Deadline, EndedAt: r.EndedAt,
	}
}

func (f *fakeCredits) wallet(in aboutWallet, c ledger.Command) (*creditv1.Wallet, error) {
	out, err := f.do(in, c)
	if err != nil {
		return nil, err
	}
	return shownWallet(&out.Wallet), nil
}

func (f *fakeCredits) moved(in aboutWallet, c ledger.Command) (*creditv1.TransactionResponse, error) {
	w, err := f.wallet(in, c)
	return &creditv1.TransactionResponse{Wallet: w}, err
}

func (f *fakeCredits) CreateWallet(_ context.Context, in *creditv1.CreateWalletRequest) (*creditv1.Wallet, error) {
	return f.wallet(in, ledger.Command{Op: ledger.DoCreate, Amount: in.GetInitialBalance()})
}

func (f *fakeCredits) GetWallet(_ context.Context, _ *creditv1.GetWalletRequest) (*creditv1.Wallet, error) {
	w, _ := f.book.Wallet("default")
	if w == nil {
		return nil, status.Error(ourfault.NotFound.RPC(), "Wallet not found")
	}
	return shownWallet(w), nil
}

func (f *fakeCredits) ListWallets(context.Context, *creditv1.ListWalletsRequest) (*creditv1.ListWalletsResponse, error) {
	out := &creditv1.ListWalletsResponse{}
	if w, _ := f.book.Wallet("default"); w != nil {
		out.Wallets = append(out.Wallets, shownWallet(w))
	}
	return out, nil
}

func (f *fakeCredits) TopUpWallet(_ context.Context, in *creditv1.TopUpWalletRequest) (*creditv1.TransactionResponse, error) {
	return f.moved(in, ledger.Command{Op: ledger.DoTopUp, Amount: in.GetAmount(), Description: in.GetDescription()})
}

func (f *fakeCredits) RefundCharge(_ context.Context, in *creditv1.RefundChargeRequest) (*creditv1.TransactionResponse, error) {
	return f.moved(in, ledger.Command{Op: ledger.DoRefund, Charge: in.GetChargeSequence(), Amount: in.GetAmount(), Description: in.GetDescription()})
}

func (f *fakeCredits) SuspendWallet(_ context.Context, in *creditv1.SuspendWalletRequest) (*creditv1.Wallet, error) {
	return f.wallet(in, ledger.Command{Op: ledger.DoSuspend})
}

func (f *fakeCredits) ResumeWallet(_ context.Context, in *creditv1.ResumeWalletRequest) (*creditv1.Wallet, error) {
	return f.wallet(in, ledger.Command{Op: ledger.DoResume})
}

func (f *fakeCredits) CloseWallet(_ context.Context, in *creditv1.CloseWalletRequest) (*creditv1.Wallet, error) {
	return f.wallet(in, ledger.Command{Op: ledger.DoClose})
}

func (f *fakeCredits) CreateReservation(_ context.Context, in *creditv1.CreateReservationRequest) (*creditv1.Reservation, error) {
	out, err := f.do(in, ledger.Command{
		Op: ledger.DoReserve, Reservation: in.GetReservationId(), Amount: in.GetAmount(), Description: in.GetDescription(),
		ResourceType: in.GetResourceType(), TTL: in.GetTtlSeconds(),
	})
	if err != nil {
		return nil, err
	}
	return shownReservation(out.Reservation), nil
}

func (f *fakeCredits) CommitReservation(_ context.Context, in *creditv1.CommitReservationRequest) (*creditv1.CommitReservationResponse, error) {
	out, err := f.do(in, ledger.Command{
		Op: ledger.DoCommit, Reservation: in.GetReservationId(), Amount: in.GetActualAmount(), ResourceID: in.GetResourceId(),
	})
	if err != nil {
		return nil, err
	}
	return &creditv1.CommitReservationResponse{Wallet: shownWallet(&out.Wallet), Reservation: shownReservation(out.Reservation)}, nil
}

func (f *fakeCredits) ReleaseReservation(_ context.Context, in *creditv1.ReleaseReservationRequest) (*creditv1.ReleaseReservationResponse, error) {
	out, err := f.do(in, ledger.Command{Op: ledger.DoRelease, Reservation: in.GetReservationId(), Description: in.GetReason()})
	if err != nil {
		return nil, err
	}
	return &creditv1.ReleaseReservationResponse{Released: out.Released, Reservation: shownReservation(out.Reservation)}, nil
}

func (f *fakeCredits) ListTransactions(_ context.Context, in *creditv1.ListTransactionsRequest) (*creditv1.ListTransactionsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := &creditv1.ListTransactionsResponse{}
	for _, tx := range f.log {
		if len(in.GetTypes()) == 0 || in.GetTypes()[0] == tx.GetType() {
			out.Transactions = append(out.Transactions, tx)
		}
	}
	return out, nil
}
