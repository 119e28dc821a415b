package rest

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestStrict sends requests with unknown fields and parameters, with different values of the header Trivet-Strict. The
// last column is the field that the error names, or empty for a success.
func TestStrict(t *testing.T) {
	handler := server(t, &strings.Builder{})
	const unknown = `{"name":"a","nmae":"b"}`
	for _, c := range []struct{ method, path, strict, body, field string }{
		{"POST", "/things", "", unknown, ""},
		{"POST", "/things", "false", unknown, ""},
		{"POST", "/things", "true", unknown, "nmae"},
		{"POST", "/things", "yes", unknown, StrictHeader},
		{"POST", "/things", "true", `{"name":"a","inner":{"deep":1}}`, ""},
		{"POST", "/things", "true", `{"inner":{"deep":1,"depp":2}}`, "inner.depp"},
		{"POST", "/things", "true", `{"Name":"a"}`, "Name"},
		{"POST", "/things?dry=1", "", `{"name":"a"}`, ""},
		{"POST", "/things?dry=1", "true", `{"name":"a"}`, "dry"},
		{"GET", "/things/7?page=1", "true", "", "page"},
		{"GET", "/things/7?page=1", "", "", ""},
		{"GET", "/things/7", "true", `{"page":1}`, "page"},
		{"GET", "/things/7", "true", `{}`, ""},
		{"POST", "/open", "true", unknown, "nmae"},
		{"GET", "/health?x=1", "true", "", "x"},
	} {
		q := httptest.NewRequest(c.method, "http://127.0.0.1"+c.path, strings.NewReader(c.body))
		q.Header.Set("Authorization", "Bearer good")
		q.Header.Set("Content-Type", "application/json")
		if c.strict != "" {
			q.Header.Set(StrictHeader, c.strict)
		}
		a := httptest.NewRecorder()
		handler.ServeHTTP(a, q)
		var reply struct {
			Error struct{ Details struct{ Field string } }
		}
		require.NoError(t, json.Unmarshal(a.Body.Bytes(), &reply), c)
		require.Equal(t, c.field, reply.Error.Details.Field, "%v: an unknown field was accepted, or another one refused", c)
		require.Equal(t, c.field == "", a.Code < 300, "%v: %s", c, a.Body)
		if c.field != "" {
			require.Equal(t, http.StatusBadRequest, a.Code)
		}
	}
}

// TestStrictComesAfterTheToken checks that a caller without a token gets 401 also for a request with an unknown field.
func TestStrictComesAfterTheToken(t *testing.T) {
	q := httptest.NewRequest(http.MethodGet, "http://127.0.0.1/things/7?page=1", nil)
	q.Header.Set(StrictHeader, "true")
	a := httptest.NewRecorder()
	server(t, &strings.Builder{}).ServeHTTP(a, q)
	require.Equal(t, http.StatusUnauthorized, a.Code)
}
