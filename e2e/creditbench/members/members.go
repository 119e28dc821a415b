// Package members runs Trivet as a ledger that creditbench measures: one or three members, called over gRPC.
//
// Calls are made as the administrator, who has access to every project. With three members, callers are distributed
// among them in rotation, so two of three calls are forwarded to the leader.
package members

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/e2e/creditbench/books"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/e2e/usage"
	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
)

const (
	// connections is the number of gRPC connections to each member, which the callers share.
	connections = 4
	// fillers is the number of wallets that Fill creates concurrently.
	fillers = 64
	org     = "bench"
)

// Bank is a ledger that creditbench measures: a cluster of running members, with connections to all of them.
type Bank struct {
	trio  *lab.Trio
	conns []*lab.GRPC
	asks  []creditv1.CreditServiceClient // one client per connection
}

// Start starts n members (1 or 3) with their files beneath dir and the programs in bin, and waits until they serve.
// extra holds additional flags for every member. If Start returns an error, it has stopped all members.
func Start(ctx context.Context, dir, bin string, n int, extra ...string) (_ *Bank, err error) {
	b := &Bank{trio: lab.NewTrio(lab.Dir(dir), lab.In(bin))}
	b.trio.Extra = slices.Concat(lab.Unlimited, extra)
	maps.DeleteFunc(b.trio.Members, func(id int, _ string) bool { return id > n })
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	if err := b.trio.Prepare(); err != nil {
		return nil, err
	}
	// The members run under an unprivileged uid, which must be able to open files beneath dir.
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	if err := b.trio.StartAll(); err != nil {
		return nil, err
	}
	if err := b.trio.Ready(ctx); err != nil {
		return nil, err
	}
	var token string
	if err := lab.Until(ctx, "there is an administrator", func(context.Context) (err error) {
		token, err = b.trio.AdminToken()
		return err
	}); err != nil {
		return nil, err
	}
	for range connections {
		for _, id := range b.ids() {
			c, err := lab.Dial(b.trio.Members[id], token)
			if err != nil {
				return nil, err
			}
			b.conns = append(b.conns, c)
			b.asks = append(b.asks, creditv1.NewCreditServiceClient(c.Conn()))
		}
	}
	return b, nil
}

func (b *Bank) ids() []int { return slices.Sorted(maps.Keys(b.trio.Members)) }

// Connect does nothing, because callers share the connections that Start made.
func (b *Bank) Connect(context.Context, int) error { return nil }

// Fill creates a project for each name in wallets, and in it a wallet with a first balance of deposit.
func (b *Bank) Fill(ctx context.Context, wallets []string, deposit int64) error {
	if err := b.conns[0].EnsureProject(ctx, org, ""); err != nil {
		return fmt.Errorf("make org: %w", err)
	}
	projects := uint64(len(wallets))
	if _, err := b.conns[0].Identity.SetQuota(ctx, &identityv1.SetQuotaRequest{OrgId: org, Quota: &identityv1.Quota{Projects: &projects}}); err != nil {
		return fmt.Errorf("allow %d projects: %w", projects, err)
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(fillers)
	for i, w := range wallets {
		g.Go(func() error {
			_, err := b.conns[i%len(b.conns)].Identity.CreateProject(ctx, &identityv1.CreateProjectRequest{Id: w, OrgId: org})
			if err != nil {
				return fmt.Errorf("make project %s: %w", w, err)
			}
			_, err = b.ask(i).CreateWallet(ctx, &creditv1.CreateWalletRequest{OrgId: org, ProjectId: w, InitialBalance: deposit})
			if err != nil {
				return fmt.Errorf("make wallet %s: %w", w, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (b *Bank) ask(caller int) creditv1.CreditServiceClient { return b.asks[caller%len(b.asks)] }

// Pair reserves an amount in the wallet of a project and commits the complete reservation.
func (b *Bank) Pair(ctx context.Context, caller int, wallet string, amount int64) error {
	ask := b.ask(caller)
	r, err := ask.CreateReservation(ctx, &creditv1.CreateReservationRequest{
		ProjectId: wallet, Amount: amount, Description: "a machine for an hour", ResourceType: "vm",
	})
	if err != nil {
		return fmt.Errorf("reserve: %w", err)
	}
	if _, err := ask.CommitReservation(ctx, &creditv1.CommitReservationRequest{ProjectId: wallet, ReservationId: r.GetId(), ResourceId: "vm-1"}); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	return nil
}

// Books returns the sums over all wallets. First it calls AuditLedger, with which the control plane recomputes each
// wallet from its journal. It returns an error if that finds a problem in a wallet.
func (b *Bank) Books(ctx context.Context) (sum books.Books, err error) {
	audit, err := b.ask(0).AuditLedger(ctx, &creditv1.AuditLedgerRequest{})
	if err != nil {
		return sum, err
	}
	for {
		found, err := audit.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return sum, fmt.Errorf("audit: %w", err)
		}
		if found.GetProblem() != "" {
			return sum, fmt.Errorf("audit: wallet %s: %s", found.GetProjectId(), found.GetProblem())
		}
		sum.Wallets++
		sum.Transactions += int64(found.GetTransactions())
		sum.Reservations += int64(found.GetReservations())
	}
	for token := ""; ; {
		page, err := b.ask(0).ListWallets(ctx, &creditv1.ListWalletsRequest{PageSize: 1000, PageToken: token})
		if err != nil {
			return sum, fmt.Errorf("list wallets: %w", err)
		}
		for _, w := range page.GetWallets() {
			sum.Deposited += w.GetTotalDeposited()
			sum.Consumed += w.GetTotalConsumed()
			sum.Reserved += w.GetReserved()
			sum.Balance += w.GetBalance()
		}
		if token = page.GetNextPageToken(); token == "" {
			return sum, nil
		}
	}
}

// PIDs returns the pids of all members. It returns an error if a member has stopped.
func (b *Bank) PIDs() (pids []int, err error) {
	for _, id := range b.ids() {
		pid := b.trio.Dir.Running(b.trio.Name(id))
		if pid == 0 {
			return nil, fmt.Errorf("member %d has stopped", id)
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// Usage returns the sum of the CPU time and bytes written of all members.
func (b *Bank) Usage() (usage.Sample, error) {
	pids, err := b.PIDs()
	if err != nil {
		return usage.Sample{}, err
	}
	return usage.Of(pids...)
}

// Close closes the connections and kills the members, whose data is not needed any more.
func (b *Bank) Close() error {
	var errs []error
	for _, c := range b.conns {
		errs = append(errs, c.Close())
	}
	for _, id := range b.ids() {
		if b.trio.Dir.Running(b.trio.Name(id)) != 0 {
			errs = append(errs, b.trio.Dir.Kill(b.trio.Name(id)))
		}
	}
	return errors.Join(errs...)
}
