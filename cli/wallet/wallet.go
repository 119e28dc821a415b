// Package wallet holds the commands for the credit of projects: `trivet wallet`. Each project has one wallet, so --org
// and --project select the wallet. Amounts are whole units of credit.
package wallet

import (
	"context"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
)

// callTimeout is the deadline of each command unless --timeout is given.
const callTimeout = 30 * time.Second

// Command returns the command `trivet wallet`.
func Command(s *session.Session) *cobra.Command {
	c := &cobra.Command{
		Use: "wallet", Short: "Show, fill and use a project's credit", Args: cobra.NoArgs,
		Long: `Show, fill and use a project's credit. The project is that of --project, or else the token's. Creating, filling,
refunding, suspending and closing require the role billing:admin; reserving, committing and releasing require a role
in the project.`,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.AddCommand(createCommand(s), showCommand(s), listCommand(s), topUpCommand(s), refundCommand(s), transactionsCommand(s), reserveCommand(s), commitCommand(s), releaseCommand(s))
	for _, b := range statusChanges {
		c.AddCommand(b.command(s))
	}
	return c
}

func createCommand(s *session.Session) *cobra.Command {
	var balance int64
	c := &cobra.Command{Use: "create", Short: "Create a project's wallet", Args: session.Exactly(),
		Long:    "Create the wallet of an existing project.",
		Example: "  trivet wallet create --org acme --project web --balance 1000"}
	c.Flags().Int64Var(&balance, "balance", 0, "initial balance in units")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		org, project := s.Tenant()
		w, err := creditv1.NewCreditServiceClient(conn).CreateWallet(ctx,
			&creditv1.CreateWalletRequest{OrgId: org, ProjectId: project, InitialBalance: balance})
		return printWallet(ctx, s, w, err)
	})
	return c
}

func showCommand(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: "show", Short: "Show a project's wallet", Args: session.Exactly()}
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		org, project := s.Tenant()
		w, err := creditv1.NewCreditServiceClient(conn).GetWallet(ctx, &creditv1.GetWalletRequest{OrgId: org, ProjectId: project})
		return printWallet(ctx, s, w, err)
	})
	return c
}

func listCommand(s *session.Session) *cobra.Command {
	return wallets(s).Command(s, &cobra.Command{
		Use: "list", Short: "List all wallets",
		Long: `List all wallets, or with --org the wallets of that org. The list includes the closed wallets of deleted projects,
whose IDs may be in use again. Requires the role billing:admin.`,
	}, callTimeout)
}

func wallets(s *session.Session) *list.Kind[*creditv1.Wallet] {
	return &list.Kind[*creditv1.Wallet]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) ([]*creditv1.Wallet, string, error) {
			org, _ := s.Named()
			page, err := creditv1.NewCreditServiceClient(conn).ListWallets(ctx,
				&creditv1.ListWalletsRequest{OrgId: org, PageSize: q.Size, PageToken: q.Token})
			return page.GetWallets(), page.GetNextPageToken(), err
		},
		Name: (*creditv1.Wallet).GetProjectId,
		Columns: func(context.Context, *session.Session, *dial.Conn) []list.Column[*creditv1.Wallet] {
			type wallet = *creditv1.Wallet
			inWide := func(name string, amount func(wallet) int64) list.Column[wallet] {
				c := list.Number(name, amount)
				c.In = list.InWide
				return c
			}
			return []list.Column[wallet]{
				{Name: "PROJECT", Text: func(w wallet) string { return w.GetOrgId() + "/" + w.GetProjectId() }},
				{Name: "STATUS", Text: func(w wallet) string { return show.Enum("WALLET_STATUS", w.GetStatus()) }},
				list.Number("BALANCE", wallet.GetBalance),
				list.Number("RESERVED", wallet.GetReserved),
				list.Number("AVAILABLE", wallet.GetAvailable),
				inWide("DEPOSITED", wallet.GetTotalDeposited),
				inWide("CONSUMED", wallet.GetTotalConsumed),
				list.Time("CREATED", wallet.GetCreatedAt, list.InWide),
			}
		},
	}
}

func topUpCommand(s *session.Session) *cobra.Command {
	var description string
	c := &cobra.Command{Use: "topup AMOUNT", Short: "Add credit to a wallet", Args: session.Exactly("AMOUNT"),
		SuggestFor: []string{"add", "credit", "deposit", "fill"}}
	c.Flags().StringVar(&description, "description", "", "description of the transaction")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		n, err := parseAmount(args[0])
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		done, err := creditv1.NewCreditServiceClient(conn).TopUpWallet(ctx,
			&creditv1.TopUpWalletRequest{OrgId: org, ProjectId: project, Amount: n, Description: description})
		return printWallet(ctx, s, done.GetWallet(), err)
	})
	return c
}

func refundCommand(s *session.Session) *cobra.Command {
	var description string
	c := &cobra.Command{
		Use: "refund SEQUENCE AMOUNT", Short: "Refund a charge or a part of it", Args: session.Exactly("SEQUENCE", "AMOUNT"),
		Long: "Refund a charge or a part of it. SEQUENCE is its number in `trivet wallet transactions`.",
	}
	c.Flags().StringVar(&description, "description", "", "description of the transaction")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		charge, err := strconv.ParseUint(args[0], 10, 64)
		if err != nil || charge == 0 {
			return session.Usagef("SEQUENCE %q: want the number of a transaction", args[0])
		}
		n, err := parseAmount(args[1])
		if err != nil {
			return err
		}
		org, project := s.Tenant()
		done, err := creditv1.NewCreditServiceClient(conn).RefundCharge(ctx, &creditv1.RefundChargeRequest{
			OrgId: org, ProjectId: project, ChargeSequence: charge, Amount: n, Description: description,
		})
		return printWallet(ctx, s, done.GetWallet(), err)
	})
	return c
}

// statusChange describes a command that changes a wallet's status and nothing else, such as suspend. The function do
// makes the API call.
type statusChange struct {
	verb, short string
	do          func(ctx context.Context, c creditv1.CreditServiceClient, org, project string) (*creditv1.Wallet, error)
}

var statusChanges = []statusChange{
	{"suspend", "Stop a project from reserving credit", func(ctx context.Context, c creditv1.CreditServiceClient, org, project string) (*creditv1.Wallet, error) {
		return c.SuspendWallet(ctx, &creditv1.SuspendWalletRequest{OrgId: org, ProjectId: project})
	}},
	{"resume", "Allow a project to reserve credit again", func(ctx context.Context, c creditv1.CreditServiceClient, org, project string) (*creditv1.Wallet, error) {
		return c.ResumeWallet(ctx, &creditv1.ResumeWalletRequest{OrgId: org, ProjectId: project})
	}},
	{"close", "Make a wallet read-only permanently", func(ctx context.Context, c creditv1.CreditServiceClient, org, project string) (*creditv1.Wallet, error) {
		return c.CloseWallet(ctx, &creditv1.CloseWalletRequest{OrgId: org, ProjectId: project})
	}},
}

func (b statusChange) command(s *session.Session) *cobra.Command {
	c := &cobra.Command{Use: b.verb, Short: b.short, Args: session.Exactly()}
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, _ []string) error {
		org, project := s.Tenant()
		w, err := b.do(ctx, creditv1.NewCreditServiceClient(conn), org, project)
		return printWallet(ctx, s, w, err)
	})
	return c
}

// parseAmount parses an amount of credit. It returns a *Usage error unless the amount is a whole number above 0.
func parseAmount(text string) (int64, error) {
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n <= 0 {
		return 0, session.Usagef("AMOUNT %q: want a whole number of units, 1 or more", text)
	}
	return n, nil
}

func printWallet(ctx context.Context, s *session.Session, w *creditv1.Wallet, err error) error {
	if err != nil {
		return err
	}
	return wallets(s).PrintOne(ctx, s, nil, w)
}

func units(n int64) string { return strconv.FormatInt(n, 10) }
