package rpc

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// outcomes is an Auditor that keeps the outcomes of failed calls.
type outcomes []string

func (o *outcomes) Failed(_ *cloud.Caller, outcome, _ string) { *o = append(*o, outcome) }
func (o *outcomes) Done(*cloud.Caller)                        {}

// TestFailedCallsInTheAudit checks the outcome in the audit record of a call that changes something and fails. A call
// that its caller has canceled is no internal error.
func TestFailedCallsInTheAudit(t *testing.T) {
	for outcome, err := range map[string]error{
		"CANCELLED":         fmt.Errorf("send: %w", context.Canceled),
		"DEADLINE_EXCEEDED": fmt.Errorf("send: %w", context.DeadlineExceeded),
		"NOT_FOUND":         fault.New(fault.NotFound, "no VM x"),
		"INTERNAL":          errors.New("secret"),
	} {
		var got outcomes
		e := &edge{opts: Options{Public: true, Audit: &got}}
		e.report(t.Context(), &cloud.Caller{User: "ada"}, "/vmcontroller.v1.VmService/CreateVm", err)
		require.Equal(t, outcomes{outcome}, got)
	}
}
