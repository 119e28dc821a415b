//go:build mutant

package rest

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that TestFromLoopback notices when clients on other hosts count as clients on this host.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.LoopbackForAll, TestFromLoopback, "another host")
}
