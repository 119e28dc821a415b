package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// creditPort is the port of the credit REST API.
const creditPort = 8086

// credit calls a member's credit REST API and returns the data of the response, which must have the given status.
func (w *world) credit(ctx context.Context, member int, token string, status int, method, path string, body any) map[string]any {
	w.t.Helper()
	a, err := w.rest(member, token).Do(ctx, creditPort, method, path, body)
	require.NoError(w.t, err)
	require.Equal(w.t, status, a.Status, "%s %s at member %d: %s", method, path, member, a.Raw)
	var data map[string]any
	if a.Data != nil {
		require.NoError(w.t, json.Unmarshal(a.Data, &data))
	}
	return data
}

// payer is a client of the credit REST API that repeats each request with the same idempotency key until it succeeds.
type payer struct {
	w     *world
	token string
	at    int
}

// post sends a POST request until it succeeds, to the next member after each failure, and returns the data of the
// response.
func (p *payer) post(ctx context.Context, path, key string, body any) (data map[string]any, err error) {
	err = lab.Until(ctx, key+" is acknowledged", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		a, err := p.w.rest(p.at, p.token).Do(ctx, creditPort, http.MethodPost, path, body, "Idempotency-Key", key)
		if err == nil && a.Status < 300 {
			return json.Unmarshal(a.Data, &data)
		}
		p.at = p.at%3 + 1
		if err != nil {
			return err
		}
		return fmt.Errorf("%d %s", a.Status, a.Error.Message)
	})
	return data, err
}

// TestCreditOutlivesItsLeader kills the leader twice while clients reserve and commit. It checks that every
// acknowledged commit is charged exactly once, that the ledger's sums are right, and that each reservation without a
// commit expires exactly once.
func TestCreditOutlivesItsLeader(t *testing.T) {
	w := newWorld(t, func(w *world) { w.trio.Extra = lab.Unlimited })
	ctx := w.context(4 * time.Minute)
	const clients, pairs, lost = 8, 150, 25
	token := w.tenant("ada", "acme", "shop", "project:member")
	w.credit(ctx, 2, w.adminToken, 201, http.MethodPost, "/api/v1/wallets", map[string]any{"project_id": "shop", "org_id": "acme", "initial_balance": 1_000_000})
	for n := range lost {
		w.credit(ctx, n%3+1, token, 201, http.MethodPost, "/api/v1/reservations", map[string]any{"project_id": "shop", "amount": 100, "ttl_seconds": 1 + n%8})
	}

	began := time.Now()
	var mu sync.Mutex
	committed := map[string]bool{}
	var done atomic.Int64
	var work sync.WaitGroup
	failures := make(chan error, clients)
	for c := range clients {
		work.Go(func() {
			p := &payer{w: w, token: token, at: c%3 + 1}
			for n := range pairs {
				made, err := p.post(ctx, "/api/v1/reservations", fmt.Sprintf("reserve-%d-%d", c, n), map[string]any{"project_id": "shop", "amount": 10})
				if err != nil {
					failures <- err
					return
				}
				id := made["id"].(string)
				if _, err := p.post(ctx, "/api/v1/reservations/"+id+"/commit", fmt.Sprintf("commit-%d-%d", c, n), map[string]any{"actual_amount": 7}); err != nil {
					failures <- err
					return
				}
				mu.Lock()
				committed[id] = true
				mu.Unlock()
				done.Add(1)
			}
		})
	}
	reached := func(n int64) {
		require.NoError(t, lab.Until(ctx, fmt.Sprintf("%d pairs are done", n), func(context.Context) error {
			if got := done.Load(); got < n && len(failures) == 0 {
				return fmt.Errorf("%d pairs are done", got)
			}
			return nil
		}))
	}
	for kill := range int64(2) {
		reached((kill + 1) * clients * pairs / 4)
		via := 0
		for id := range w.trio.Members {
			if w.dir.Running(w.trio.Name(id)) != 0 {
				via = id
			}
		}
		leader := w.leader(via)
		require.NoError(t, w.dir.Kill(w.trio.Name(leader)))
		t.Logf("member %d is killed after %d pairs, %.1f s", leader, done.Load(), time.Since(began).Seconds())
		reached((kill+1)*clients*pairs/4 + clients*pairs/8)
		require.NoError(t, w.trio.Start(leader))
		w.ready()
	}
	work.Wait()
	t.Logf("all %d pairs are done, %.1f s", done.Load(), time.Since(began).Seconds())
	close(failures)
	for err := range failures {
		require.NoError(t, err)
	}

	require.NoError(t, lab.Until(ctx, "all reservations without a commit have expired", func(ctx context.Context) error {
		if held := w.credit(ctx, 1, token, 200, http.MethodGet, "/api/v1/wallets/shop", nil)["reserved"].(float64); held != 0 {
			return fmt.Errorf("%v is reserved", held)
		}
		return nil
	}))
	for member := range w.trio.Members {
		wallet := w.credit(ctx, member, token, 200, http.MethodGet, "/api/v1/wallets/shop", nil)
		require.EqualValues(t, clients*pairs*7, wallet["total_consumed"], "member %d", member)
		require.EqualValues(t, 1_000_000-clients*pairs*7, wallet["available"], "member %d", member)
	}
	w.books(ctx, committed, lost)

	w.badOrders(ctx, token)
}

// badOrders sends invalid credit requests, and checks that each is refused with the right status, error code and
// message, and that the wallet does not change.
func (w *world) badOrders(ctx context.Context, token string) {
	before := w.credit(ctx, 3, token, 200, http.MethodGet, "/api/v1/wallets/shop", nil)
	unproven, err := w.rest(3, "").IssueToken(ctx, "ada", "wrong", nil)
	require.NoError(w.t, err)
	const nowhere = "00000000-0000-7000-8000-0000000000ff"
	for _, c := range []struct {
		name, method, path, body, token string
		status                          int
		code, says                      string
	}{
		{"a top-up by a tenant", "POST", "/api/v1/wallets/shop/topup", `{"amount":1}`, token, 403, "FORBIDDEN", "billing:admin"},
		{"another project's wallet", "GET", "/api/v1/wallets/other", "", token, 403, "FORBIDDEN", "no project other"},
		{"the token of a login with a wrong password", "GET", "/api/v1/wallets/shop", "", unproven, 403, "FORBIDDEN", "is unauthenticated"},
		{"no token", "GET", "/api/v1/wallets/shop", "", "", 401, "UNAUTHENTICATED", "Bearer"},
		{"a malformed token", "GET", "/api/v1/wallets/shop", "", "garbage", 401, "UNAUTHENTICATED", "not valid"},
		{"no wallet", "GET", "/api/v1/wallets/other", "", w.adminToken, 404, "NOT_FOUND", "Wallet not found"},
		{"a project that has a wallet", "POST", "/api/v1/wallets", `{"project_id":"shop","org_id":"acme"}`, w.adminToken, 500, "CREATE_FAILED", "has a wallet"},
		{"a wallet in another org", "POST", "/api/v1/wallets", `{"project_id":"default","org_id":"acme"}`, w.adminToken, 500, "CREATE_FAILED", "another org"},
		{"a wallet for an unknown project", "POST", "/api/v1/wallets", `{"project_id":"nope","org_id":"acme"}`, w.adminToken, 500, "CREATE_FAILED", "no project nope"},
		{"an id that is a path", "GET", "/api/v1/wallets/..%2fetc", "", token, 400, "INVALID_ARGUMENT", "project_id"},
		{"broken JSON", "POST", "/api/v1/reservations", `{"project_id":`, token, 400, "INVALID_ARGUMENT", "not JSON"},
		{"10 MiB", "POST", "/api/v1/reservations", `{"description":"` + strings.Repeat("x", 10<<20) + `"}`, token, 413, "INVALID_ARGUMENT", "1048576"},
		{"more than is available", "POST", "/api/v1/reservations", `{"project_id":"shop","amount":9223372036854775807}`, token, 500, "RESERVE_FAILED", "is available"},
		{"a negative amount", "POST", "/api/v1/reservations", `{"project_id":"shop","amount":-1}`, token, 500, "RESERVE_FAILED", "amount"},
		{"commit of an unknown reservation", "POST", "/api/v1/reservations/" + nowhere + "/commit", `{}`, token, 500, "COMMIT_FAILED", nowhere},
		{"release of an unknown reservation", "POST", "/api/v1/reservations/" + nowhere + "/release", `{}`, token, 500, "RELEASE_FAILED", nowhere},
		{"admin without a project", "POST", "/api/v1/reservations/" + nowhere + "/release", `{}`, w.adminToken, 403, "FORBIDDEN", "project_id"},
		{"unknown path", "GET", "/api/v1/credits", "", token, 404, "NOT_FOUND", "/api/v1/credits"},
		{"unknown method", "DELETE", "/api/v1/wallets/shop", "", token, 405, "INVALID_ARGUMENT", "DELETE"},
	} {
		w.t.Run(c.name, func(t *testing.T) {
			var content any
			if c.body != "" {
				content = c.body
			}
			a, err := w.rest(3, c.token).Do(ctx, creditPort, c.method, c.path, content)
			require.NoError(t, err)
			require.Equal(t, c.status, a.Status, a.Raw)
			require.Equal(t, c.code, a.Error.Code)
			require.Contains(t, a.Error.Message, c.says)
		})
	}
	require.Equal(w.t, before, w.credit(ctx, 1, token, 200, http.MethodGet, "/api/v1/wallets/shop", nil), "the invalid requests must not change the wallet")
}

// books checks, over credit's own gRPC port, that the wallet has one charge for each committed reservation and the
// given number of expiries, and that AuditLedger finds no problem.
func (w *world) books(ctx context.Context, committed map[string]bool, expired int) {
	t := w.t
	conn, err := grpc.NewClient("passthrough:///127.0.0.2:50057", grpc.WithTransportCredentials(insecure.NewCredentials()))
	require.NoError(t, err)
	defer conn.Close()
	client := creditv1.NewCreditServiceClient(conn)
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+w.adminToken)
	charges := map[string]int{}
	swept := 0
	for token := ""; ; {
		page, err := client.ListTransactions(ctx, &creditv1.ListTransactionsRequest{ProjectId: "shop", PageSize: 1000, PageToken: token})
		require.NoError(t, err)
		for _, tx := range page.GetTransactions() {
			switch {
			case tx.GetType() == creditv1.TransactionType_TRANSACTION_TYPE_CHARGE:
				charges[tx.GetReservationId()]++
				require.EqualValues(t, 7, tx.GetAmount())
			case tx.GetCreatedBy() == "system:expiry":
				swept++
			}
		}
		if token = page.GetNextPageToken(); token == "" {
			break
		}
	}
	require.Len(t, charges, len(committed), "the number of charges must be that of the acknowledged commits")
	for id, n := range charges {
		require.True(t, committed[id] && n == 1, "%s is charged %d times", id, n)
	}
	require.Equal(t, expired, swept, "each reservation without a commit must expire once")

	audit, err := client.AuditLedger(ctx, &creditv1.AuditLedgerRequest{})
	require.NoError(t, err)
	wallets := 0
	for {
		found, err := audit.Recv()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		require.Empty(t, found.GetProblem())
		require.EqualValues(t, len(committed)+expired, found.GetReservations())
		wallets++
	}
	require.Equal(t, 1, wallets)

	home := t.TempDir()
	out, errs, code := w.trivet(ctx, home, "wallet", "show", "--project", "shop", "-o", "wide", "--token", w.adminToken, "--endpoint", "127.0.0.3:50051")
	require.Zero(t, code, errs)
	require.Contains(t, out, "acme/shop")
	require.True(t, strings.Contains(out, fmt.Sprint(len(committed)*7)), out)
}
