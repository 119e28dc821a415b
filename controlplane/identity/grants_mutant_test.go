//go:build mutant

package identity

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// A grant that acts without its user's consent is noticed.
func TestMutantsOfGrants(t *testing.T) {
	w, _ := rivals(t)
	bob := w.token(w.first, ask{User: "bob", Password: secret})
	t.Cleanup(func() { mutant.Set("") })
	for _, m := range []struct {
		name  string
		moved bool
	}{{"", false}, {mutant.GrantUnasked, true}} {
		mutant.Set(m.name)
		require.NoError(t, w.grant(w.login("mallory"), "bob", lair))
		_, err := w.acts(bob, getVM)
		require.Equal(t, m.moved, err == nil, m.name)
	}
}
