//go:build mutant

package dial

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants checks that Open does not return an error for a token to another host with the mutant SecretInPlaintext,
// so that TestSecretsNeedLoopbackOrTLS fails with that mutant.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	for name, refused := range map[string]bool{"": true, mutant.SecretInPlaintext: false} {
		mutant.Set(name)
		_, err := Open(Options{Endpoints: []string{"10.0.0.1:1"}, Token: "t"})
		require.Equal(t, refused, err != nil, name)
	}
}
