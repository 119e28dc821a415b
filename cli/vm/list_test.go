package vm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// TestHostInFilter checks which parts of a filter are comparisons of hosts. The empty name, which is that of no host, needs
// no call.
func TestHostInFilter(t *testing.T) {
	for filter, want := range map[string]string{
		`host = ""`:                          `node_id = ""`,
		`NOT (host != '') AND name = x`:      `NOT (node_id != "") AND name = x`,
		`-host=""`:                           `-node_id = ""`,
		`labels.host = a AND labels."a" = b`: `labels.host = a AND labels."a" = b`,
		`labels.note = "the host = rack7"`:   `labels.note = "the host = rack7"`,
		`host_id = x AND vhost = y`:          `host_id = x AND vhost = y`,
		`name = 'unclosed`:                   `name = 'unclosed`,
		``:                                   ``,
	} {
		got, err := withHostIDs(t.Context(), nil, filter)
		require.NoError(t, err, filter)
		require.Equal(t, want, got)
	}
	for _, bad := range []string{`host = "rack*"`, `host : rack`} {
		_, err := withHostIDs(t.Context(), nil, bad)
		require.ErrorContains(t, err, "the name or the ID of a host", bad)
	}
}
