package session

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
)

// confirm returns the error of Confirm for an answer.
func confirm(t *testing.T, answer string) error {
	s := &Session{Shell: Shell{Ask: func(_ context.Context, question string, secret bool) (string, error) {
		require.Equal(t, "delete 3 VMs? [y/N] ", question)
		require.False(t, secret)
		return answer, nil
	}}}
	return s.Confirm(t.Context(), "delete 3 VMs")
}

// TestConfirm checks that a command goes on only after the answer yes, and not without a terminal.
func TestConfirm(t *testing.T) {
	for answer, goesOn := range map[string]bool{"y": true, " Yes ": true, "n": false, "": false, "all": false} {
		require.Equal(t, goesOn, confirm(t, answer) == nil, "%q", answer)
	}
	var usage *Usage
	require.ErrorAs(t, (&Session{}).Confirm(t.Context(), "delete 3 VMs"), &usage)
	require.Contains(t, usage.Message, "give --yes")
}
