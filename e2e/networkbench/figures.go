package main

import (
	"context"
	"os/exec"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// line is a line of a printed table. If the field what begins with "… ", its rest is printed after the description of
// the nearest line above that does not.
type line struct {
	part, id, what, unit string
	target               verdict.Target
}

// table holds the lines of one printed table. It has one column for the figures of Trivet and one for those of the
// peer. The field peer is the heading of the second one.
type table struct {
	peer  string
	lines []line
}

// within returns a target with an upper bound on our figure, in the row's unit, regardless of the peer.
func within(v float64) verdict.Target { return verdict.Within(v, v) }

// atMost returns a target with an upper bound on the ratio of our figure to the peer's.
func atMost(v float64) verdict.Target { return verdict.AtMost(v, v) }

// none is the target of a line without a target: it explains other lines.
var none = verdict.Target{}

// tables holds all lines. The targets come from the design.
var tables = []table{
	{"plain Linux", []line{
		{"rules", "apply", "apply 10,000 rules to a new VPC, against iptables once for each rule", "s", atMost(0.01)},
		{"attach", "attach p50", "attach a port, against ip(8): p50", "ms", atMost(0.2)},
		{"attach", "attach p99", "attach a port, against ip(8): p99", "ms", none},
		{"attach", "attach spread", "attach a port: our p99 divided by our p50", "", within(5)},
		{"packets", "established", "CPU per packet of an established flow, one host, all filters, against a plain bridge", "ns", atMost(1.5)},
		{"packets", "vxlan", "CPU per packet of an established flow, two hosts, all filters, against VXLAN without filters", "ns", atMost(1.35)},
		{"streams", "tcp cpu", "CPU per GB of TCP, one host, all filters, against a plain bridge", "s", atMost(1.1)},
		{"streams", "tcp rate", "… throughput", "Gbit/s", none},
		{"streams", "tcp vxlan cpu", "CPU per GB of TCP, two hosts, all filters, against VXLAN without filters", "s", atMost(1.35)},
		{"streams", "tcp vxlan rate", "… throughput", "Gbit/s", none},
		{"guests", "guests", "TCP between two emulated guests on one host, all filters, against a plain bridge: throughput", "Mbit/s", none},
	}},
	{"smaller VPC", []line{
		{"rules", "rule", "change a rule, 1,000 ports on the host, each with a group of its own, against 100", "ms", atMost(2)},
		{"rules", "rule none", "… resync without a change", "ms", none},
		{"rules", "rule shared", "change a rule, 1,000 ports on the host that share 10 groups, against 100", "ms", atMost(2)},
		{"rules", "rule shared none", "… resync without a change", "ms", none},
		{"rules", "member", "add a member to a remote group with 10,000 members, against 100", "ms", atMost(1.5)},
		{"rules", "member time", "add a member to a remote group with 10,000 members: our time", "ms", within(1)},
		{"rules", "member none", "resync without a change with a remote group of 10,000 members, against 100", "ms", none},
		{"packets", "first group", "CPU per packet of an unanswered flow, remote group with 10,000 members, against 10", "ns", atMost(1.1)},
		{"packets", "first ports", "CPU per packet of an unanswered flow, 1,000 other ports that share 10 groups of 10 rules, against none", "ns", atMost(1.3)},
		{"packets", "first own", "CPU per packet of an unanswered flow, 1,000 other ports with a group of their own, against none", "ns", atMost(1.3)},
		{"agent", "agent memory", "resident memory of the agent's networks, 1,000 ports with taps, against 10", "MB", none},
		{"agent", "agent anonymous", "… anonymous memory", "MB", none},
		{"agent", "agent idle", "… CPU between resyncs", "% of a core", none},
		{"agent", "agent resync", "… CPU time of a resync, programs that it runs included", "ms", none},
		{"agent", "agent start", "… from the snapshot until all taps are up", "s", none},
	}},
	{"100 ports", []line{
		{"controlplane", "create p50", "create a port in a VPC with 10,000 ports that 50 of 50 hosts have, 50 creates/s, against one with 100 ports: p50", "ms", none},
		{"controlplane", "create p99", "… p99", "ms", within(50)},
		{"controlplane", "messages ports", "messages to all hosts for one more port, VPC with 10,000 ports on 50 of 50 hosts", "", within(50)},
		{"controlplane", "bytes ports", "… bytes, with TLS and TCP headers and acknowledgments", "B", none},
	}},
	{"5 hosts", []line{
		{"controlplane", "messages hosts", "messages to all hosts for one more port, VPC that 50 of 50 hosts have, against one that 5 have", "", none},
		{"controlplane", "bytes hosts", "… bytes, with TLS and TCP headers and acknowledgments", "B", none},
	}},
	{"start", []line{
		{"controlplane", "fill", "create 10,000 ports, 32 callers", "/s", none},
		{"controlplane", "memory", "resident memory of the three members, 10,000 ports and 50 hosts", "MB", none},
		{"controlplane", "anonymous", "… anonymous memory", "MB", none},
		{"controlplane", "cpu", "members' CPU per port that is created, 50 hosts", "ms", none},
	}},
}

// figures are the figures of a line, one per round.
type figures struct {
	ours, peer []float64
	note       string
}

// results maps the IDs of lines to their figures.
type results map[string]*figures

func (r results) of(id string) *figures {
	if r[id] == nil {
		r[id] = &figures{}
	}
	return r[id]
}

// ours adds our figure of a round, and peer that of the peer.
func (r results) ours(id string, v float64) { f := r.of(id); f.ours = append(f.ours, v) }
func (r results) peer(id string, v float64) { f := r.of(id); f.peer = append(f.peer, v) }

// add adds a figure, of the peer if isPeer is true.
func (r results) add(id string, isPeer bool, v float64) {
	if isPeer {
		r.peer(id, v)
	} else {
		r.ours(id, v)
	}
}

// note sets the text of a line's last column.
func (r results) note(id, text string) { r.of(id).note = text }

// rows returns the lines of a table that belong to the given parts. It omits lines that were not measured and have no
// target.
func (r results) rows(t table, parts []string) (rows []verdict.Row) {
	subject := ""
	for _, l := range t.lines {
		what, more := strings.CutPrefix(l.what, "… ")
		if more {
			what = subject + ": " + what
		} else {
			subject = strings.TrimSuffix(what, ": p50")
		}
		if !slices.Contains(parts, l.part) {
			continue
		}
		f := r.of(l.id)
		if len(f.ours) > 0 || len(f.peer) > 0 || l.target != none {
			rows = append(rows, verdict.Row{What: what, Unit: l.unit, Target: l.target, Ours: f.ours, Peer: f.peer, Note: f.note})
		}
	}
	return rows
}

// text returns the tables, a summary of the verdicts, and the failures. If unusable is not "", it is printed as the
// reason why there are no verdicts.
func (b *bench) text(unusable string) string {
	var all []verdict.Row
	text := ""
	for _, t := range tables {
		rows := b.results.rows(t, b.parts)
		if len(rows) == 0 {
			continue
		}
		if unusable != "" {
			rows = verdict.WithoutTargets(rows)
		}
		text += "\n" + verdict.Markdown(t.peer, rows)
		all = append(all, rows...)
	}
	if unusable == "" {
		text += "\n" + verdict.Summary(all) + "\n"
	}
	return text + b.Remark(unusable)
}

// versions returns the versions of the programs that the agent or the benchmark runs. A program that is missing is left
// out.
func versions(ctx context.Context) (all []string) {
	for _, command := range [][]string{
		{"iptables-nft", "--version"}, {"nft", "--version"}, {"ip", "-V"}, {"iperf3", "--version"}, {"qemu-system-x86_64", "--version"},
	} {
		out, err := exec.CommandContext(ctx, command[0], command[1:]...).Output()
		if err == nil {
			first, _, _ := strings.Cut(string(out), "\n")
			all = append(all, strings.TrimSpace(first))
		}
	}
	return all
}
