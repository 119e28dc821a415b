package reconcile

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// withNote is a VM without steps. Its observations have the warning note in Step.Note.
type withNote struct {
	note  string
	looks chan struct{}
}

func (n *withNote) Next(context.Context, *agentv1.AssignedVm) (Step, error) {
	return Step{Note: n.note, Observation: cloud.Observation{PID: 7}}, nil
}

func (n *withNote) Changed() <-chan struct{} { return n.looks }
func (n *withNote) Close()                   {}

// TestNote checks that a Note is logged once although several observations have it, and that its end is logged once.
func TestNote(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		n := &withNote{looks: make(chan struct{})}
		l := New(Options{
			Open: func(cloud.VMID) Reconciled { return n }, Report: func(cloud.Observation) {}, Removed: func(cloud.VMID) {},
			Log: slog.New(slog.NewTextHandler(&log, nil)), Launches: 1, Builds: 1,
		})
		defer l.Close()
		require.NoError(t, l.Adopt(t.Context(), []cloud.VMID{"a"}))
		for _, note := range []string{"", "alone", "alone", "", ""} {
			synctest.Wait()
			n.note = note
			n.looks <- struct{}{}
		}
		synctest.Wait()
		require.Equal(t, 1, strings.Count(log.String(), "msg=alone vm=a pid=7"))
		require.Equal(t, 1, strings.Count(log.String(), "is over"))
		require.Equal(t, 2, strings.Count(log.String(), "\n"))
	})
}
