package wallet

import (
	"context"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
)

func reserveCommand(s *session.Session) *cobra.Command {
	req := &creditv1.CreateReservationRequest{}
	var ttl time.Duration
	c := &cobra.Command{
		Use: "reserve AMOUNT", Short: "Hold credit until it is committed or released", Args: session.Exactly("AMOUNT"),
		Example: "  trivet wallet reserve 50 --ttl 10m --description \"web, one hour\"\n  trivet wallet commit $(trivet wallet reserve 50 -o name) --amount 42",
	}
	c.Flags().StringVar(&req.Description, "description", "", "description of the reservation")
	c.Flags().StringVar(&req.ResourceType, "resource-type", "", "type of the resource that it is for")
	c.Flags().StringVar(&req.ReservationId, "id", "", "ID of the reservation, a UUID (default: generated); repeating the command with it creates no second one")
	c.Flags().DurationVar(&ttl, "ttl", 0, "time until it expires (default 5m)")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		if ttl < 0 || ttl%time.Second != 0 {
			return session.Usagef("--ttl %v: want whole seconds", ttl)
		}
		if req.Amount, err = parseAmount(args[0]); err != nil {
			return err
		}
		req.TtlSeconds = int64(ttl / time.Second)
		req.OrgId, req.ProjectId = s.Tenant()
		r, err := creditv1.NewCreditServiceClient(conn).CreateReservation(ctx, req)
		return printReservation(s, r, err)
	})
	return c
}

func commitCommand(s *session.Session) *cobra.Command {
	req := &creditv1.CommitReservationRequest{}
	c := &cobra.Command{
		Use: "commit RESERVATION", Short: "Charge a reservation", Args: session.Exactly("RESERVATION"),
		Long: "Charge the reserved amount, or a smaller --amount, and release the rest. Repeating the command changes nothing.",
	}
	c.Flags().Int64Var(&req.ActualAmount, "amount", 0, "units to charge (default: the reserved amount)")
	c.Flags().StringVar(&req.ResourceId, "resource", "", "ID of the resource that was paid for")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		if req.ActualAmount < 0 {
			return session.Usagef("--amount %d: want 1 or more", req.ActualAmount)
		}
		if err := isID(args[0]); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = s.Tenant()
		req.ReservationId = args[0]
		done, err := creditv1.NewCreditServiceClient(conn).CommitReservation(ctx, req)
		return printReservation(s, done.GetReservation(), err)
	})
	return c
}

func releaseCommand(s *session.Session) *cobra.Command {
	req := &creditv1.ReleaseReservationRequest{}
	c := &cobra.Command{Use: "release RESERVATION", Short: "Release a reservation without a charge", Args: session.Exactly("RESERVATION")}
	c.Flags().StringVar(&req.Reason, "reason", "", "reason of the release")
	session.Many(c)
	c.RunE = s.RunEach(callTimeout, func(ctx context.Context, conn *dial.Conn, id string) error {
		if err := isID(id); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = s.Tenant()
		req.ReservationId = id
		done, err := creditv1.NewCreditServiceClient(conn).ReleaseReservation(ctx, req)
		if err == nil && !done.GetReleased() {
			s.Note("the reservation had expired, which releases it too")
		}
		return printReservation(s, done.GetReservation(), err)
	})
	return c
}

func isID(text string) error {
	if !session.IsID(text) {
		return session.Usagef("RESERVATION %q: want the ID that `trivet wallet reserve` printed", text)
	}
	return nil
}

func printReservation(s *session.Session, r *creditv1.Reservation, err error) error {
	if err != nil {
		return err
	}
	return s.Print(r, []string{r.GetId()}, func(w io.Writer) error {
		expires := show.In(s.Now(), r.GetExpiresAt())
		if s.Form == show.Wide {
			expires = show.When(r.GetExpiresAt())
		}
		header := []string{"ID", "STATUS", "AMOUNT", "CHARGED", "EXPIRES", "DESCRIPTION"}
		row := []string{
			r.GetId(), show.Enum("RESERVATION_STATUS", r.GetStatus()), units(r.GetAmount()), units(r.GetCharged()), expires, r.GetDescription(),
		}
		if s.Form != show.Wide {
			header, row = header[:5], row[:5]
		}
		return show.Rows(w, header, [][]string{row})
	})
}

func transactionsCommand(s *session.Session) *cobra.Command {
	req := &creditv1.ListTransactionsRequest{}
	var types []string
	transactions := &list.Kind[*creditv1.Transaction]{
		Page: func(ctx context.Context, conn *dial.Conn, q list.Query) (_ []*creditv1.Transaction, _ string, err error) {
			if req.Types, err = parseTypes(types); err != nil {
				return nil, "", err
			}
			req.OrgId, req.ProjectId = s.Tenant()
			req.PageSize, req.PageToken = q.Size, q.Token
			page, err := creditv1.NewCreditServiceClient(conn).ListTransactions(ctx, req)
			return page.GetTransactions(), page.GetNextPageToken(), err
		},
		Name:    (*creditv1.Transaction).GetId,
		Columns: transactionColumns,
	}
	c := transactions.Command(s, &cobra.Command{Use: "transactions", Short: "List the transactions of a wallet, oldest first",
		Example: "  trivet wallet transactions --type charge --type refund --resource vm-1"}, callTimeout)
	c.Flags().StringArrayVar(&types, "type", nil, "list only this type, repeatable: "+strings.Join(typeNames(), ", "))
	c.Flags().StringVar(&req.ReservationId, "reservation", "", "list only transactions of this reservation")
	c.Flags().StringVar(&req.ResourceId, "resource", "", "list only transactions for this resource")
	// The error is ignored: RegisterFlagCompletionFunc fails only if the flag does not exist or already has a
	// completion.
	_ = c.RegisterFlagCompletionFunc("type", cobra.FixedCompletions(typeNames(), cobra.ShellCompDirectiveNoFileComp))
	return c
}

func transactionColumns(_ context.Context, s *session.Session, _ *dial.Conn) []list.Column[*creditv1.Transaction] {
	type transaction = *creditv1.Transaction
	return []list.Column[transaction]{
		list.Number("SEQUENCE", transaction.GetSequence),
		list.Age("AGE", s.Now, transaction.GetCreatedAt),
		list.Time("TIME", transaction.GetCreatedAt, list.InWide),
		{Name: "TYPE", Text: func(x transaction) string { return typeName(x.GetType()) }},
		list.Number("AMOUNT", transaction.GetAmount),
		list.Number("BALANCE", transaction.GetBalanceAfter),
		{Name: "USER", Text: transaction.GetCreatedBy, In: list.InWide},
		{Name: "RESERVATION", Text: transaction.GetReservationId, In: list.InWide},
		{Name: "RESOURCE", Text: transaction.GetResourceId, In: list.InWide},
		{Name: "DESCRIPTION", Text: transaction.GetDescription, Max: 27},
	}
}

// parseTypes parses the values of --type.
func parseTypes(names []string) (types []creditv1.TransactionType, err error) {
	for _, name := range names {
		value, ok := creditv1.TransactionType_value[typePrefix+strings.ToUpper(name)]
		if !ok || value == 0 {
			return nil, session.Usagef("--type %q: want one of %s", name, strings.Join(typeNames(), ", "))
		}
		types = append(types, creditv1.TransactionType(value))
	}
	return types, nil
}

const typePrefix = "TRANSACTION_TYPE_"

// typeName returns the name of a transaction type as in the REST API, which is lower case and has no prefix.
func typeName(t creditv1.TransactionType) string {
	return strings.ToLower(strings.TrimPrefix(t.String(), typePrefix))
}

func typeNames() (names []string) {
	for n := int32(1); creditv1.TransactionType_name[n] != ""; n++ {
		names = append(names, typeName(creditv1.TransactionType(n)))
	}
	return names
}
