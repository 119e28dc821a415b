package credit

import (
	"context"
	"crypto/sha256"
	"errors"
	"net/http"
	"net/url"

	"github.com/gorilla/mux"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Routes registers the wallet endpoints of the REST API (part 4.7 of the wire contract).
func (s *Service) Routes(r *rest.Server) {
	const wallets, wallet, reservations = "/api/v1/wallets", "/api/v1/wallets/{project_id}", "/api/v1/reservations"
	found := rest.Returns(http.StatusOK, walletResponse{})
	r.Handle(http.MethodPost, wallets, service+"CreateWallet", s.postWallet, rest.Takes(walletBody{}), rest.Returns(http.StatusCreated, walletResponse{}))
	r.Handle(http.MethodGet, wallet, service+"GetWallet", s.getWallet, found)
	r.Handle(http.MethodPost, wallet+"/topup", service+"TopUpWallet", s.postTopUp, rest.Takes(topUpBody{}), found)
	r.Handle(http.MethodGet, wallet+"/transactions", service+"ListTransactions", s.getTransactions, rest.Query("page_token"), rest.Returns(http.StatusOK, transactionsResponse{}))
	r.Handle(http.MethodPost, reservations, service+"CreateReservation", s.postReservation, rest.Takes(reservationBody{}), rest.Returns(http.StatusCreated, reservationResponse{}))
	r.Handle(http.MethodPost, reservations+"/{id}/commit", service+"CommitReservation", s.postCommit, rest.Takes(commitBody{}), found)
	r.Handle(http.MethodPost, reservations+"/{id}/release", service+"ReleaseReservation", s.postRelease, rest.Takes(releaseBody{}), rest.Returns(http.StatusOK, releaseResponse{}))
	s.rpcRoutes(r)
}

// The bodies and responses of the endpoints.
type (
	walletBody struct {
		// The project that gets the wallet. A project has one wallet.
		ProjectID *string `json:"project_id" api:"required"`
		// The org of the project.
		OrgID *string `json:"org_id" api:"required"`
		// In whole units of credit, 0 or more.
		InitialBalance int64 `json:"initial_balance"`
	}
	topUpBody struct {
		// In whole units of credit, 1 or more.
		Amount *int64 `json:"amount" api:"required"`
		// For people: the description of the transaction, at most 1024 bytes.
		Description string `json:"description"`
	}
	reservationBody struct {
		// The project whose wallet holds the reservation.
		ProjectID *string `json:"project_id" api:"required"`
		// In whole units of credit, 1 or more.
		Amount *int64 `json:"amount" api:"required"`
		// For people, at most 1024 bytes.
		Description string `json:"description"`
		// What the credit is reserved for, such as vm.
		ResourceType string `json:"resource_type"`
		// The reservation expires after so many seconds. 0 means 300; at most 2592000 (30 days).
		TTLSeconds int64 `json:"ttl_seconds"`
	}
	commitBody struct {
		// In whole units of credit, at most what was reserved; the rest is available again. 0 means all that was
		// reserved.
		ActualAmount int64 `json:"actual_amount"`
		// What the credit was spent for.
		ResourceID string `json:"resource_id"`
	}
	releaseBody struct {
		// For people: the description of the transaction, at most 1024 bytes.
		Reason string `json:"reason"`
	}
	releaseResponse struct {
		// The ID of the reservation.
		ReservationID string `json:"reservation_id"`
		// False if the reservation has expired.
		Released bool `json:"released"`
	}
	transactionsResponse struct {
		// At most 100, the oldest first.
		Transactions []transactionResponse `json:"transactions"`
		// Null on the last page.
		Next *string `json:"next_page_token"`
	}
)

// walletResponse, transactionResponse and reservationResponse are JSON objects of part 2.7 of the wire contract.
type walletResponse struct {
	// The project of the wallet.
	ProjectID string `json:"project_id"`
	// The org of the project.
	OrgID string `json:"org_id"`
	// What was deposited and not consumed, in whole units of credit: reserved and available together.
	Balance int64 `json:"balance"`
	// What pending reservations hold.
	Reserved int64 `json:"reserved"`
	// What can be charged or reserved.
	Available int64 `json:"available"`
	// Sum of all top-ups.
	TotalDeposited int64 `json:"total_deposited"`
	// Sum of all charges without what was refunded.
	TotalConsumed int64 `json:"total_consumed"`
	// active, suspended or closed.
	Status string `json:"status"`
}

type transactionResponse struct {
	// The ID of the transaction.
	ID string `json:"id"`
	// The project of the wallet.
	ProjectID string `json:"project_id"`
	// top_up, reservation, charge, release, refund or billing_charge.
	TransactionType string `json:"transaction_type"`
	// In whole units of credit, always positive. transaction_type says whether it increases or decreases the balance.
	Amount int64 `json:"amount"`
	// The wallet's balance after this transaction.
	BalanceAfter int64 `json:"balance_after"`
	// For people.
	Description string `json:"description"`
	// What the credit was spent for. Null if the caller did not say it.
	ResourceID *string `json:"resource_id"`
}

type reservationResponse struct {
	// A lower-case UUID.
	ID string `json:"id"`
	// The project of the wallet.
	ProjectID string `json:"project_id"`
	// What was reserved, in whole units of credit.
	Amount int64 `json:"amount"`
	// pending, committed, released or expired.
	Status string `json:"status"`
	// For people.
	Description string `json:"description"`
}

func walletREST(w *ledger.Wallet) walletResponse {
	return walletResponse{
		ProjectID: string(w.Project), OrgID: string(w.Org), Balance: w.Balance(), Reserved: w.Reserved(), Available: w.Available(),
		TotalDeposited: w.Deposited(), TotalConsumed: w.Consumed(), Status: w.Status.String(),
	}
}

func transactionREST(tx *ledger.Transaction) transactionResponse {
	return transactionResponse{
		ID: tx.ID, ProjectID: string(tx.Project), TransactionType: tx.Type.String(), Amount: tx.Amount, BalanceAfter: tx.BalanceAfter,
		Description: tx.Description, ResourceID: orNull(tx.ResourceID),
	}
}

// orNull returns a pointer to s, or nil if s is empty. JSON encodes nil as null.
func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// operation holds the method for which an endpoint authorizes its callers, and the error code that the endpoint returns
// for failures.
type operation struct {
	method  auth.Method
	failure string
}

var (
	createWallet       = operation{"CreateWallet", "CREATE_FAILED"}
	getWallet          = operation{"GetWallet", "GET_FAILED"}
	topUpWallet        = operation{"TopUpWallet", "TOPUP_FAILED"}
	listTransactions   = operation{"ListTransactions", "LIST_FAILED"}
	createReservation  = operation{"CreateReservation", "RESERVE_FAILED"}
	commitReservation  = operation{"CommitReservation", "COMMIT_FAILED"}
	releaseReservation = operation{"ReleaseReservation", "RELEASE_FAILED"}
)

// enter returns an error if the caller may not call the method in any project. Endpoints call it before they read the
// request body, which names the project if the caller has several.
func (o operation) enter(r *http.Request) error {
	_, err := auth.Admit(r.Context(), service+o.method, "", "")
	if fault.Is(err, fault.InvalidArgument) || auth.Undecided(err) {
		return nil
	}
	return err
}

// at authorizes the call for the wallet of a project, and returns the project and its org. The parameter org may be
// empty.
func (o operation) at(r *http.Request, org, project string) (cloud.Tenant, error) {
	if err := cloud.CheckCallerID("project_id", project); err != nil {
		return cloud.Tenant{}, err
	}
	if org != "" {
		if err := cloud.CheckCallerID("org_id", org); err != nil {
			return cloud.Tenant{}, err
		}
	}
	return auth.Admit(r.Context(), service+o.method, org, project)
}

// atPath authorizes the call for the wallet of the project that is named in the request path, and returns the wallet's
// tenant.
func (o operation) atPath(r *http.Request) (cloud.Tenant, error) {
	if err := o.enter(r); err != nil {
		return cloud.Tenant{}, err
	}
	project, err := url.PathUnescape(mux.Vars(r)["project_id"])
	if err != nil {
		return cloud.Tenant{}, fault.Invalid("project_id", "is not escaped correctly in the path").Because(err)
	}
	return o.at(r, "", project)
}

// failed converts the error of an operation to the error that the endpoint returns (part 7.3 of the wire contract).
// That error has the operation's own error code, the status 500 and the same message. There are two exceptions. A
// reused idempotency key is the caller's mistake and keeps its status. A call that was refused because of load was not
// executed, and keeps status 429, so that clients repeat it later.
func (o operation) failed(w *rest.Response, err error) error {
	w.Failure = o.failure
	f, ok := fault.From(err)
	switch {
	case ok && (f.Reason == "IDEMPOTENCY_KEY_REUSED" || f.Kind == fault.Throttled):
		return err
	case ok:
		internal := *f
		internal.Kind = fault.Internal
		return &internal
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return fault.New(fault.Internal, "the request was not finished in time").MayRetry().Because(err)
	}
	return err
}

// execute checks a request and executes it. An error of the check is returned unchanged. An error of the execution is
// converted with the method failed.
func (o operation) execute(s *Service, w *rest.Response, r *http.Request, raw []byte, request Request) (*Result, error) {
	request.Body = sha256.Sum256(append([]byte(r.URL.EscapedPath()+"\x00"), raw...))
	if err := request.Check(); err != nil {
		return nil, err
	}
	done, err := s.Execute(r.Context(), request)
	if err != nil {
		return nil, o.failed(w, err)
	}
	if done.Replayed {
		w.Header().Set("Idempotency-Replayed", "true")
	}
	return &done, nil
}

func (s *Service) postWallet(w *rest.Response, r *http.Request) (any, error) {
	var in walletBody
	if err := createWallet.enter(r); err != nil {
		return nil, err
	}
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return nil, err
	}
	switch {
	case in.ProjectID == nil:
		return nil, fault.Invalid("project_id", "is required")
	case in.OrgID == nil || *in.OrgID == "":
		return nil, fault.Invalid("org_id", "is required")
	}
	t, err := createWallet.at(r, *in.OrgID, *in.ProjectID)
	if err != nil {
		return nil, err
	}
	done, err := createWallet.execute(s, w, r, raw, Request{Tenant: t, Command: ledger.Command{Op: ledger.DoCreate, Amount: in.InitialBalance}})
	if err != nil {
		return nil, err
	}
	w.Status = http.StatusCreated
	return walletREST(&done.Wallet), nil
}

func (s *Service) getWallet(w *rest.Response, r *http.Request) (any, error) {
	t, err := getWallet.atPath(r)
	if err != nil {
		return nil, err
	}
	found, err := s.Wallet(r.Context(), t)
	if fault.Is(err, fault.NotFound) {
		return nil, err
	}
	if err != nil {
		return nil, getWallet.failed(w, err)
	}
	return walletREST(found), nil
}

func (s *Service) postTopUp(w *rest.Response, r *http.Request) (any, error) {
	t, err := topUpWallet.atPath(r)
	if err != nil {
		return nil, err
	}
	var in topUpBody
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return nil, err
	}
	if in.Amount == nil {
		return nil, fault.Invalid("amount", "is required")
	}
	done, err := topUpWallet.execute(s, w, r, raw, Request{Tenant: t, Command: ledger.Command{
		Op: ledger.DoTopUp, Amount: *in.Amount, Description: in.Description,
	}})
	if err != nil {
		return nil, err
	}
	return walletREST(&done.Wallet), nil
}

func (s *Service) getTransactions(w *rest.Response, r *http.Request) (any, error) {
	t, err := listTransactions.atPath(r)
	if err != nil {
		return nil, err
	}
	token := r.URL.Query().Get("page_token")
	list, next, err := s.Transactions(r.Context(), t, Filter{}, cloud.DefaultPage, token)
	if f, ok := fault.From(err); ok && (f.Kind == fault.NotFound || f.Field == "page_token") {
		return nil, err
	}
	if err != nil {
		return nil, listTransactions.failed(w, err)
	}
	out := transactionsResponse{Transactions: []transactionResponse{}, Next: orNull(next)}
	for _, tx := range list {
		out.Transactions = append(out.Transactions, transactionREST(tx))
	}
	return out, nil
}

func (s *Service) postReservation(w *rest.Response, r *http.Request) (any, error) {
	var in reservationBody
	if err := createReservation.enter(r); err != nil {
		return nil, err
	}
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return nil, err
	}
	switch {
	case in.ProjectID == nil:
		return nil, fault.Invalid("project_id", "is required")
	case in.Amount == nil:
		return nil, fault.Invalid("amount", "is required")
	}
	t, err := createReservation.at(r, "", *in.ProjectID)
	if err != nil {
		return nil, err
	}
	done, err := createReservation.execute(s, w, r, raw, Request{Tenant: t, Command: ledger.Command{
		Op: ledger.DoReserve, Amount: *in.Amount, Description: in.Description, ResourceType: in.ResourceType, TTL: in.TTLSeconds,
	}})
	if err != nil {
		return nil, err
	}
	w.Status = http.StatusCreated
	made := done.Reservation
	return reservationResponse{
		ID: made.ID, ProjectID: string(made.Project), Amount: made.Amount, Status: made.Status.String(), Description: made.Description,
	}, nil
}

func (s *Service) postCommit(w *rest.Response, r *http.Request) (any, error) {
	var in commitBody
	t, raw, err := commitReservation.ofToken(r, &in)
	if err != nil {
		return nil, err
	}
	done, err := commitReservation.execute(s, w, r, raw, Request{Tenant: t, Command: ledger.Command{
		Op: ledger.DoCommit, Reservation: mux.Vars(r)["id"], Amount: in.ActualAmount, ResourceID: in.ResourceID,
	}})
	if err != nil {
		return nil, err
	}
	return walletREST(&done.Wallet), nil
}

func (s *Service) postRelease(w *rest.Response, r *http.Request) (any, error) {
	var in releaseBody
	t, raw, err := releaseReservation.ofToken(r, &in)
	if err != nil {
		return nil, err
	}
	id := mux.Vars(r)["id"]
	done, err := releaseReservation.execute(s, w, r, raw, Request{Tenant: t, Command: ledger.Command{
		Op: ledger.DoRelease, Reservation: id, Description: in.Reason,
	}})
	if err != nil {
		return nil, err
	}
	return releaseResponse{id, done.Released}, nil
}

// ofToken authorizes the call for the project of the caller's token and returns that project as t. It decodes the
// request body into in. The endpoint looks up the reservation in the request path in that project.
func (o operation) ofToken(r *http.Request, in any) (t cloud.Tenant, raw []byte, err error) {
	t, err = auth.Admit(r.Context(), service+o.method, "", "")
	if fault.Is(err, fault.InvalidArgument) {
		err = fault.New(fault.PermissionDenied, "this endpoint acts for one project, and system:admin is not limited to one: ask for a token with org_id and project_id, or send the header Trivet-Project")
	}
	if err != nil {
		return t, nil, err
	}
	raw, err = rest.Decode(r, in)
	return t, raw, err
}
