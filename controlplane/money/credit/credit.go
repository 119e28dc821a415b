// Package credit keeps the projects' wallets: who has how much, what is reserved, and every move of it.
//
// What may happen to a wallet is decided by package ledger, which is pure; here are the records, who is asked (the
// leader), the time, the ids, and the two edges. Commands on one wallet queue on the leader and share a transaction of the
// store: each sees what those before it did, each is refused or done on its own, and they are answered when all are
// agreed on.
//
// Decisions where the design is silent:
//   - CreateWallet requires that the project exists and belongs to the named org. A wallet that an earlier version made
//     without a project stays readable and can be closed.
//   - A call about a project ID uses the wallet of the project that has the ID now, never that of a deleted one; see
//     account.go.
//   - Wallets, transactions and reservations are kept for good.
//   - An answer that says "no", or "that was done before", is given from records that are proven to be the newest, like
//     one that writes.
//   - The same commit, release, suspension and so on is sent to the next leader when the answer of one was lost; a top-up,
//     a charge, a refund and a reservation only under an idempotency key, or under a reservation's id of the caller's.
//   - REST lists the oldest 100 transactions and takes page_token. Of a wallet that is not there a GET is 404, and every
//     other call fails with its operation's own code (the spec's part 4.7).
//   - On REST, commit and release name a reservation of the token's project; whoever acts in every project asks for a
//     token with a project_id first, or uses gRPC, which names it.
//   - What another service of the control plane reserved (package billing, for a VM) is not committed or released by its
//     tenants, though they see it.
//   - credit.v1 is served on its own port, and beside the other services on theirs, where the command line finds it.
//
// Prices, and what machines owe, are package billing's, which gives its orders within its own transactions.
//
// Keys: wallet/<account>, wallet-tx/<account>/<sequence>, wallet-refunded/<account>/<sequence>,
// reservation/<account>/<id>, reservation-due/<deadline>/<account>/<id>; an account is <project> or
// <project>:<incarnation>, and numbers are 16 hexadecimal digits.
package credit

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"unicode"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

var (
	wallets      = store.NewTable[ledger.Wallet]("wallet")
	transactions = store.NewTable[ledger.Transaction]("wallet-tx")
	// refunds are by charge what was refunded of it.
	refunds      = store.NewTable[int64]("wallet-refunded")
	reservations = store.NewTable[ledger.Reservation]("reservation")
	// due has a row for each pending reservation, by its deadline.
	due = store.NewTable[struct{}]("reservation-due")
)

// Limits of texts, in bytes.
const (
	maxDescription  = 1 << 10
	maxResourceType = 63
	maxResourceID   = 255
)

// Options of the service.
type Options struct {
	// Store, Commands and Log are required.
	Store    *store.Store
	Commands *leader.Commands
	Log      *slog.Logger
	// Project looks up projects. Optional: without it every ID counts as an existing project.
	Project Lookup
	// Metrics is where violations of the ledger are counted. Optional.
	Metrics prometheus.Registerer
}

// Service is the credit service of one member.
type Service struct {
	opts  Options
	desks desks
	// violations of the ledger, as this member met them.
	violations prometheus.Counter
}

// New makes the service and registers its commands.
func New(opts Options) *Service {
	s := &Service{opts: opts, desks: desks{open: map[cloud.ProjectID]*desk{}}, violations: violations(opts.Metrics)}
	leader.Register(opts.Commands, s, giveOnceCommand, giveAgainCommand)
	return s
}

// Wallet is a project's wallet. One of another org is not found.
func (s *Service) Wallet(ctx context.Context, t cloud.Tenant) (w *ledger.Wallet, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		w, err = s.walletOf(v, t)
		return err
	})
	return w, err
}

// walletOf reads a tenant's wallet. A caller whose role covers all projects may leave out the org.
func (s *Service) walletOf(r store.Reader, t cloud.Tenant) (*ledger.Wallet, error) {
	p, err := s.lookUp(r, t.Project)
	if err != nil {
		return nil, err
	}
	w, err := wallets.Get(r, accountOf(t.Project, p.Incarnation))
	if err == nil {
		err = isOf(w, t)
	}
	if err != nil {
		return nil, err
	}
	return w, nil
}

// isOf refuses a wallet that is not there for a tenant; nil is none.
func isOf(w *ledger.Wallet, t cloud.Tenant) error {
	if w == nil || t.Org != "" && w.Org != t.Org {
		return ledger.NoWallet()
	}
	return nil
}

// Wallets is a page of all wallets, or of an org's, in order of their projects' ids.
func (s *Service) Wallets(ctx context.Context, org cloud.OrgID, size int32, token string) ([]*ledger.Wallet, string, error) {
	if org != "" {
		if err := cloud.CheckCallerID("org_id", string(org)); err != nil {
			return nil, "", err
		}
	}
	req := store.PageRequest{Size: size, Token: token, Query: "wallets\x00" + string(org)}
	return store.Page(ctx, s.opts.Store, wallets, req, func(w *ledger.Wallet) bool { return org == "" || w.Org == org })
}

// Reservation is one of a tenant's.
func (s *Service) Reservation(ctx context.Context, t cloud.Tenant, id string) (r *ledger.Reservation, err error) {
	if err := cloud.CheckUUID("reservation_id", id); err != nil {
		return nil, err
	}
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		w, err := s.walletOf(v, t)
		if err != nil {
			return err
		}
		if r, err = reservations.Get(v, account(w), id); err == nil && r == nil {
			err = fault.New(fault.NotFound, "no reservation %s", id)
		}
		return err
	})
	return r, err
}

// Reservations is a page of a tenant's reservations, of one status or of all (0), in order of their ids.
func (s *Service) Reservations(ctx context.Context, t cloud.Tenant, status ledger.ReservationStatus, size int32, token string) ([]*ledger.Reservation, string, error) {
	w, err := s.Wallet(ctx, t)
	if err != nil {
		return nil, "", err
	}
	req := store.PageRequest{Size: size, Token: token, Query: "reservations\x00" + status.String()}
	return store.Page(ctx, s.opts.Store, reservations, req,
		func(r *ledger.Reservation) bool { return status == 0 || r.Status == status }, account(w))
}

// number is a number as a part of a key, in whose order it stands.
func number[N uint64 | int64](n N) string { return fmt.Sprintf("%016x", uint64(n)) }

func checkText(field, s string, most int) error {
	if len(s) > most || strings.ToValidUTF8(s, "") != s || strings.ContainsFunc(s, unicode.IsControl) {
		return fault.Invalid(field, "must be at most %d bytes of printable text", most)
	}
	return nil
}
