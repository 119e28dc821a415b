//go:build mutant

package rest

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutantsOfStrictRequests checks that TestStrict notices when strict requests are handled like others.
func TestMutantsOfStrictRequests(t *testing.T) {
	mutanttest.Notices(t, mutant.IgnoreStrict, TestStrict, "an unknown field was accepted")
}
