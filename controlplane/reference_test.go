package main

import (
	"testing"

	"github.com/trivet-cloud/trivet/docs/docstest"
)

// TestReference compares docs/daemons/trivet-controlplane.md with the commands and flags of the program.
func TestReference(t *testing.T) {
	docstest.Reference(t, "../docs/daemons", command(), false, *rewrite)
}
