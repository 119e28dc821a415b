package main

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// rulesPerGroup is the number of rules of a group that is as large as the API permits.
const rulesPerGroup = 200

// filtered is a network namespace with the packet filter of a VPC. It has no devices: the packet filter names them, and
// the kernel accepts names of devices that do not exist.
type filtered struct {
	name   string
	ns     netns.NsHandle
	filter *firewall.Firewall
	vpc    cloud.HostVPC
}

func newFiltered(name string, vpc cloud.HostVPC) (f *filtered, err error) {
	f = &filtered{name: prefix + name, vpc: vpc}
	if f.filter, err = firewall.New(firewall.Options{Trusted: []string{"vx*"}}); err != nil {
		return nil, err
	}
	if _, err := nsthread.Create(f.name); err != nil {
		return nil, err
	}
	f.ns, err = netns.GetFromName(f.name)
	return f, err
}

func (f *filtered) close() error { return errors.Join(f.ns.Close(), netns.DeleteNamed(f.name)) }

// set applies the VPC as the agent does at first and in each resync, and returns how long that took.
func (f *filtered) set(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	_, err := f.filter.Set(ctx, f.ns, f.vpc)
	return time.Since(began), err
}

// update applies the VPC as the agent does after a change of a record, and returns how long that took.
func (f *filtered) update(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	_, err := f.filter.Update(ctx, f.ns, f.vpc)
	return time.Since(began), err
}

// measureRules measures how long it takes to apply a packet filter with many rules, and to apply small changes.
func measureRules(ctx context.Context, b *bench) (err error) {
	defer func() { err = errors.Join(err, removeNamespaces()) }()
	if err := b.InTurn(ctx, b.rounds,
		func(int) error { return applyAtOnce(ctx, b) },
		func(int) error { return applyOneByOne(ctx, b) },
	); err != nil {
		return fmt.Errorf("apply rules: %w", err)
	}
	b.results.Note("apply", fmt.Sprintf(
		"iptables: the mean of %d calls each with 0, 25, 50 and 75 %% of the rules in the table, times %d",
		b.size.samples, b.size.rules))
	if err := measureChanges(ctx, b, "rule", ownGroups, changeRule); err != nil {
		return fmt.Errorf("change a rule: %w", err)
	}
	if err := measureChanges(ctx, b, "rule shared", sharedGroups, changeRule); err != nil {
		return fmt.Errorf("change a shared rule: %w", err)
	}
	members := func(name string, count int) (*filtered, error) {
		if count == b.size.ports {
			count = b.size.members
		}
		return remoteGroup(name, count)
	}
	if err := measureChanges(ctx, b, "member", members, addMember); err != nil {
		return fmt.Errorf("add a member: %w", err)
	}
	for _, v := range b.results.Of("member").Ours {
		b.results.Ours("member time", v)
	}
	return nil
}

// manyRules returns a VPC with a number of rules, in groups of rulesPerGroup rules. Each group has one port.
func manyRules(rules int) cloud.HostVPC {
	vpc := newVPC("vpc", 1)
	for i := range rules / rulesPerGroup {
		id := cloud.SecurityGroupID(fmt.Sprintf("group-%03d", i))
		// One rule of each group is for egress.
		vpc.Groups = append(vpc.Groups, groupOf(id, rulesPerGroup-1, ""))
		vpc.Subnets[0].Ports = append(vpc.Subnets[0].Ports, portOf(firstPort+i, id))
	}
	return vpc
}

// applyAtOnce measures the first application of a VPC with many rules.
func applyAtOnce(ctx context.Context, b *bench) error {
	f, err := newFiltered("rules", manyRules(b.size.rules))
	if err != nil {
		return err
	}
	took, err := f.set(ctx)
	if err = errors.Join(err, f.close()); err != nil {
		return err
	}
	b.results.Ours("apply", took.Seconds())
	report.Say("%d rules at once: %s", b.size.rules, took)
	return nil
}

// applyOneByOne estimates how long it takes to append the same number of rules with one call of iptables for each. It
// makes a sample of these calls with tables of different sizes, because a call takes longer with a larger table.
func applyOneByOne(ctx context.Context, b *bench) error {
	name := prefix + "naive"
	if _, err := nsthread.Create(name); err != nil {
		return err
	}
	var total time.Duration
	calls := 0
	for quarter := range 4 {
		var table strings.Builder
		table.WriteString("*filter\n:sample - [0:0]\n")
		for i := range b.size.rules * quarter / 4 {
			fmt.Fprintf(&table, "-A sample -p tcp --dport %d -j ACCEPT\n", 1+i)
		}
		table.WriteString("COMMIT\n")
		err := nsthread.InNamed(name, func() error {
			fill := exec.CommandContext(ctx, "iptables-nft-restore")
			fill.Stdin = strings.NewReader(table.String())
			if out, err := fill.CombinedOutput(); err != nil {
				return fmt.Errorf("iptables-nft-restore: %w: %s", err, out)
			}
			for i := range b.size.samples {
				began := time.Now()
				line := fmt.Sprintf("iptables-nft -w -A sample -p tcp --dport %d -j ACCEPT", 20_000+i)
				if err := commands(ctx, line); err != nil {
					return err
				}
				total += time.Since(began)
				calls++
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	mean := total / time.Duration(calls)
	b.results.Peer("apply", (mean * time.Duration(b.size.rules)).Seconds())
	report.Say("iptables for one rule: %s", mean)
	return netns.DeleteNamed(name)
}

// ownGroups returns a VPC in which each port has a group of its own with 10 rules.
func ownGroups(name string, ports int) (*filtered, error) { return groupsOf(name, ports, ports) }

// sharedGroups returns a VPC whose ports share 10 groups of 10 rules.
func sharedGroups(name string, ports int) (*filtered, error) { return groupsOf(name, ports, 10) }

func groupsOf(name string, ports, groups int) (*filtered, error) {
	vpc := newVPC("vpc", 1)
	addPorts(&vpc, firstPort, ports, groups)
	return newFiltered(name, vpc)
}

// addPorts adds ports on the host, and groups of 10 rules. It assigns one group to each port, in turn.
func addPorts(vpc *cloud.HostVPC, first, ports, groups int) {
	for i := range groups {
		vpc.Groups = append(vpc.Groups, groupOf(cloud.SecurityGroupID(fmt.Sprintf("group-%04d", i)), 9, ""))
	}
	for i := range ports {
		id := cloud.SecurityGroupID(fmt.Sprintf("group-%04d", i%groups))
		vpc.Subnets[0].Ports = append(vpc.Subnets[0].Ports, portOf(first+i, id))
	}
}

// remoteGroup returns a VPC with two ports that permit everything from the members of a large group.
func remoteGroup(name string, members int) (*filtered, error) {
	vpc := newVPC("vpc", 1)
	vpc.Groups = []cloud.HostGroup{groupOf("web", 0, "many")}
	vpc.Subnets[0].Ports = []cloud.HostPort{portOf(firstPort, "web"), portOf(firstPort+1, "web")}
	vpc.Members = []cloud.GroupMembers{membersOf("many", firstPort, members)}
	return newFiltered(name, vpc)
}

// changeRule changes the port number of one rule of the first group. Each number yields another rule.
func changeRule(vpc *cloud.HostVPC, number int) {
	port := uint16(30_000 + number)
	rules := append([]cloud.Rule{}, vpc.Groups[0].Rules...)
	rules[1].Ports = cloud.PortRange{First: port, Last: port}
	vpc.Groups[0].Rules = rules
}

// addMember adds another member to the remote group.
func addMember(vpc *cloud.HostVPC, number int) {
	vpc.Members[0].Addresses = append(vpc.Members[0].Addresses, addressOf(40_000+number))
}

// measureChanges measures the median time of a change of a large VPC and of a small one, and of a resync without a
// change. The lines have the IDs id and id + " none". build gets b.size.ports or b.size.few as count.
func measureChanges(
	ctx context.Context, b *bench, id string, build func(name string, count int) (*filtered, error),
	change func(*cloud.HostVPC, int),
) (err error) {
	number := 0
	turn := func(f *filtered, isPeer bool) error {
		var changed, unchanged []float64
		for range b.size.changes {
			number++
			change(&f.vpc, number)
			took, err := f.update(ctx)
			if err != nil {
				return err
			}
			changed = append(changed, milliseconds(took))
			if took, err = f.set(ctx); err != nil {
				return err
			}
			unchanged = append(unchanged, milliseconds(took))
		}
		b.results.Add(id, isPeer, figure.Median(changed))
		b.results.Add(id+" none", isPeer, figure.Median(unchanged))
		return nil
	}
	large, err := build("large", b.size.ports)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, large.close()) }()
	small, err := build("small", b.size.few)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, small.close()) }()
	for _, f := range []*filtered{large, small} {
		if _, err := f.set(ctx); err != nil {
			return err
		}
	}
	if err := b.InTurn(ctx, b.rounds,
		func(int) error { return turn(large, false) },
		func(int) error { return turn(small, true) },
	); err != nil {
		return err
	}
	f := b.results.Of(id)
	report.Say("%s: %.2f ms, smaller VPC %.2f ms", id, figure.Median(f.Ours), figure.Median(f.Peer))
	return nil
}

func milliseconds(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e6 }
