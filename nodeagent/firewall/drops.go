package firewall

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/vishvananda/netns"
)

// Drops are numbers of dropped packets of a VPC by reason, IPv4 and IPv6 together. They begin at 0 again when somebody
// else deletes the rules that count.
type Drops struct {
	Spoof   uint64 // forged frames, and frames that only the network itself may send
	Group   uint64 // not permitted by a security group
	Invalid uint64 // part of no known connection
	Closed  uint64 // to the network itself, which answers only DHCP, DNS, metadata and ping
}

// Drops reads the counters of the namespace ns. They are 0 before the first Set.
func (f *Firewall) Drops(ctx context.Context, ns netns.NsHandle) (Drops, error) {
	ctx, cancel := context.WithTimeout(ctx, f.timeout)
	defer cancel()
	var d Drops
	if err := within(ns, func() error { return f.readDrops(ctx, &d) }); err != nil {
		return Drops{}, fmt.Errorf("count dropped packets: %w", err)
	}
	return d, nil
}

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
			if c.Name == "spoof" && c.Packets != nil {
				d.Spoof = *c.Packets
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
// a rule is a line such as "[17:1020] -A trivet-deny -j DROP".
func (d *Drops) addChains(save string) {
	for line := range strings.Lines(save) {
		fields := strings.Fields(line)
		if len(fields) < 3 || fields[1] != "-A" {
			continue
		}
		packets, _, _ := strings.Cut(strings.TrimPrefix(fields[0], "["), ":")
		n, err := strconv.ParseUint(packets, 10, 64)
		if err != nil {
			continue
		}
		switch fields[2] {
		case denyChain:
			d.Group += n
		case invalidChain:
			d.Invalid += n
		case closedChain:
			d.Closed += n
		}
	}
}
