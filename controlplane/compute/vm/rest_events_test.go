package vm

import (
	"bufio"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestRESTEvents watches a VM over REST from its creation until it is deleted.
func TestRESTEvents(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.create("web")
	server := httptest.NewServer(w.rest())
	defer server.Close()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/api/v1/vms/"+string(vm.ID)+"/events", nil)
	require.NoError(t, err)
	q.Header.Set("Authorization", "Bearer vic")
	resp, err := server.Client().Do(q)
	require.NoError(t, err)
	defer resp.Body.Close()
	require.Equal(t, http.StatusOK, resp.StatusCode)
	require.Equal(t, "text/event-stream", resp.Header.Get("Content-Type"))
	lines := bufio.NewScanner(resp.Body)
	next := func() string {
		require.True(t, lines.Scan(), "the stream has ended: %v", lines.Err())
		name := strings.TrimPrefix(lines.Text(), "event: ")
		require.True(t, lines.Scan())
		var data struct {
			VMID      string `json:"vm_id"`
			EventType string `json:"event_type"`
			VM        struct{ State string }
		}
		require.NoError(t, json.Unmarshal([]byte(strings.TrimPrefix(lines.Text(), "data: ")), &data))
		require.Equal(t, string(vm.ID), data.VMID)
		require.Equal(t, name, data.EventType)
		require.True(t, lines.Scan())
		require.Empty(t, lines.Text())
		return name + " " + data.VM.State
	}
	require.Equal(t, "updated Creating", next())
	w.report(vm.ID, cloud.ObservedBuilt)
	require.Equal(t, "state_changed Stopped", next())
	_, err = w.vms.Update(t.Context(), acme, vm.ID, Change{Labels: map[string]string{"a": "b"}})
	require.NoError(t, err)
	require.Equal(t, "updated Stopped", next())
	w.deleteIfPresent(vm.ID)
	for event := next(); event != "deleted Deleted"; event = next() {
		require.Contains(t, event, "Stopped", "only events of the deletion may follow")
	}
	require.False(t, lines.Scan(), "the stream must end after the deletion")
	require.NoError(t, lines.Err())
}
