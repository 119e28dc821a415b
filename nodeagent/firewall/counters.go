package firewall

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// Counters are the measurements of a VPC on this host that the agent exports.
type Counters struct {
	Drops Drops
	// Connections is the number of tracked connections. At ConnectionLimit, the kernel evicts a connection that has not
	// been answered for each new one, and drops the new connection's packet if it finds none.
	Connections, ConnectionLimit uint64
}

// Drops are numbers of dropped packets of a VPC by reason, IPv4 and IPv6 together. A number begins at 0 again when the
// rules that count are replaced, because they were changed by hand or another version of the agent has other rules.
type Drops struct {
	Spoof      uint64 // forged frames, and frames that only the network itself may send
	Unassigned uint64 // to a device on a bridge that is not yet, or no longer, a port of the VPC
	Group      uint64 // not permitted by a security group
	Invalid    uint64 // part of no known connection
	Closed     uint64 // to the network itself, which answers only DHCP, DNS, metadata and ping
	Denied     uint64 // to a prefix in Options.Denied or an address in HostVPC.Denied
	Full       uint64 // dropped by connection tracking itself, most often because its table is full
}

// Counters reads the counters of the namespace ns. The drops are 0 before the first Set.
func (f *Firewall) Counters(ctx context.Context, ns netns.NsHandle) (Counters, error) {
	ctx, cancel := context.WithTimeout(ctx, f.options.Timeout)
	defer cancel()
	var c Counters
	err := nsthread.In(ns, func() error {
		if err := f.readDrops(ctx, &c.Drops); err != nil {
			return err
		}
		return c.readConntrack()
	})
	if err != nil {
		return Counters{}, fmt.Errorf("read counters: %w", err)
	}
	return c, nil
}

// readConntrack reads the counters of connection tracking in the calling thread's network namespace.
func (c *Counters) readConntrack() error {
	var err error
	if c.Connections, err = readNumber(connectionCount); err != nil {
		return err
	}
	if c.ConnectionLimit, err = readNumber("/proc/sys/net/netfilter/nf_conntrack_max"); err != nil {
		return err
	}
	stat, err := os.ReadFile("/proc/thread-self/net/stat/nf_conntrack")
	if err != nil {
		return err
	}
	c.Drops.Full = sumColumn(string(stat), "drop")
	return nil
}

// readNumber reads a file that contains one decimal number.
func readNumber(path string) (uint64, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
}

// sumColumn returns the sum of a column of hexadecimal numbers, one for each CPU, below a line with the columns' names.
func sumColumn(stat, name string) uint64 {
	head, rows, _ := strings.Cut(stat, "\n")
	column := slices.Index(strings.Fields(head), name)
	var sum uint64
	for row := range strings.Lines(rows) {
		if fields := strings.Fields(row); column >= 0 && column < len(fields) {
			n, _ := strconv.ParseUint(fields[column], 16, 64)
			sum += n
		}
	}
	return sum
}

// readDrops reads the counters of the rules in the calling thread's network namespace.
func (f *Firewall) readDrops(ctx context.Context, d *Drops) error {
	nft, err := f.nft.get()
	if err != nil {
		return err
	}
	defer f.nft.put(nft)
	tables, err := listBridge(ctx)
	if err != nil {
		return err
	}
	if len(tables.structure) > 0 {
		counters, err := nft.ListCounters(ctx)
		if err != nil {
			return err
		}
		for _, c := range counters {
			switch {
			case c.Packets == nil:
			case c.Name == "spoof":
				d.Spoof = *c.Packets
			case c.Name == "unassigned":
				d.Unassigned = *c.Packets
			}
		}
	}
	for i := range f.families {
		save, err := run(ctx, "", f.families[i].program+"-save", "-c", "-t", "filter")
		if err != nil {
			return err
		}
		d.addChains(save)
	}
	return nil
}

// addChains adds the counters of the chains that drop packets, from the output of iptables-save with counters, in which
// a rule is a line such as "[17:1020] -A trivet-norule -j DROP".
func (d *Drops) addChains(save string) {
	for line := range strings.Lines(save) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[1] != "-A" || !strings.HasSuffix(strings.TrimSpace(line), "-j DROP") {
			continue
		}
		packets, _, _ := strings.Cut(strings.TrimPrefix(fields[0], "["), ":")
		n, err := strconv.ParseUint(packets, 10, 64)
		if err != nil {
			continue
		}
		switch fields[2] {
		case noRuleChain:
			d.Group += n
		case invalidChain:
			d.Invalid += n
		case closedChain:
			d.Closed += n
		case deniedChain:
			d.Denied += n
		}
	}
}
