//go:build mutant

package network

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutants enables each mutant (a deliberate bug) of this package, and checks that a test notices it.
func TestMutants(t *testing.T) {
	mutanttest.Notices(t, mutant.ActiveWithoutAck, TestFeed, "status", "p1 node=h1 ACTIVE")
	mutanttest.Notices(t, mutant.SendStaleBinding, TestFeed, "bind port=p2 node=h2")
	mutanttest.Notices(t, mutant.KeepMovedFloating, TestFeed, "deleted f")
	mutanttest.Notices(t, mutant.GatewayTwice, TestFeed, "assign", "g node=h2")
	mutanttest.Notices(t, mutant.GatewayTwice, TestChoosePlace)
	mutanttest.Notices(t, mutant.ForeignHealth, TestBackendHealth, "a host may report about its own ports only")
	mutanttest.Notices(t, mutant.RotateEarly, TestKeyRotation, "the keys are rotated before each host has received")
	mutanttest.Notices(t, mutant.ReuseAddress, TestAPI, "AlreadyExists: address 10.0.1.2 of subnet")
}
