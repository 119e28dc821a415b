package firewall

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/coreos/go-iptables/iptables"
)

// lockSeconds limits the time that iptables waits for the lock that it shares with other callers on the host.
const lockSeconds = 5

// family is one IP version with its program of iptables, such as iptables-nft. The names of the programs that save and
// restore tables begin with the same path.
type family struct {
	program string
	// policies sets the policies of the built-in chains.
	policies *iptables.IPTables
}

// newFamily returns a family whose program is found in PATH.
func newFamily(program string, protocol iptables.Protocol) (family, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return family{}, err
	}
	policies, err := iptables.New(iptables.IPFamily(protocol), iptables.Path(path), iptables.Timeout(lockSeconds))
	if err != nil {
		return family{}, fmt.Errorf("run %s: %w", path, err)
	}
	return family{path, policies}, nil
}

// kernelTable is the table "filter" of one family as the kernel has it.
type kernelTable struct {
	chains   map[string][]string // rules without "-A" and the name of the chain
	policies map[string]string   // of the built-in chains
}

// hooks are the built-in chains that call the package's chains. Their policy is DROP, so that nothing is forwarded if
// the rules are missing. The policy is set before any rule is written.
var hooks = []struct{ builtin, target string }{{"FORWARD", forwardChain}, {"INPUT", inputChain}}

// readTable returns the table "filter" of one family.
func (f *Firewall) readTable(ctx context.Context, fam *family) (kernelTable, error) {
	out, err := run(ctx, "", fam.program+"-save", "-t", "filter")
	if err != nil {
		return kernelTable{}, err
	}
	have, err := f.names.parseTable(out)
	if err != nil {
		return kernelTable{}, fmt.Errorf("read the rules of %s: %w", fam.program, err)
	}
	return have, nil
}

// kernel returns the table as the kernel has it after apply.
func (t *table) kernel() kernelTable {
	k := kernelTable{chains: make(map[string][]string, len(t.chains)+len(hooks)), policies: map[string]string{}}
	for _, hook := range hooks {
		k.chains[hook.builtin], k.policies[hook.builtin] = []string{"-j " + hook.target}, "DROP"
	}
	for _, c := range t.chains {
		k.chains[c.name] = c.rules
	}
	return k
}

// apply makes the chains of the family equal to want, and repairs the policies and the hooks. It writes all changes of
// rules in one call, which the kernel applies as a whole.
func (fam *family) apply(ctx context.Context, have kernelTable, want table, r *Result) error {
	for _, hook := range hooks {
		if have.policies[hook.builtin] == "DROP" {
			continue
		}
		if err := fam.policies.ChangePolicy("filter", hook.builtin, "DROP"); err != nil {
			return fmt.Errorf("set the policy of the chain %s: %w", hook.builtin, err)
		}
		r.Writes++
	}
	var in restoreInput
	in.addChains(have, want)
	in.addHooks(have)
	if in.empty() {
		return nil
	}
	if _, err := run(ctx, in.text(), fam.program+"-restore", "--noflush", "-w", strconv.Itoa(lockSeconds)); err != nil {
		return err
	}
	r.Writes++
	r.Restores++
	return nil
}

// restoreInput is the input of iptables-restore for the table "filter", in the order in which it takes effect.
type restoreInput struct{ declare, add, hook, remove strings.Builder }

func (in *restoreInput) empty() bool { return in.declare.Len() == 0 && in.hook.Len() == 0 }

func (in *restoreInput) text() string {
	return "*filter\n" + in.declare.String() + in.add.String() + in.hook.String() + in.remove.String() + "COMMIT\n"
}

// addChains adds the changes of the package's chains from have to want.
func (in *restoreInput) addChains(have kernelTable, want table) {
	wanted := make(map[string]bool, len(want.chains))
	for _, c := range want.chains {
		wanted[c.name] = true
		rules, exists := have.chains[c.name]
		if exists && slices.Equal(rules, c.rules) {
			continue
		}
		fmt.Fprintf(&in.declare, ":%s - [0:0]\n", c.name)
		for _, rule := range c.rules {
			fmt.Fprintf(&in.add, "-A %s %s\n", c.name, rule)
		}
	}
	var obsolete []string
	for name := range have.chains {
		if strings.HasPrefix(name, prefix) && !wanted[name] {
			obsolete = append(obsolete, name)
		}
	}
	slices.Sort(obsolete)
	for _, name := range obsolete {
		fmt.Fprintf(&in.declare, ":%s - [0:0]\n", name) // empties the chain, so that it refers to no other obsolete chain
		fmt.Fprintf(&in.remove, "-X %s\n", name)
	}
}

// addHooks adds the changes that make the jump to the package's chain the first rule of each built-in chain. The other
// rules of the built-in chains stay.
func (in *restoreInput) addHooks(have kernelTable) {
	for _, hook := range hooks {
		rules, jump := have.chains[hook.builtin], "-j "+hook.target
		if len(rules) > 0 && rules[0] == jump {
			continue
		}
		for _, rule := range rules {
			if rule == jump {
				fmt.Fprintf(&in.hook, "-D %s %s\n", hook.builtin, jump)
			}
		}
		fmt.Fprintf(&in.hook, "-I %s 1 %s\n", hook.builtin, jump)
	}
}

// protocolNames maps names of protocols that iptables-save prints to their numbers.
type protocolNames map[string]int

// readProtocolNames reads the names of a file in the format of protocols(5), which iptables-save uses too. A missing
// file has no names.
func readProtocolNames(path string) (protocolNames, error) {
	// Names that iptables prints for these protocols if the file does not have them.
	names := protocolNames{"esp": 50, "ah": 51, "icmpv6": 58, "mh": 135, "ipv6-mh": 135, "udplite": 136}
	for number, name := range matchNames {
		names[name] = number
	}
	file, err := os.Open(path)
	if os.IsNotExist(err) {
		return names, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		line, _, _ := strings.Cut(lines.Text(), "#")
		if fields := strings.Fields(line); len(fields) >= 2 {
			if number, err := strconv.Atoi(fields[1]); err == nil {
				names[fields[0]] = number
			}
		}
	}
	return names, lines.Err()
}

var protocolOption = regexp.MustCompile(`(^| )-p (\S+)`)

// parseTable parses the output of iptables-save for the table "filter", and converts names of protocols to those of
// protocolName.
func (names protocolNames) parseTable(save string) (kernelTable, error) {
	t := kernelTable{chains: map[string][]string{}, policies: map[string]string{}}
	for line := range strings.Lines(save) {
		line = strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, ":"):
			fields := strings.Fields(line[1:])
			if len(fields) < 2 {
				return t, fmt.Errorf("unexpected line %q", line)
			}
			t.chains[fields[0]] = nil
			t.policies[fields[0]] = fields[1]
		case strings.HasPrefix(line, "-A "):
			name, rule, _ := strings.Cut(line[len("-A "):], " ")
			rule = protocolOption.ReplaceAllStringFunc(rule, func(option string) string {
				at := strings.LastIndexByte(option, ' ') + 1
				if number, ok := names[option[at:]]; ok {
					return option[:at] + protocolName(number)
				}
				return option
			})
			t.chains[name] = append(t.chains[name], rule)
		}
	}
	return t, nil
}
