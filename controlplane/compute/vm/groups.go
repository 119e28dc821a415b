package vm

import (
	"strings"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Keys of VM labels that control where the VM is placed. The value of a group label is the name of a group of VMs of
// the project. The groups of different labels are different groups, also if they have the same name.
const (
	// Affinity: all VMs of a group are placed on the host of the group's first VM.
	Affinity = "trivet/affinity"
	// AffinitySoft: hosts with a VM of the group are preferred. If these have no room, the VM is placed on another host.
	AffinitySoft = "trivet/affinity-soft"
	// AntiAffinity: no two VMs of a group are placed on the same host.
	AntiAffinity = "trivet/anti-affinity"
	// AntiAffinitySoft: hosts with fewer VMs of the group are preferred.
	AntiAffinitySoft = "trivet/anti-affinity-soft"
	// Spread names a label of hosts, such as rack. The VM is placed on a host whose value of this label has the fewest VMs
	// of the VM's spread group. Hosts without the label are the last choice.
	Spread = "trivet/spread"
	// SpreadGroup is the VM's spread group. VMs without this label are one group. Only VMs with the same value of Spread
	// belong to a group.
	SpreadGroup = "trivet/spread-group"
	// NodeSelector lists the labels that the host must have, as comma-separated k=v pairs.
	NodeSelector = "trivet/node-selector"
)

// fixedLabels cannot be changed after a VM is created, because they decide which group records the VM has.
var fixedLabels = []string{Affinity, AffinitySoft, AntiAffinity, AntiAffinitySoft, Spread, SpreadGroup}

// groupsOf returns the keys of the groups of a VM with these labels. The map key is the label that names the group, and
// Spread for the spread group.
func groupsOf(labels map[string]string) map[string]string {
	out := map[string]string{}
	for _, label := range []string{Affinity, AffinitySoft, AntiAffinity, AntiAffinitySoft} {
		if name := labels[label]; name != "" {
			out[label] = groupKey(label, name)
		}
	}
	if label := labels[Spread]; label != "" {
		out[Spread] = groupKey(Spread, label+"\x00"+labels[SpreadGroup])
	}
	return out
}

// groupKey converts a group label and the name of a group, which is any label value, to a valid part of a record's key.
func groupKey(label, name string) string {
	if label != AntiAffinity { // The keys of these groups are older than the other labels, and do not contain the label.
		name = label + "\x00" + name
	}
	return uuid.NewSHA1(uuid.Nil, []byte(name)).String()
}

// joinGroups records the VM's host in each of its groups.
func joinGroups(tx *store.Tx, vm *cloud.VM) {
	for _, key := range groupsOf(vm.Labels) {
		groups.Put(tx, &vm.Node, string(vm.Project), key, string(vm.ID))
	}
}

func leaveGroups(tx *store.Tx, vm *cloud.VM) {
	for _, key := range groupsOf(vm.Labels) {
		groups.Delete(tx, string(vm.Project), key, string(vm.ID))
	}
	setOtherHost(tx, vm, "")
}

// targetSuffix is added to a VM's ID in the key of the anti-affinity record for the other host of its migration.
const targetSuffix = "-other"

// setOtherHost records the host other in the VM's anti-affinity group, so that no VM of the group is placed on the
// other host of the VM's migration. If other is empty, setOtherHost removes this record.
func setOtherHost(tx *store.Tx, vm *cloud.VM, other cloud.NodeID) {
	key := groupsOf(vm.Labels)[AntiAffinity]
	switch {
	case key == "":
	case other == "":
		groups.Delete(tx, string(vm.Project), key, string(vm.ID)+targetSuffix)
	default:
		groups.Put(tx, &other, string(vm.Project), key, string(vm.ID)+targetSuffix)
	}
}

// groupMembers returns the number of other VMs of the VM's groups on each host. If r is a transaction, it conflicts
// with concurrent changes of these groups: of two VMs of a group that are created at the same time, the later one is
// placed with regard to the earlier one.
func groupMembers(r store.Reader, vm *cloud.VM) (out schedule.Groups, err error) {
	for label, key := range groupsOf(vm.Labels) {
		all, _, err := groups.List(r, 0, string(vm.Project), key)
		if err != nil {
			return out, err
		}
		members := map[cloud.NodeID]int{}
		for _, m := range all {
			if m.Path[len(m.Path)-1] != string(vm.ID) && *m.Value != "" { // a VM without a host is PENDING
				members[*m.Value]++
			}
		}
		setMembers(&out, label, vm.Labels[Spread], members)
	}
	return out, nil
}

// setMembers sets that field of g that belongs to a label. spread is the VM's value of the label Spread.
func setMembers(g *schedule.Groups, label, spread string, members map[cloud.NodeID]int) {
	switch label {
	case Affinity:
		g.Affinity = members
	case AffinitySoft:
		g.AffinitySoft = members
	case AntiAffinity:
		g.AntiAffinity = members
	case AntiAffinitySoft:
		g.AntiAffinitySoft = members
	case Spread:
		g.SpreadLabel, g.Spread = spread, members
	}
}

// checkPlacementLabels returns InvalidArgument if a label that controls placement has an invalid value.
func checkPlacementLabels(labels map[string]string) error {
	if labels[SpreadGroup] != "" && labels[Spread] == "" {
		return fault.Invalid("labels", "%s has no effect without %s", SpreadGroup, Spread)
	}
	_, err := selector(labels)
	return err
}

// selector parses the label NodeSelector.
func selector(labels map[string]string) (map[string]string, error) {
	text := labels[NodeSelector]
	if text == "" {
		return nil, nil
	}
	out := map[string]string{}
	for _, pair := range strings.Split(text, ",") {
		k, v, ok := strings.Cut(pair, "=")
		if !ok || k == "" {
			return nil, fault.Invalid("labels", "%s must be k=v, comma-separated", NodeSelector)
		}
		out[k] = v
	}
	return out, nil
}
