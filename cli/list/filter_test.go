package list

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// selected returns how many of the objects the filter selects.
func selected[T any](t *testing.T, filter string, objects ...T) (n int) {
	t.Helper()
	k, err := (&Kind[T]{}).filtered(filter, nil)
	require.NoError(t, err, filter)
	for _, o := range objects {
		if k.Keep(o) {
			n++
		}
	}
	return n
}

// TestFilter checks the operators on each kind of field, among them fields of messages in the object.
func TestFilter(t *testing.T) {
	host := &vmv1.Node{
		Name: "host-1", State: vmv1.NodeState_NODE_STATE_CORDONED, Labels: map[string]string{"rack": "r1", "trivet/accel": "tcg"},
		Capacity: &vmv1.NodeCapacity{Vcpus: 8}, LastHeartbeat: 1_772_366_400_000, // 2026-03-01T12:00:00Z
	}
	for filter, want := range map[string]int{
		`name = "host-*"`: 1, `state = CORDONED`: 1, `state = ready`: 0, `state != READY AND labels.rack = r1`: 1,
		`labels."trivet/accel" = tcg`: 1, `labels.none:*`: 0, `capacity.vcpus >= 8`: 1, `capacity.vcpus < 8`: 0,
		`last_heartbeat > "2026-03-01"`: 1, `last_heartbeat > "2026-03-02"`: 0, `allocated.vcpus = 0`: 1,
	} {
		require.Equal(t, want, selected(t, filter, host), filter)
	}
	spent := &creditv1.Transaction{Amount: -5}
	require.Equal(t, 1, selected(t, "amount < 0", spent))
	require.Equal(t, 0, selected(t, "amount > 0", spent))
	subnet := &networkv1.Subnet{DhcpEnabled: true, DnsServers: []string{"192.0.2.53"}}
	require.Equal(t, 1, selected(t, `dhcp_enabled = true AND dns_servers : "192.0.2.*"`, subnet))
	require.Equal(t, 0, selected(t, `dhcp_enabled = false`, subnet))
	require.Equal(t, 0, selected[*networkv1.Subnet](t, `name = x`, nil), "an object that is nil")
}

// TestFilterErrors checks that filters which cannot match are refused.
func TestFilterErrors(t *testing.T) {
	for filter, want := range map[string]string{
		`nmae = x`: "unknown field nmae; one of ", `state = SLEEPING`: "one of ", `capacity = 3`: "unknown field capacity",
		`capacity.vcpus = many`: "a number", `name`: "want comparisons", `name = `: "cannot be parsed",
	} {
		_, err := (&Kind[*vmv1.Node]{}).filtered(filter, nil)
		require.ErrorContains(t, err, want, filter)
	}
}

// TestFieldsOfMessages checks that objects that are no messages have no fields, and that the depth of inner messages is
// limited.
func TestFieldsOfMessages(t *testing.T) {
	require.Nil(t, fieldsOf[struct{ Name string }]())
	for name := range fieldsOf[*vmv1.VirtualMachine]() {
		require.Less(t, strings.Count(name, "."), maxDepth, name)
	}
}

// TestFilterByColumns checks that a filter can compare the columns of the table whose names are not those of fields.
func TestFilterByColumns(t *testing.T) {
	type volume = *vmv1.Volume
	columns := []Column[volume]{
		{Name: "NAME", Text: func(volume) string { return "the field has precedence" }},
		{Name: "STATUS TEXT", Text: func(volume) string { return "IN USE" }, Words: []string{"IN USE", "FREE"}},
		Size("SIZE", func(v volume) uint64 { return v.GetSizeGib() << 30 }),
		Number("DISKS", func(volume) uint32 { return 3 }),
		Age("AGE", nil, volume.GetCreatedAt),
		{Name: "MAX BYTES/S", Text: func(volume) string { return "fast" }},
	}
	v := &vmv1.Volume{Name: "data", SizeGib: 5, CreatedAt: 1_772_366_400_000}
	for filter, want := range map[string]bool{
		`name = data`: true, `size > "4GiB"`: true, `size > "5GiB"`: false, `size = 5368709120`: true, `disks = 3`: true, `disks < 3`: false,
		`age < "2026-03-02"`: true, `age < "2026-03-01"`: false, `status_text = "in use"`: true, `status_text = FREE`: false, `max_bytes_s : as`: true,
	} {
		k, err := (&Kind[volume]{}).filtered(filter, columns)
		require.NoError(t, err, filter)
		require.Equal(t, want, k.Keep(v), filter)
	}
	for _, bad := range []string{`status_text = BUSY`, `size = big`, `sise > 1`} {
		_, err := (&Kind[volume]{}).filtered(bad, columns)
		require.ErrorContains(t, err, "--filter", bad)
	}
}
