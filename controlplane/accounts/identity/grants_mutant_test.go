//go:build mutant

package identity

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// If grants are effective without the user's consent (mutant GrantUnasked), the tests of this package fail.
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
