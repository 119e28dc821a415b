//go:build mutant

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestAuthorizationMatrixNoticesMutants turns on one mutant of the authorization rules after the other. For each, the
// authorization matrix must have a wrong outcome in the column that the broken rule concerns.
func TestAuthorizationMatrixNoticesMutants(t *testing.T) {
	h := startMember(t)
	h.createResources()
	tokens := &tokenCache{h, map[string]string{}}
	callSome := func() *matrix {
		b := &matrix{}
		all, rows := listEndpoints(&matrix{}, h.listeners)
		for _, d := range h.listeners {
			some := slices.DeleteFunc(slices.Clone(all[d.name]), func(e endpoint) bool {
				return !slices.Contains([]string{vms + "GetVm", vms + "UpdateVm", identityService + "WhoAmI"}, e.name)
			})
			h.callWithTokens(b, d, some, rows, tokens, false)
		}
		return b
	}
	t.Cleanup(func() { mutant.Set("") })
	mutant.Set("")
	b := callSome()
	require.NotZero(t, b.cells)
	require.Empty(t, b.problems, "without a mutant no outcome may be wrong")
	for name, column := range map[string]string{
		mutant.TrustUnproven: "unproven", mutant.ForeignTenant: "other project", mutant.AnyAudience: "wrong aud", mutant.IgnoreRevocation: "revoked",
		mutant.ViewerWrites: "project:viewer",
	} {
		mutant.Set(name)
		require.True(t, slices.ContainsFunc(callSome().problems, func(c string) bool { return strings.Contains(c, " with "+column+":") }), "%s is not noticed", name)
	}
}
