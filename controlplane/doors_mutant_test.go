//go:build mutant

package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Each mutant makes cells of the table wrong, and those that it is about.
func TestMutantsOfTheDoors(t *testing.T) {
	h := newHouse(t)
	h.furnish()
	tokens := &purse{h, map[string]string{}}
	knock := func() *table {
		b := &table{}
		all, rows := survey(&table{}, h.doors)
		for _, d := range h.doors {
			some := slices.DeleteFunc(slices.Clone(all[d.name]), func(e endpoint) bool {
				return e.name != vms+"GetVm" && e.name != identityService+"WhoAmI"
			})
			h.knock(b, d, some, rows, tokens, false)
		}
		return b
	}
	t.Cleanup(func() { mutant.Set("") })
	mutant.Set("")
	b := knock()
	require.NotZero(t, b.cells)
	require.Empty(t, b.complaints, "the rules")
	for name, column := range map[string]string{
		mutant.TrustUnproven: "unproven", mutant.ForeignTenant: "other project", mutant.AnyAudience: "wrong aud", mutant.IgnoreRevocation: "revoked",
	} {
		mutant.Set(name)
		require.True(t, slices.ContainsFunc(knock().complaints, func(c string) bool { return strings.Contains(c, " with "+column+":") }), "%s is not noticed", name)
	}
}
