// Package credit stores the projects' wallets: balances, reservations, and every transaction.
//
// The pure package ledger defines what a command does to a wallet. Package credit adds the records, the forwarding to
// the leader, the time, the IDs, and the gRPC and REST endpoints. Commands on one wallet wait in a queue on the leader
// and are executed together in one store transaction. Each command sees the effects of the earlier ones and succeeds or
// fails separately. The responses are sent after the transaction is committed.
//
// Decisions that the design leaves open:
//   - CreateWallet requires that the project exists and belongs to the named org. A wallet that an earlier version made
//     without a project stays readable and can be closed.
//   - A call for a project ID uses the wallet of the project that has the ID now, never the wallet of a deleted
//     project; see account.go.
//   - Wallets, transactions and reservations are never deleted.
//   - A refusal, or a response to a repeated command, is based on records that are verified to be the newest, like the
//     response to a write.
//   - If the response of a commit, release, suspension or another repeatable command is lost, the command is sent again
//     to the next leader. A top-up, charge or refund is sent again only with an idempotency key. A reservation is sent
//     again only with an idempotency key or a caller-supplied reservation ID.
//   - REST lists the oldest 100 transactions and accepts page_token. If the wallet does not exist, GET returns 404, and
//     every other call fails with its operation's own code (part 4.7 of the wire contract).
//   - On REST, commit and release name a reservation of the token's project. A caller whose role covers all projects
//     first gets a token with a project_id, or uses gRPC, whose request names the project.
//   - Tenants can see, but not commit or release, a reservation that another service of the control plane made (package
//     billing, for a VM).
//   - credit.v1 is served on its own port, and also on the port of the other services, which the command line uses.
//
// Package billing defines the prices and makes the charges for VMs. It changes wallets within its own transactions.
//
// Keys: wallet/<account>, wallet-tx/<account>/<sequence>, wallet-refunded/<account>/<sequence>,
// reservation/<account>/<id>, reservation-due/<deadline>/<account>/<id>. An account is <project> or
// <project>:<incarnation>. Sequences and deadlines are written as 16 hexadecimal digits.
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
	// refunds is a table with the amount of each charge that has been refunded so far. The key is the charge's sequence
	// number.
	refunds      = store.NewTable[int64]("wallet-refunded")
	reservations = store.NewTable[ledger.Reservation]("reservation")
	// due is a table with an empty record for each pending reservation. The records are ordered by deadline.
	due = store.NewTable[struct{}]("reservation-due")
)

// Maximum lengths of texts in a request, in bytes.
const (
	maxDescription  = 1 << 10
	maxResourceType = 63
	maxResourceID   = 255
)

// Options configures New. Project and Metrics may be nil.
type Options struct {
	// Store, Commands and Log are required.
	Store    *store.Store
	Commands *leader.Commands
	Log      *slog.Logger
	// Project looks up projects. If it is nil, every project ID counts as an existing project.
	Project Lookup
	// Metrics, if not nil, registers the counter of ledger violations.
	Metrics prometheus.Registerer
}

// Service implements the credit service on one member.
type Service struct {
	opts     Options
	batchers batchers
	// violations counts the ledger violations (ledger.Violation) that this member has found.
	violations prometheus.Counter
}

// New returns a Service, and registers in opts.Commands the commands that other members forward to the leader.
func New(opts Options) *Service {
	s := &Service{opts: opts, batchers: batchers{open: map[cloud.ProjectID]*walletBatcher{}}, violations: violations(opts.Metrics)}
	leader.Register(opts.Commands, s, executeOnceCommand, executeRepeatableCommand)
	return s
}

// Wallet returns the wallet of the project t.Project. It returns NotFound if the wallet does not exist or belongs to
// another org than t.Org. If t.Org is empty, the org is not checked.
func (s *Service) Wallet(ctx context.Context, t cloud.Tenant) (w *ledger.Wallet, err error) {
	err = s.opts.Store.View(ctx, func(v *store.View) error {
		w, err = s.walletOf(v, t)
		return err
	})
	return w, err
}

// walletOf returns the same wallet as the method Wallet. The records are read from r, a transaction or a view.
func (s *Service) walletOf(r store.Reader, t cloud.Tenant) (*ledger.Wallet, error) {
	p, err := s.lookUp(r, t.Project)
	if err != nil {
		return nil, err
	}
	w, err := wallets.Get(r, accountOf(t.Project, p.Incarnation))
	if err == nil {
		err = checkOwner(w, t)
	}
	if err != nil {
		return nil, err
	}
	return w, nil
}

// checkOwner returns NotFound if w is nil or belongs to another org than t.Org. If t.Org is empty, the org is not
// checked.
func checkOwner(w *ledger.Wallet, t cloud.Tenant) error {
	if w == nil || t.Org != "" && w.Org != t.Org {
		return ledger.NoWallet()
	}
	return nil
}

// Wallets returns a page of the wallets of an org, or of all orgs if org is empty, and the token of the next page.
// Wallets are sorted by project ID.
func (s *Service) Wallets(ctx context.Context, org cloud.OrgID, size int32, token string) ([]*ledger.Wallet, string, error) {
	if org != "" {
		if err := cloud.CheckCallerID("org_id", string(org)); err != nil {
			return nil, "", err
		}
	}
	req := store.PageRequest{Size: size, Token: token, Query: "wallets\x00" + string(org)}
	return store.Page(ctx, s.opts.Store, wallets, req, func(w *ledger.Wallet) bool { return org == "" || w.Org == org })
}

// Reservation returns the reservation with this ID in the wallet of t. It returns NotFound if the wallet or the
// reservation does not exist.
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

// Reservations returns a page of the reservations of the wallet of t, sorted by ID, and the token of the next page. If
// status is not 0, it returns only reservations with that status.
func (s *Service) Reservations(ctx context.Context, t cloud.Tenant, status ledger.ReservationStatus, size int32, token string) ([]*ledger.Reservation, string, error) {
	w, err := s.Wallet(ctx, t)
	if err != nil {
		return nil, "", err
	}
	req := store.PageRequest{Size: size, Token: token, Query: "reservations\x00" + status.String()}
	return store.Page(ctx, s.opts.Store, reservations, req,
		func(r *ledger.Reservation) bool { return status == 0 || r.Status == status }, account(w))
}

// number encodes n as 16 hexadecimal digits, so that keys that contain it sort numerically.
func number[N uint64 | int64](n N) string { return fmt.Sprintf("%016x", uint64(n)) }

func checkText(field, s string, most int) error {
	if len(s) > most || strings.ToValidUTF8(s, "") != s || strings.ContainsFunc(s, unicode.IsControl) {
		return fault.Invalid(field, "must be at most %d bytes of printable text", most)
	}
	return nil
}
