package audit

import (
	"testing"

	"github.com/stretchr/testify/require"

	_ "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestQueryWithATypingError checks that a query that can select nothing is an error, and not an empty list.
func TestQueryWithATypingError(t *testing.T) {
	for _, q := range []Query{
		{}, {Outcome: "OK"}, {Outcome: "REFUSED"}, {Outcome: "PERMISSION_DENIED"}, {Outcome: "SUPPRESSED"},
		{Method: "CreateVm"}, {Method: "/vmcontroller.v1.VmService/CreateVm"}, {Method: "vmcontroller.v1.VmService/CreateVm"},
	} {
		require.NoError(t, q.check(), "%+v", q)
	}
	for field, q := range map[string]Query{
		"outcome": {Outcome: "BAD"}, "method": {Method: "Nope"}, "since": {Until: -1},
	} {
		err := q.check()
		require.True(t, fault.Is(err, fault.InvalidArgument), field)
		require.ErrorContains(t, err, field)
	}
	for _, method := range []string{"eateVm", "/other.v1.VmService/CreateVm", "/"} {
		require.Error(t, (&Query{Method: method}).check(), method)
	}
}
