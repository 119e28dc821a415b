package schedule

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

const (
	// maxListed is the number of hosts up to which Summarize lists each host.
	maxListed = 20
	// maxReasons is the number of reasons that Summarize lists if there are more hosts, and maxExamples is the number of
	// hosts that it names for each.
	maxReasons  = 8
	maxExamples = 3
)

// statePrefix begins the reason of a host that is not READY.
const statePrefix = "is "

// Detail is an entry of the details of a summary. Key is a host and Text its reason, or Key is a reason and Text says
// for how many hosts it holds and names some of them.
type Detail struct{ Key, Text string }

// Summarize describes why no host fits. The length of the result is bounded. If there are at most maxListed hosts,
// details has the reason of each host. The result first then is the reason of one host, preferably of a host that is
// READY. If there are more hosts, Summarize counts the hosts by reason. The most frequent reason is then in first, and
// is the first entry of details.
func Summarize(refused []Refusal) (first string, details []Detail) {
	if len(refused) == 0 {
		return "", nil
	}
	if len(refused) <= maxListed {
		for _, r := range refused {
			details = append(details, Detail{r.Name, r.Reason})
		}
		one := max(0, slices.IndexFunc(refused, func(r Refusal) bool { return !strings.HasPrefix(r.Reason, statePrefix) }))
		return refused[one].Name + " " + refused[one].Reason, details
	}
	count := map[string]int{}
	examples := map[string][]string{}
	for _, r := range refused {
		count[r.Group]++
		if len(examples[r.Group]) < maxExamples {
			examples[r.Group] = append(examples[r.Group], r.Name)
		}
	}
	groups := make([]string, 0, len(count))
	for g := range count {
		groups = append(groups, g)
	}
	slices.SortFunc(groups, func(a, b string) int { return cmp.Or(cmp.Compare(count[b], count[a]), cmp.Compare(a, b)) })
	others := 0
	for i, g := range groups {
		if i >= maxReasons {
			others += count[g]
			continue
		}
		text := fmt.Sprintf("%d hosts: %s", count[g], strings.Join(examples[g], ", "))
		if count[g] > len(examples[g]) {
			text = fmt.Sprintf("%d hosts, for example %s", count[g], strings.Join(examples[g], ", "))
		}
		if count[g] == 1 {
			text = "1 host: " + examples[g][0]
		}
		details = append(details, Detail{g, text})
	}
	if others > 0 {
		details = append(details, Detail{"other reasons", fmt.Sprintf("%d hosts", others)})
	}
	return fmt.Sprintf("of %d hosts, each of %d %s", len(refused), count[groups[0]], groups[0]), details
}
