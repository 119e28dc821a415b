//go:build mutant

package dial

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants checks that TestSecretsNeedLoopbackOrTLS notices a token that is sent to another host in plaintext.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	for name, refused := range map[string]bool{"": true, mutant.SecretInPlaintext: false} {
		mutant.Set(name)
		_, err := Open(Options{Endpoints: []string{"10.0.0.1:1"}, Token: "t"})
		require.Equal(t, refused, err != nil, name)
	}
}
