package vm

import (
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/compute/schedule"
)

// choiceReason returns the text for Choice.Reason: the criteria by which schedule.Index.Place chose a host for the request
// r, in the order in which they apply.
func choiceReason(r *schedule.Request) string {
	if r.On != "" {
		return "the only host that can use the VM's volumes"
	}
	var criteria []string
	add := func(applies bool, criterion string) {
		if applies {
			criteria = append(criteria, criterion)
		}
	}
	add(r.Affinity != nil, "the host of the affinity group")
	add(r.AntiAffinity != nil, "no VM of the anti-affinity group")
	add(r.AntiAffinitySoft != nil, "few VMs of the soft anti-affinity group")
	add(r.SpreadLabel != "", "few VMs of the spread group with the same "+r.SpreadLabel)
	add(r.AffinitySoft != nil, "the host of the soft affinity group")
	criteria = append(criteria, "free capacity")
	return "the best of the hosts that fit, by " + strings.Join(criteria, ", then ")
}
