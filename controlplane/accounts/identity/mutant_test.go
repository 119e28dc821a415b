//go:build mutant

package identity

import (
	"testing"

	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/mutant/mutanttest"
)

// TestMutantsOfTokens checks that the named test fails, with the given text, if the mutant breaks a rule of tokens.
func TestMutantsOfTokens(t *testing.T) {
	mutanttest.Notices(t, mutant.AcceptExpired, TestTokenExpiry, "an expired token was accepted")
	mutanttest.Notices(t, mutant.AcceptAnyKey, TestForgedTokens, "a_public_key_in_the_token's_header")
	mutanttest.Notices(t, mutant.AcceptHMAC, TestForgedTokens, "the_public_key_as_an_HMAC_secret")
	mutanttest.Notices(t, mutant.AcceptDisabled, TestDisabledUserGetsNoToken, "a disabled user got a token")
	mutanttest.Notices(t, mutant.IgnoreEpoch, TestNewPasswordRevokesTokens, "a token from before the new password was accepted")
	mutanttest.Notices(t, mutant.IgnoreSkew, TestWrongClockIsReported, "a member with a wrong clock")
	mutanttest.Notices(t, mutant.PublishUnproven, TestRelyingPartiesRefuseUnauthenticatedTokens, "the key of unauthenticated tokens must not be published")
	mutanttest.Notices(t, mutant.AnyGroupMember, TestGroupMembersBelongToTheOrg, "a user of another org was added")
	mutanttest.Notices(t, mutant.UnauditedChange, TestAudit, "ada CreateProject OK")
}

// TestMutantsOfREST checks that TestREST notices when callers on other hosts can list and create users and projects
// without a credential.
func TestMutantsOfREST(t *testing.T) {
	mutanttest.Notices(t, mutant.LoopbackForAll, TestREST, "from=192.0.2.1:7")
}
