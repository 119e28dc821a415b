//go:build mutant

package identity

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutantsOfGrants checks that a role from another org is effective without the user's acceptance only in a program
// with the mutant GrantUnasked, so the tests of grants detect this mutant.
func TestMutantsOfGrants(t *testing.T) {
	w, _ := newTwoOrgs(t)
	bob := w.token(w.first, tokenRequest{User: "bob", Password: secret})
	t.Cleanup(func() { mutant.Set("") })
	for _, m := range []struct {
		name  string
		moved bool
	}{{"", false}, {mutant.GrantUnasked, true}} {
		mutant.Set(m.name)
		require.NoError(t, w.grant(w.login("mallory"), "bob", lair))
		_, err := w.tenantOfCall(bob, getVM)
		require.Equal(t, m.moved, err == nil, m.name)
	}
}
