//go:build mutant

package metrics

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants checks that a test detects each mutant of this package.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.IgnoreScrapeToken, TestToken, "request for metrics with the header")
}
