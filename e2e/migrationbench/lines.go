package main

import (
	"fmt"

	"github.com/trivet-cloud/trivet/e2e/bench/table"
	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// kinds are the disks of the guests that are moved.
var kinds = []struct{ name, what string }{
	{"local", "a disk on the host, which is copied"},
	{"shared", "a volume that both hosts can use"},
}

// sizes are the numbers of MiB of memory of the guests.
var sizes = []int{256, 1024}

// The peers. The name is a part of the IDs of lines.
const (
	byHand     = "hand"
	byHandLive = "live"
	byVirsh    = "virsh"
)

// tables returns all lines, one table for each peer.
func tables() []table.Table {
	return []table.Table{
		{Peer: "QEMU by hand, guest stopped first", Lines: lines(byHand)},
		{Peer: "`virsh migrate`, guest stopped first", Lines: lines(byVirsh)},
		{Peer: "QEMU by hand, guest runs", Lines: lines(byHandLive)},
	}
}

func lines(peer string) (all []table.Line) {
	for _, k := range kinds {
		for _, size := range sizes {
			what := fmt.Sprintf("guest of %d MiB with %s", size, k.what)
			id := lineID(peer, k.name, size)
			all = append(all,
				table.NewLine(k.name, id+" total", what+": time until it runs at the target", "ms", verdict.Target{}),
				table.NewLine(k.name, id+" blackout", what+": longest time between two replies to a neighbour's ping", "ms", verdict.Target{}),
				table.NewLine(k.name, id+" paused", what+": time for which the guest was stopped", "ms", verdict.Target{}))
		}
	}
	return all
}

func lineID(peer, kind string, size int) string { return fmt.Sprintf("%s %s %d", peer, kind, size) }

// add adds the figures of one move. The peer "" is Trivet, whose figures are in the tables of all peers.
func add(f table.Figures, peer, kind string, size int, m move) {
	peers := []string{peer}
	if peer == "" {
		peers = []string{byHand, byVirsh, byHandLive}
	}
	for _, p := range peers {
		id := lineID(p, kind, size)
		f.Add(id+" total", peer != "", milliseconds(m.total))
		f.Add(id+" blackout", peer != "", milliseconds(m.blackout))
		if m.paused > 0 {
			f.Add(id+" paused", peer != "", milliseconds(m.paused))
		}
	}
}
