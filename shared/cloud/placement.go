package cloud

import (
	"maps"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/shared/fault"
)

// Keys of VM labels that control where the VM is placed. The value of a group label is the name of a group of VMs of
// the project. The groups of different labels are different groups, also if they have the same name.
const (
	// AffinityLabel: all VMs of a group are placed on the host of the group's first VM.
	AffinityLabel = "trivet/affinity"
	// AffinitySoftLabel: hosts with a VM of the group are preferred. If these have no room, the VM is placed on another
	// host.
	AffinitySoftLabel = "trivet/affinity-soft"
	// AntiAffinityLabel: no two VMs of a group are placed on the same host.
	AntiAffinityLabel = "trivet/anti-affinity"
	// AntiAffinitySoftLabel: hosts with fewer VMs of the group are preferred.
	AntiAffinitySoftLabel = "trivet/anti-affinity-soft"
	// SpreadLabel names a label of hosts, such as rack. The VM is placed on a host whose value of this label has the
	// fewest VMs of the VM's spread group. Hosts without the label are the last choice.
	SpreadLabel = "trivet/spread"
	// SpreadGroupLabel is the VM's spread group. VMs without this label are one group. Only VMs with the same value of
	// SpreadLabel belong to a group.
	SpreadGroupLabel = "trivet/spread-group"
	// NodeSelectorLabel lists the labels that the host must have, as comma-separated k=v pairs.
	NodeSelectorLabel = "trivet/node-selector"
)

// HostLabel is the label of a host whose value is the host's name, so that a node selector can choose the host. The
// control plane sets it from the name in the host's heartbeats. An agent or a user cannot set another value.
const HostLabel = "trivet/host"

// ParseNodeSelector parses a value of NodeSelectorLabel. It returns nil for an empty text, and an InvalidArgument fault
// if the text is not a list of k=v pairs.
func ParseNodeSelector(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	out := map[string]string{}
	for _, pair := range strings.Split(text, ",") {
		k, v, ok := strings.Cut(pair, "=")
		if !ok || k == "" {
			return nil, fault.Invalid("labels", "%s must be k=v, comma-separated", NodeSelectorLabel)
		}
		out[k] = v
	}
	return out, nil
}

// FormatNodeSelector is the inverse of ParseNodeSelector. It sorts the pairs by key.
func FormatNodeSelector(labels map[string]string) string {
	pairs := make([]string, 0, len(labels))
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		pairs = append(pairs, k+"="+labels[k])
	}
	return strings.Join(pairs, ",")
}
