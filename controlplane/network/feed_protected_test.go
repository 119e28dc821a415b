package network

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestFeedProtectedAddresses counts the messages with protected addresses. The addresses of hosts that join within a
// short time are in one message, and no message repeats addresses that the host has already received.
func TestFeedProtectedAddresses(t *testing.T) {
	w := newFeedWorld(t)
	a := w.connect("h0", "192.0.2.1")
	w.settle()
	messages := func() (out [][]string) {
		w.settle()
		for _, m := range a.log {
			if m.GetProtected() != nil {
				out = append(out, m.GetProtected().GetAddresses())
			}
		}
		a.log = nil
		return out
	}
	// The first message can be older than the record of the host.
	first := messages()
	require.NotEmpty(t, first)
	require.Equal(t, []string{"192.0.2.1", "198.51.100.1"}, first[len(first)-1])
	interval := func(d time.Duration) {
		w.feed.mu.Lock()
		defer w.feed.mu.Unlock()
		w.feed.protectedInterval = d
	}
	interval(time.Hour)
	for i := 2; i <= 4; i++ {
		w.connect(cloud.NodeID(fmt.Sprint("h", i)), fmt.Sprint("192.0.2.", i))
		require.Empty(t, messages(), "the last message is not an hour ago")
	}
	interval(0)
	require.Equal(t, [][]string{{"192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4", "198.51.100.1"}}, messages())
	// A host with a new ID has the address of another, so the set is the same.
	w.connect("h5", "192.0.2.4")
	w.follow()
	require.Empty(t, messages())
}
