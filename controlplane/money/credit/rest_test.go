package credit

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest/resttest"
	"github.com/trivet-cloud/trivet/controlplane/money/credit/ledger"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// people returns the callers of the scripts: ada is a member and vic a viewer of project web; eve belongs to another
// org; bill is a billing administrator, and so is bob with a token for web only; admin is a system administrator
// without a project, and admin-web one with a token for web; two is a member of two projects; none has no role;
// unproven is an administrator without proof of identity.
func people() resttest.Callers {
	billing, admin := cloud.Binding{Role: cloud.BillingAdmin}, cloud.Binding{Role: cloud.SystemAdmin}
	unproven := resttest.Bound("ada", cloud.Tenant{}, admin)
	unproven.Proof = cloud.ProofNone
	unscoped := cloud.Tenant{}
	member, foreign := resttest.Role(cloud.ProjectMember, tenant), resttest.Role(cloud.ProjectMember, other)
	return resttest.Callers{
		"ada":       resttest.Bound("ada", unscoped, member),
		"vic":       resttest.Bound("vic", unscoped, resttest.Role(cloud.ProjectViewer, tenant)),
		"eve":       resttest.Bound("eve", unscoped, resttest.Role(cloud.ProjectAdmin, other)),
		"bill":      resttest.Bound("bill", unscoped, billing),
		"bob":       resttest.Bound("bob", tenant, billing),
		"admin":     resttest.Bound("admin", unscoped, admin),
		"admin-web": resttest.Bound("admin", tenant, admin),
		"two":       resttest.Bound("two", unscoped, member, foreign),
		"none":      resttest.Bound("none", unscoped),
		"unproven":  unproven,
	}
}

func (w *world) rest() *rest.Server {
	r := resttest.NewServer(fault.Credit, "credit", people())
	w.credits.Routes(r)
	return r
}

var uuids = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[47][0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`)

// TestREST runs scripts against the REST API of wallets (part 4.7 of the wire contract). `get|post PATH [as=TOKEN]
// [key=IDEMPOTENCY-KEY] [type=CONTENT-TYPE] [page_token=TOKEN]` makes a call as ada, or as another caller, with the
// lines below it as the body, and prints the response. <r1>, <r2> … stand for the IDs of the reservations in the order
// of their creation. `wait seconds=` advances the clock. `sweep` calls Sweep. `fill n=` makes n top-ups of 1. `status
// to=` suspends, resumes or closes the wallet. `quorum away=` makes the quorum unreachable or reachable.
func TestREST(t *testing.T) {
	datadriven.Walk(t, "testdata/rest", func(t *testing.T, path string) {
		w := newWorld(t)
		handler := openapitest.Handler(t, w.rest())
		var made []string
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			w.t = t
			arg := func(key string) (value string) { d.MaybeScanArgs(t, key, &value); return value }
			switch d.Cmd {
			case "wait":
				var seconds int64
				d.ScanArgs(t, "seconds", &seconds)
				w.clock.Advance(time.Duration(seconds) * time.Second)
				return ""
			case "sweep":
				require.NoError(t, w.credits.Sweep(t.Context()))
				return ""
			case "fill":
				var n int
				d.ScanArgs(t, "n", &n)
				for range n {
					w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 1})
				}
				return ""
			case "status":
				ops := map[string]ledger.Op{"suspended": ledger.DoSuspend, "active": ledger.DoResume, "closed": ledger.DoClose}
				w.must(ledger.Command{Op: ops[arg("to")]})
				return ""
			case "quorum":
				w.quorum.Away.Store(arg("away") == "true")
				return ""
			}
			expand := func(s string) string {
				for i, id := range made {
					s = strings.ReplaceAll(s, fmt.Sprintf("<r%d>", i+1), id)
				}
				return s
			}
			var a *httptest.ResponseRecorder
			target := expand(d.CmdArgs[0].Key)
			if token := arg("page_token"); token != "" {
				target += "?page_token=" + token
			}
			q := httptest.NewRequest(strings.ToUpper(d.Cmd), "http://127.0.0.1:8086"+target, strings.NewReader(expand(d.Input)))
			for header, value := range map[string]string{"Idempotency-Key": arg("key"), "Content-Type": arg("type")} {
				if value != "" {
					q.Header.Set(header, value)
				}
			}
			if as := arg("as"); as != "nobody" {
				q.Header.Set("Authorization", "Bearer "+map[bool]string{true: "ada", false: as}[as == ""])
			}
			a = httptest.NewRecorder()
			handler.ServeHTTP(a, q)
			return w.formatResponse(a, &made)
		})
	})
}

// formatResponse checks the common fields of a response, and returns the response without values that differ between
// runs.
func (w *world) formatResponse(a *httptest.ResponseRecorder, made *[]string) string {
	var out map[string]any
	require.NoError(w.t, json.Unmarshal(a.Body.Bytes(), &out), a.Body)
	meta := out["meta"].(map[string]any)
	require.Len(w.t, meta, 2)
	id, err := uuid.Parse(meta["request_id"].(string))
	require.NoError(w.t, err)
	require.EqualValues(w.t, 4, id.Version())
	_, err = time.Parse(time.RFC3339, meta["timestamp"].(string))
	require.NoError(w.t, err)
	delete(out, "meta")
	data, _ := out["data"].(map[string]any)
	if id, ok := data["id"].(string); ok && a.Code == 201 && (len(*made) == 0 || (*made)[len(*made)-1] != id) {
		*made = append(*made, id)
	}
	if list, ok := data["transactions"].([]any); ok && len(list) > 20 {
		data["transactions"] = fmt.Sprintf("%d of them", len(list))
	}
	if next, ok := data["next_page_token"].(string); ok {
		require.NotEmpty(w.t, next)
		data["next_page_token"] = "<token>"
	}
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false)
	require.NoError(w.t, e.Encode(out))
	answer := uuids.ReplaceAllStringFunc(text.String(), func(id string) string {
		for i, have := range *made {
			if have == id {
				return fmt.Sprintf("<r%d>", i+1)
			}
		}
		return "<id>"
	})
	answer = strings.ReplaceAll(answer, `},{"amount"`, "},\n  {\"amount\"")
	for _, header := range []string{"Idempotency-Replayed", "Retry-After"} {
		if a.Header().Get(header) != "" {
			answer = strings.ToLower(header) + " " + answer
		}
	}
	return fmt.Sprintf("%d %s", a.Code, answer)
}

// TestRESTPages checks that the second page of transactions continues where the first ended, and that an invalid page
// token is refused.
func TestRESTPages(t *testing.T) {
	w := funded(t, 1)
	for range 149 {
		w.must(ledger.Command{Op: ledger.DoTopUp, Amount: 1})
	}
	handler := openapitest.Handler(t, w.rest())
	get := func(path string) (code int, page struct {
		Data struct {
			Transactions []struct {
				BalanceAfter int64 `json:"balance_after"`
			}
			Next *string `json:"next_page_token"`
		}
	}) {
		q := httptest.NewRequest("GET", "http://127.0.0.1:8086"+path, nil)
		q.Header.Set("Authorization", "Bearer ada")
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		require.NoError(t, json.Unmarshal(a.Body.Bytes(), &page))
		return a.Code, page
	}
	const path = "/api/v1/wallets/web/transactions"
	code, first := get(path)
	require.Equal(t, 200, code)
	require.Len(t, first.Data.Transactions, 100)
	_, second := get(path + "?page_token=" + *first.Data.Next)
	require.Len(t, second.Data.Transactions, 50)
	require.EqualValues(t, 101, second.Data.Transactions[0].BalanceAfter)
	require.Nil(t, second.Data.Next)
	code, _ = get(path + "?page_token=" + *first.Data.Next + "x")
	require.Equal(t, 400, code)
}

// FuzzReservationBody sends any bytes as the body of a reservation. It must either create a reservation, or return an
// error of the wire contract. The wallet must stay consistent.
func FuzzReservationBody(f *testing.F) {
	w := funded(f, 1000)
	handler := openapitest.Handler(w.t, w.rest())
	for _, body := range []string{
		`{"project_id":"web","amount":1}`, `{"project_id":"web","amount":-1,"ttl_seconds":1e3}`, `{"project_id":"web","amount":9223372036854775808}`,
		`[]`, `null`, `{"project_id":"a/b","amount":1}`, `{"project_id":"web","amount":1,"description":"\u0000"}`, "{\"project_id\":\"\xff\"}",
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		w.t = t
		q := httptest.NewRequest("POST", "http://127.0.0.1:8086/api/v1/reservations", bytes.NewReader(body))
		q.Header.Set("Authorization", "Bearer ada")
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		var out struct {
			Data  struct{ ID string }
			Error struct{ Code, Message string }
		}
		require.NoError(t, json.Unmarshal(a.Body.Bytes(), &out))
		switch a.Code {
		case 201:
			w.must(ledger.Command{Op: ledger.DoRelease, Reservation: out.Data.ID})
		case 400, 403, 413, 500:
			require.NotEmpty(t, out.Error.Message)
			require.NotEqual(t, "INTERNAL", out.Error.Code)
		default:
			t.Fatalf("%d %s", a.Code, a.Body)
		}
		require.EqualValues(t, 1000, w.wallet().Available())
	})
}
