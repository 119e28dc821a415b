package main

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestStrictRequests calls every REST route with the request of its row in the authorization matrix. A parameter of the
// query and a field of the body that the route does not have must not change the outcome, except in a strict request:
// there the outcome is 400, and names the parameter or field.
func TestStrictRequests(t *testing.T) {
	h := startMember(t)
	h.createResources()
	checked := 0
	h.eachRoute(func(e endpoint, r row) {
		checked++
		h.checkStrictness(e, r)
	})
	require.Greater(t, checked, 100, "the routes were not found")
}

// eachRoute calls f for each REST route of the member, in the order of their rows.
func (h *testMember) eachRoute(f func(endpoint, row)) {
	all, rows := listEndpoints(&matrix{}, h.listeners)
	var routes []endpoint
	for _, d := range h.listeners {
		if _, ok := d.http.(interface{ Routes() []rest.Route }); !ok {
			continue
		}
		for _, e := range all[d.name] {
			if e.method != "" && e.path != "/metrics" && e.path != "/targets" { // these are for Prometheus, not REST
				routes = append(routes, e)
			}
		}
	}
	slices.SortStableFunc(routes, func(a, b endpoint) int { return rows[a.row].order - rows[b.row].order })
	for _, e := range routes {
		f(e, rows[e.row])
	}
}

// authorizedCall returns a call of the route with the request of its row, by an administrator.
func (h *testMember) authorizedCall(e endpoint, r row) call {
	scope := cloud.Tenant{}
	if e.access.about != aboutCloud {
		scope = r.scope(web)
	}
	return call{
		endpoint: e, token: h.hostToken(scope, time.Now(), time.Hour),
		path: h.fillPlaceholders(r.path, fillAsWritten), body: h.fillPlaceholders(r.body, fillAsWritten),
	}
}

// checkStrictness checks one route, for TestStrictRequests.
func (h *testMember) checkStrictness(e endpoint, r row) {
	const field = "no_such_field"
	withParameter := func(v *call) {
		v.path += map[bool]string{true: "&", false: "?"}[strings.Contains(v.path, "?")] + field + "=1"
	}
	withField := func(v *call) {
		v.body = strings.Replace(strings.TrimSuffix(v.body, "}")+`,"`+field+`":1}`, "{,", "{", 1)
	}
	for _, c := range []struct {
		name          string
		strict, fails bool
		change        func(*call)
	}{
		{"as it is", true, false, func(*call) {}},
		{"with an unknown parameter", false, false, withParameter},
		{"with an unknown parameter", true, true, withParameter},
		{"with an unknown field", false, false, withField},
		{"with an unknown field", true, true, withField},
	} {
		if e.route.Binary != "" || c.name == "with an unknown field" && r.body == "" {
			continue
		}
		v := h.authorizedCall(e, r)
		v.strict, v.lax = c.strict, !c.strict
		c.change(&v)
		if !c.fails {
			got, message := h.outcome(v)
			require.Equal(h.t, r.allowed, got, "%s %s, strict %t: %s", e.name, c.name, c.strict, message)
		} else {
			got, body := h.send(v)
			var reply restError
			require.NoError(h.t, json.Unmarshal(body, &reply), "%s %s: %s", e.name, c.name, body)
			require.Equal(h.t, http.StatusBadRequest, got.StatusCode, "%s %s: %s", e.name, c.name, body)
			require.True(h.t, strings.HasSuffix(reply.Error.Details.Field, field), "%s %s: %s", e.name, c.name, body)
		}
		if r.cleanup != nil {
			r.cleanup(h)
		}
	}
}
