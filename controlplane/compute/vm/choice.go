package vm

import (
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
)

// choiceReason returns the text for Choice.Reason: the rules by which schedule.Index.Place chose a host for the request
// r, in the order in which they apply. "it" in the text is the host.
func choiceReason(r *schedule.Request) string {
	if r.On != "" {
		return "it has the VM's volumes"
	}
	var rules []string
	add := func(applies bool, rule string) {
		if applies {
			rules = append(rules, rule)
		}
	}
	add(r.Affinity != nil, "it is with the VM's affinity group")
	add(r.AntiAffinity != nil, "it has no VM of the anti-affinity group")
	add(r.AntiAffinitySoft != nil, "it has few VMs of the soft anti-affinity group")
	add(r.SpreadLabel != "", "its "+r.SpreadLabel+" has few VMs of the spread group")
	add(r.AffinitySoft != nil, "it was preferred for VMs of the soft affinity group")
	rules = append(rules, "it keeps much of its scarcest resource free")
	return "of the hosts that fit: " + strings.Join(rules, "; ")
}
