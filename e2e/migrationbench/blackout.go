package main

import (
	"context"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// pingInterval is the time between two echo requests of the neighbour: the resolution of all blackouts.
const pingInterval = 10 * time.Millisecond

// neighbour is a guest that does not move and that pings the guest that moves. Both are in the same network.
type neighbour struct {
	namespace string // path of the network namespace from which the neighbour's HTTP server can be reached
	address   string
}

func (n neighbour) run(ctx context.Context, script string) (string, error) {
	return lab.RunInGuest(ctx, n.namespace, n.address, script)
}

// blackoutOf calls move while the neighbour pings an address, and returns the longest time between two replies.
func (n neighbour) blackoutOf(ctx context.Context, address string, move func() error) (time.Duration, error) {
	// Remove the file first: a ping process that a failed call has left running still writes to the old file.
	start := fmt.Sprintf("rm -f /tmp/ping; ping -i %.2f %s >/tmp/ping 2>&1 </dev/null & echo $! >/tmp/pinger; "+
		"until grep -q seq= /tmp/ping; do sleep 0.1; done", pingInterval.Seconds(), address)
	if _, err := n.run(ctx, start); err != nil {
		return 0, err
	}
	moved := move()
	// Replies that are late must count, also if the guest has just begun to run.
	out, err := n.run(ctx, "sleep 1; kill $(cat /tmp/pinger); grep seq= /tmp/ping | sed 's/.*seq=//; s/ttl=[0-9]*//; s/time=//'")
	if moved != nil {
		return 0, moved
	}
	if err != nil {
		return 0, err
	}
	return longestGap(out)
}

var replyPattern = regexp.MustCompile(`^(\d+) +([0-9.]+) ms$`)

// longestGap returns the longest time between two consecutive replies. Each line of text is a reply: the sequence number
// of the request, and the round-trip time in milliseconds. Requests were sent at intervals of pingInterval.
func longestGap(text string) (longest time.Duration, err error) {
	var before time.Duration
	for i, line := range strings.Split(strings.TrimSpace(text), "\n") {
		m := replyPattern.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			return 0, fmt.Errorf("ping has printed %q", line)
		}
		number, err := strconv.Atoi(m[1])
		if err != nil {
			return 0, err
		}
		trip, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return 0, err
		}
		at := time.Duration(number)*pingInterval + time.Duration(trip*float64(time.Millisecond))
		if i > 0 {
			longest = max(longest, at-before)
		}
		before = max(before, at)
	}
	return longest, nil
}
