package session

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHintsKeepFlags checks that commands in hints act in the org, project and context of the command line.
func TestHintsKeepFlags(t *testing.T) {
	s := &Session{flags: flags{context: "lab", org: "acme", project: "two words"}}
	for hint, want := range map[string]string{
		"":                               "",
		"try again":                      "try again",
		"`trivet vm list` shows them":    "`trivet vm list --context lab --org acme --project 'two words'` shows them",
		"`trivet x --project=b`, or y":   "`trivet x --project=b --context lab --org acme`, or y",
		"run `trivet vm list --help`":    "run `trivet vm list --help`",
		"`trivet login --context a`":     "`trivet login --context a`",
		"`trivet whoami` shows":          "`trivet whoami --context lab` shows",
		"`trivet project list` shows":    "`trivet project list --context lab --org acme` shows",
		"`trivet p list --all-projects`": "`trivet p list --all-projects --context lab`",
	} {
		require.Equal(t, want, s.hintWithFlags(hint))
	}
	require.Equal(t, "`trivet vm list`", (&Session{}).hintWithFlags("`trivet vm list`"))
}
