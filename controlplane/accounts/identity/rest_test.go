package identity

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/openapi/openapitest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestREST sends the requests in testdata/rest to the REST endpoints of part 4.6 of the wire contract, and compares the
// responses. With the argument `keep` the token of a response is stored; `<token>` in a later body is replaced by it.
// `from=` sets the client's address.
func TestREST(t *testing.T) {
	w := newWorld(t)
	w.user("ada", member, cloud.Binding{Role: cloud.OrgAdmin, Org: "default"})
	r := rest.New(rest.Options{
		Service: fault.Identity, Name: "identity", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry()),
	})
	w.first.Routes(r, false)
	handler := openapitest.Handler(t, r)
	var kept string
	datadriven.RunTest(t, "testdata/rest", func(t *testing.T, d *datadriven.TestData) string {
		if d.Cmd == "wait" {
			var seconds int
			d.ScanArgs(t, "s", &seconds)
			w.wait(time.Duration(seconds) * time.Second)
			return ""
		}
		body := strings.ReplaceAll(d.Input, "<token>", kept)
		q := httptest.NewRequest(strings.ToUpper(d.Cmd), "http://127.0.0.1:8083"+strings.Join(append([]string{d.CmdArgs[0].Key}, d.CmdArgs[0].Vals...), "="), strings.NewReader(body))
		q.Header.Set("Content-Type", "application/json")
		q.RemoteAddr = "127.0.0.1:1000"
		q = q.WithContext(context.WithValue(q.Context(), http.LocalAddrContextKey, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 8083}))
		if d.HasArg("from") {
			d.ScanArgs(t, "from", &q.RemoteAddr)
		}
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		var out map[string]any
		require.NoError(t, json.Unmarshal(a.Body.Bytes(), &out))
		if d.HasArg("bare") {
			return fmt.Sprintf("%d %s %s", a.Code, a.Header().Get("Cache-Control"), a.Body.String())
		}
		meta := out["meta"].(map[string]any)
		id, err := uuid.Parse(meta["request_id"].(string))
		require.NoError(t, err)
		require.EqualValues(t, 4, id.Version())
		_, err = time.Parse(time.RFC3339, meta["timestamp"].(string))
		require.NoError(t, err)
		delete(out, "meta")
		if data, ok := out["data"].(map[string]any); ok && data["token"] != nil {
			if d.HasArg("keep") {
				kept = data["token"].(string)
			}
			data["token"] = "<token>"
		}
		var text bytes.Buffer
		e := json.NewEncoder(&text)
		e.SetEscapeHTML(false)
		require.NoError(t, e.Encode(out))
		return fmt.Sprintf("%d %s", a.Code, text.String())
	})
}

// TestTokenIssueFailed checks that an internal error while issuing a token is returned with the wire contract's code
// TOKEN_ISSUE_FAILED and without the cause.
func TestTokenIssueFailed(t *testing.T) {
	w := newWorld(t)
	w.key = nil // newWorld then generates another cluster key, so that the member cannot decrypt its signing keys
	other := newWorld(t)
	other.engine, other.direct = w.engine, w.direct
	broken := other.member(0, false)
	r := rest.New(rest.Options{
		Service: fault.Identity, Name: "identity", Log: slog.New(slog.DiscardHandler), Metrics: rest.NewMetrics(prometheus.NewRegistry()),
	})
	broken.Routes(r, false)
	q := httptest.NewRequest(http.MethodPost, "http://127.0.0.1/api/v1/auth/token", strings.NewReader(`{"username":"ada"}`))
	q.Header.Set("Content-Type", "application/json")
	a := httptest.NewRecorder()
	r.ServeHTTP(a, q)
	require.Equal(t, http.StatusInternalServerError, a.Code)
	require.Contains(t, a.Body.String(), `"code":"TOKEN_ISSUE_FAILED"`)
	require.Contains(t, a.Body.String(), "internal error, request ")
}
