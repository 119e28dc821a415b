package main

import (
	"context"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// quietFor is the time after a single create in which the messages to hosts are counted.
const quietFor = 200 * time.Millisecond

// traffic is the number of messages from members to hosts, and of bytes in both directions.
type traffic struct{ messages, bytes float64 }

// trafficNow reads the message counters of the members, and the byte counters of countBytes.
func (c *cluster) trafficNow(ctx context.Context) (t traffic, err error) {
	for _, address := range c.trio.Members {
		n, ok, err := lab.Metric(ctx, address+":8084", "trivet_network_feed_messages_total")
		if err == nil && !ok {
			err = fmt.Errorf("member %s does not count the messages to hosts", address)
		}
		if err != nil {
			return t, err
		}
		t.messages += n
	}
	out, err := exec.CommandContext(ctx, "iptables-nft", "-nvxL", "OUTPUT").Output()
	if err != nil {
		return t, fmt.Errorf("read the counters of bytes: %w", err)
	}
	t.bytes, err = parseCounters(string(out))
	return t, err
}

// agentPort is the members' port for agents.
const agentPort = "7443"

// countBytes makes rules of iptables that count the bytes between members and hosts.
func countBytes(ctx context.Context) error {
	return commands(ctx, "iptables-nft -A OUTPUT -p tcp --sport "+agentPort, "iptables-nft -A OUTPUT -p tcp --dport "+agentPort)
}

// parseCounters returns the sum of the bytes in the output of `iptables -nvxL`.
func parseCounters(text string) (bytes float64, err error) {
	rules := 0
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) < 2 || !slices.Contains(fields, "spt:"+agentPort) && !slices.Contains(fields, "dpt:"+agentPort) {
			continue
		}
		n, err := strconv.ParseFloat(fields[1], 64)
		if err != nil {
			return 0, fmt.Errorf("counter %q: %w", line, err)
		}
		bytes += n
		rules++
	}
	if rules != 2 {
		return 0, fmt.Errorf("%d rules of 2 count bytes", rules)
	}
	return bytes, nil
}

// perCreate creates ports one by one, and returns the mean traffic for one port: the traffic while they are created
// less the traffic of an equally long time without creates, divided by the number of ports.
func (c *cluster) perCreate(ctx context.Context, s subnet) (t traffic, err error) {
	during := func(create bool) (t traffic, err error) {
		before, err := c.trafficNow(ctx)
		if err != nil {
			return t, err
		}
		for i := range c.size.singles {
			if create {
				if _, err := c.create(ctx, s, i); err != nil {
					return t, err
				}
			}
			select {
			case <-time.After(quietFor):
			case <-ctx.Done():
				return t, ctx.Err()
			}
		}
		after, err := c.trafficNow(ctx)
		return traffic{after.messages - before.messages, after.bytes - before.bytes}, err
	}
	with, err := during(true)
	if err != nil {
		return t, err
	}
	without, err := during(false)
	count := float64(c.size.singles)
	return traffic{(with.messages - without.messages) / count, (with.bytes - without.bytes) / count}, err
}

// countMessages counts the messages for a port in VPCs of few and of all hosts, with few and with many ports. Between
// the two it fills the large VPC.
func (c *cluster) countMessages(ctx context.Context) error {
	if err := countBytes(ctx); err != nil {
		return err
	}
	few, err := c.perCreate(ctx, c.few)
	if err != nil {
		return err
	}
	small, err := c.perCreate(ctx, c.small)
	if err != nil {
		return err
	}
	if err := c.fillLarge(ctx); err != nil {
		return err
	}
	large, err := c.perCreate(ctx, c.large)
	if err != nil {
		return err
	}
	c.results.Ours("messages hosts", small.messages)
	c.results.Peer("messages hosts", few.messages)
	c.results.Ours("bytes hosts", small.bytes)
	c.results.Peer("bytes hosts", few.bytes)
	c.results.Ours("messages ports", large.messages)
	c.results.Peer("messages ports", small.messages)
	c.results.Ours("bytes ports", large.bytes)
	c.results.Peer("bytes ports", small.bytes)
	report.Say("for one port: %.1f messages of 5 hosts, %.1f of all, %.1f with many ports; %.0f, %.0f, %.0f bytes",
		few.messages, small.messages, large.messages, few.bytes, small.bytes, large.bytes)
	return commands(ctx, "iptables-nft -F OUTPUT")
}
