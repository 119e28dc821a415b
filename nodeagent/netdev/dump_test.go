package netdev

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/stretchr/testify/require"
)

// Parts of the output of ip(8) and bridge(8) that differ between two namespaces with the same configuration.
var (
	numbers   = regexp.MustCompile(`(?m)^[0-9]+: +`)
	peers     = regexp.MustCompile(`@\S+:`)
	netnsID   = regexp.MustCompile(`link-netns(id)? \S+|netns \S+`)
	randomMAC = regexp.MustCompile(`(?m)(vx|port|ifb-)(.*)link/ether \S+`)
	ownMAC    = regexp.MustCompile(`(?m)^\S+ dev \S+ master \S+ permanent.*\n`)
	groups    = regexp.MustCompile(`(?m)^(33:33|01:00:5e):\S+ dev \S+ self permanent\n`)
	learned   = regexp.MustCompile(`(?m)^\S+ dev \S+ master \S+ *\n`)
	bridgeIDs = regexp.MustCompile(`\w+_timer +[0-9.]+|designated_root \S+|bridge_id \S+|forward_delay \d+|port_(id|no) \S+|` +
		`designated_(port|cost) \d+|designated_bridge \S+|topology_change(_detected|_ack)? \d|promiscuity \d|allmulti \d`)
	// ip shows the name of the device with this index in the wrong namespace.
	underlayDevice = regexp.MustCompile(`dev \S+ srcport`)
	ingress        = regexp.MustCompile(`qdisc ingress \S+ dev (\S+)`)
	qdiscs         = regexp.MustCompile(`(?m)tbf [0-9a-f]+:|refcnt \d+|^qdisc (noqueue|pfifo_fast|mq) .*\n`)
	filters        = regexp.MustCompile(`index \d+ ref \d+ bind \d+`)
	dynamic        = regexp.MustCompile(`(?m)^.*(REACHABLE|STALE|DELAY|PROBE|FAILED|INCOMPLETE|NOARP).*\n`)
)

// dump returns the configuration of a namespace of the lab, as iproute2 and /proc/sys show it, without what the kernel
// chooses (indexes, random MAC addresses, timers) or learns. It is independent of kernel.read.
func (l *lab) dump(name string) string {
	l.t.Helper()
	var out strings.Builder
	section := func(title, text string) {
		text = numbers.ReplaceAllString(text, "")
		text = peers.ReplaceAllString(text, ":")
		text = netnsID.ReplaceAllString(text, "")
		text = randomMAC.ReplaceAllString(text, "$1$2")
		text = underlayDevice.ReplaceAllString(text, "")
		text = groups.ReplaceAllString(text, "")
		text = learned.ReplaceAllString(text, "")
		text = ownMAC.ReplaceAllString(text, "")
		text = bridgeIDs.ReplaceAllString(text, "")
		text = dynamic.ReplaceAllString(text, "")
		for _, line := range slices.Sorted(strings.SplitSeq(strings.TrimSpace(text), "\n")) {
			fmt.Fprintf(&out, "%s: %s\n", title, strings.TrimSpace(line))
		}
	}
	section("links", l.ip(name, "-o -d link"))
	section("bridge ports", strings.ReplaceAll(l.bridge(name, "-d link"), "\n    ", " "))
	section("addresses", l.ip(name, "-o address"))
	section("routes", l.ip(name, "route show table all"))
	section("IPv6 routes", l.ip(name, "-6 route show table all"))
	section("rules", l.ip(name, "rule"))
	queues, redirects := l.tc(name, "qdisc"), ""
	for _, device := range ingress.FindAllStringSubmatch(queues, -1) {
		for line := range strings.Lines(l.tc(name, "filter show dev %s ingress", device[1])) {
			redirects += device[1] + " " + filters.ReplaceAllString(line, "")
		}
	}
	section("queues", qdiscs.ReplaceAllString(queues, ""))
	section("filters", redirects)
	section("fdb", l.bridge(name, "fdb"))
	section("neighbours", l.ip(name, "neighbour show nud all"))
	require.NoError(l.t, l.in(name, func() error {
		var text strings.Builder
		for _, pattern := range []string{
			"ipv?/ip_forward", "ipv?/conf/*/*", "ipv?/neigh/*/*_solicit", "bridge/*", "netfilter/nf_conntrack_tcp_*",
		} {
			paths, err := filepath.Glob(filepath.Join(procSys, "net", pattern))
			if err != nil {
				return err
			}
			for _, path := range paths {
				value, err := os.ReadFile(path)
				if filepath.Base(path) != "stable_secret" && err != nil { // which cannot be read before it is set
					return err
				}
				fmt.Fprintf(&text, "%s = %s\n", path, strings.TrimSpace(string(value)))
			}
		}
		section("sysctls", text.String())
		return nil
	}))
	return out.String()
}

// requireSame requires that two functions return the same dump within 10 seconds, and otherwise prints the lines that
// differ, with the number of times that got has them more often. The kernel reports the carrier of a device with a delay.
func (l *lab) requireSame(wanted, got func() string) {
	l.t.Helper()
	want, have := wanted(), got()
	for deadline := time.Now().Add(10 * time.Second); want != have && time.Now().Before(deadline); want, have = wanted(), got() {
		time.Sleep(10 * time.Millisecond)
	}
	if want == have {
		return
	}
	counts := map[string]int{} // of lines in have, minus those in want
	for line := range strings.SplitSeq(want, "\n") {
		counts[line]--
	}
	for line := range strings.SplitSeq(have, "\n") {
		counts[line]++
	}
	var diff strings.Builder
	for _, line := range slices.Sorted(maps.Keys(counts)) {
		if counts[line] != 0 {
			fmt.Fprintf(&diff, "%+d %s\n", counts[line], line)
		}
	}
	require.Fail(l.t, "the configurations differ", diff.String())
}

// containsPort reports whether a list in the format of /proc/net/udp has a socket with a local port.
func containsPort(list string, port int) bool {
	return strings.Contains(list, fmt.Sprintf(":%04X ", port))
}
