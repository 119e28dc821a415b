package vm

import (
	"slices"

	"github.com/google/uuid"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// fixedLabels cannot be changed after a VM is created, because they decide which group records the VM has.
var fixedLabels = append(slices.Clone(affinityLabels), cloud.SpreadLabel, cloud.SpreadGroupLabel)

// affinityLabels are the labels whose values are names of groups.
var affinityLabels = []string{
	cloud.AffinityLabel, cloud.AffinitySoftLabel, cloud.AntiAffinityLabel, cloud.AntiAffinitySoftLabel,
}

// groupsOf returns the keys of the groups of a VM with these labels. The map key is the label that names the group, and
// cloud.SpreadLabel for the spread group.
func groupsOf(labels map[string]string) map[string]string {
	out := map[string]string{}
	for _, label := range affinityLabels {
		if name := labels[label]; name != "" {
			out[label] = groupKey(label, name)
		}
	}
	if label := labels[cloud.SpreadLabel]; label != "" {
		out[cloud.SpreadLabel] = groupKey(cloud.SpreadLabel, label+"\x00"+labels[cloud.SpreadGroupLabel])
	}
	return out
}

// groupKey converts a group label and the name of a group, which is any label value, to a valid part of a record's key.
func groupKey(label, name string) string {
	if label != cloud.AntiAffinityLabel { // The keys of these groups are older than the other labels, and do not contain the label.
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
	key := groupsOf(vm.Labels)[cloud.AntiAffinityLabel]
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
		setMembers(&out, label, vm.Labels[cloud.SpreadLabel], members)
	}
	return out, nil
}

// setMembers sets that field of g that belongs to a label. spread is the VM's value of the label cloud.SpreadLabel.
func setMembers(g *schedule.Groups, label, spread string, members map[cloud.NodeID]int) {
	switch label {
	case cloud.AffinityLabel:
		g.Affinity = members
	case cloud.AffinitySoftLabel:
		g.AffinitySoft = members
	case cloud.AntiAffinityLabel:
		g.AntiAffinity = members
	case cloud.AntiAffinitySoftLabel:
		g.AntiAffinitySoft = members
	case cloud.SpreadLabel:
		g.SpreadLabel, g.Spread = spread, members
	}
}

// checkPlacementLabels returns InvalidArgument if a label that controls placement has an invalid value.
func checkPlacementLabels(labels map[string]string) error {
	if labels[cloud.SpreadGroupLabel] != "" && labels[cloud.SpreadLabel] == "" {
		return fault.Invalid("labels", "%s has no effect without %s", cloud.SpreadGroupLabel, cloud.SpreadLabel)
	}
	_, err := cloud.ParseNodeSelector(labels[cloud.NodeSelectorLabel])
	return err
}
