package main

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestTargets checks the response of /targets for two members and two hosts, of which one each has no metrics for
// other machines.
func TestTargets(t *testing.T) {
	out := append(memberTargets([]membership.Member{
		{ID: 1, Name: "node-1", MetricsURL: "https://10.0.0.1:9101", Version: "1.2", State: membership.Voting},
		{ID: 2, Name: "node-2"},
	}), agentTargets([]schedule.Candidate{
		{Node: cloud.Node{ID: "h1", Name: "rack-1", AgentVersion: "1.1", MetricsURL: "http://[2001:db8::1]:7444"}, State: cloud.NodeNotReady},
		{Node: cloud.Node{ID: "h2", Name: "rack-2"}},
	})...)
	text, err := json.MarshalIndent(out, "", " ")
	require.NoError(t, err)
	require.JSONEq(t, `[
 {"targets": ["10.0.0.1:9101"], "labels": {"__scheme__": "https", "__meta_trivet_role": "member", "__meta_trivet_id": "1",
  "__meta_trivet_host": "node-1", "__meta_trivet_version": "1.2", "__meta_trivet_state": "VOTER"}},
 {"targets": ["[2001:db8::1]:7444"], "labels": {"__scheme__": "http", "__meta_trivet_role": "agent", "__meta_trivet_id": "h1",
  "__meta_trivet_host": "rack-1", "__meta_trivet_version": "1.1", "__meta_trivet_state": "NOT_READY"}}
]`, string(text))
}
