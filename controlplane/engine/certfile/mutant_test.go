//go:build mutant

package certfile

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// TestMutants checks that servedSerial shows the mutant UnfitCertificate, which accepts an expired certificate.
func TestMutants(t *testing.T) {
	t.Cleanup(func() { mutant.Set("") })
	for name, shown := range map[string]int64{"": 1, mutant.UnfitCertificate: 2} {
		mutant.Set(name)
		d := openFixture(t)
		d.shift(-100 * 24 * time.Hour)
		require.Equal(t, shown, d.servedSerial(), name)
	}
}
