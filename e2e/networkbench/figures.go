package main

import (
	"context"
	"os/exec"
	"strings"

	"github.com/trivet-cloud/trivet/e2e/bench/table"
	"github.com/trivet-cloud/trivet/e2e/kvbench/verdict"
)

// none is the target of a line without a target: it explains other lines.
var none = verdict.Target{}

// tables holds all lines. The targets come from the design.
var tables = []table.Table{
	{Peer: "plain Linux", Lines: []table.Line{
		table.NewLine("rules", "apply", "apply 10,000 rules to a new VPC, against iptables once for each rule", "s", table.AtMost(0.01)),
		table.NewLine("attach", "attach p50", "attach a port, against ip(8): p50", "ms", table.AtMost(0.2)),
		table.NewLine("attach", "attach p99", "attach a port, against ip(8): p99", "ms", none),
		table.NewLine("attach", "attach spread", "attach a port: our p99 divided by our p50", "", table.Within(5)),
		table.NewLine("packets", "established", "CPU per packet of an established flow, one host, all filters, against a plain bridge", "ns", table.AtMost(1.5)),
		table.NewLine("packets", "vxlan", "CPU per packet of an established flow, two hosts, all filters, against VXLAN without filters", "ns", table.AtMost(1.35)),
		table.NewLine("streams", "tcp cpu", "CPU per GB of TCP, one host, all filters, against a plain bridge", "s", table.AtMost(1.1)),
		table.NewLine("streams", "tcp rate", "… throughput", "Gbit/s", none),
		table.NewLine("streams", "tcp vxlan cpu", "CPU per GB of TCP, two hosts, all filters, against VXLAN without filters", "s", table.AtMost(1.35)),
		table.NewLine("streams", "tcp vxlan rate", "… throughput", "Gbit/s", none),
		table.NewLine("guests", "guests", "TCP between two emulated guests on one host, all filters, against a plain bridge: throughput", "Mbit/s", none),
	}},
	{Peer: "smaller VPC", Lines: []table.Line{
		table.NewLine("rules", "rule", "change a rule, 1,000 ports on the host, each with a group of its own, against 100", "ms", table.AtMost(2)),
		table.NewLine("rules", "rule none", "… resync without a change", "ms", none),
		table.NewLine("rules", "rule shared", "change a rule, 1,000 ports on the host that share 10 groups, against 100", "ms", table.AtMost(2)),
		table.NewLine("rules", "rule shared none", "… resync without a change", "ms", none),
		table.NewLine("rules", "member", "add a member to a remote group with 10,000 members, against 100", "ms", table.AtMost(1.5)),
		table.NewLine("rules", "member time", "add a member to a remote group with 10,000 members: our time", "ms", table.Within(1)),
		table.NewLine("rules", "member none", "resync without a change with a remote group of 10,000 members, against 100", "ms", none),
		table.NewLine("packets", "first group", "CPU per packet of an unanswered flow, remote group with 10,000 members, against 10", "ns", table.AtMost(1.1)),
		table.NewLine("packets", "first ports", "CPU per packet of an unanswered flow, 1,000 other ports that share 10 groups of 10 rules, against none", "ns", table.AtMost(1.3)),
		table.NewLine("packets", "first own", "CPU per packet of an unanswered flow, 1,000 other ports with a group of their own, against none", "ns", table.AtMost(1.3)),
		table.NewLine("agent", "agent memory", "resident memory of the agent's networks, 1,000 ports with taps, against 10", "MB", none),
		table.NewLine("agent", "agent anonymous", "… anonymous memory", "MB", none),
		table.NewLine("agent", "agent idle", "… CPU between resyncs", "% of a core", none),
		table.NewLine("agent", "agent resync", "… CPU time of a resync, programs that it runs included", "ms", none),
		table.NewLine("agent", "agent start", "… from the snapshot until all taps are up", "s", none),
	}},
	{Peer: "100 ports", Lines: []table.Line{
		table.NewLine("controlplane", "create p50", "create a port in a VPC with 10,000 ports that 50 of 50 hosts have, 50 creates/s, against one with 100 ports: p50", "ms", none),
		table.NewLine("controlplane", "create p99", "… p99", "ms", table.Within(50)),
		table.NewLine("controlplane", "messages ports", "messages to all hosts for one more port, VPC with 10,000 ports on 50 of 50 hosts", "", table.Within(50)),
		table.NewLine("controlplane", "bytes ports", "… bytes, with TLS and TCP headers and acknowledgments", "B", none),
	}},
	{Peer: "5 hosts", Lines: []table.Line{
		table.NewLine("controlplane", "messages hosts", "messages to all hosts for one more port, VPC that 50 of 50 hosts have, against one that 5 have", "", none),
		table.NewLine("controlplane", "bytes hosts", "… bytes, with TLS and TCP headers and acknowledgments", "B", none),
	}},
	{Peer: "start", Lines: []table.Line{
		table.NewLine("controlplane", "fill", "create 10,000 ports, 32 callers", "/s", none),
		table.NewLine("controlplane", "memory", "resident memory of the three members, 10,000 ports and 50 hosts", "MB", none),
		table.NewLine("controlplane", "anonymous", "… anonymous memory", "MB", none),
		table.NewLine("controlplane", "cpu", "members' CPU per port that is created, 50 hosts", "ms", none),
	}},
}

// text returns the tables, a summary of the verdicts, and the failures. If unusable is not "", it is printed as the
// reason why there are no verdicts.
func (b *bench) text(unusable string) string {
	return b.results.Text(tables, b.parts, unusable) + b.Remark(unusable)
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
