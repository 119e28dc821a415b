package explain

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/cli/dial"
)

// TestDeadlineBeforeTheFirstAnswer checks that a deadline that passes before an endpoint has answered is reported as a
// deadline, and not as endpoints that cannot be reached.
func TestDeadlineBeforeTheFirstAnswer(t *testing.T) {
	tried := []dial.Tried{{Endpoint: "a:50051", Why: "no answer in time"}}
	r := New(&dial.Unreachable{Tried: tried, Late: true}, Facts{Timeout: time.Millisecond})
	require.Equal(t, ExitTimeout, r.Exit)
	require.Equal(t, "no control plane has answered: not done within 1ms", r.Message)
	require.Equal(t, ExitUnreachable, New(&dial.Unreachable{Tried: tried}, Facts{}).Exit)
}
