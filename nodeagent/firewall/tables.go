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

// family has the programs of iptables for one IP version.
type family struct {
	program string // such as iptables-nft
	hooks   *iptables.IPTables
}

func newFamily(program string, protocol iptables.Protocol) (family, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return family{}, err
	}
	hooks, err := iptables.New(iptables.IPFamily(protocol), iptables.Path(path), iptables.Timeout(lockSeconds))
	if err != nil {
		return family{}, fmt.Errorf("use %s: %w", program, err)
	}
	return family{path, hooks}, nil
}

// kernelTable is the table "filter" of one family as the kernel has it.
type kernelTable struct {
	chains   map[string][]string // rules without "-A" and the name of the chain
	policies map[string]string   // of the built-in chains
}

// hooks are the built-in chains that call the package's chains. Their policy is DROP, so that nothing is forwarded if
// the rules are missing.
var hooks = []struct{ builtin, target string }{{"FORWARD", forwardChain}, {"INPUT", inputChain}}

// applyTable makes the chains of one family equal to want. It writes the changed chains in one call, which the kernel
// applies as a whole, and then repairs the hooks if necessary.
func (f *Firewall) applyTable(ctx context.Context, fam *family, want table, r *Result) error {
	out, err := run(ctx, "", fam.program+"-save", "-t", "filter")
	if err != nil {
		return err
	}
	have, err := f.names.parseTable(out)
	if err != nil {
		return fmt.Errorf("read the rules of %s: %w", fam.program, err)
	}
	if text := restoreText(have, want); text != "" {
		if _, err := run(ctx, text, fam.program+"-restore", "--noflush", "-w", strconv.Itoa(lockSeconds)); err != nil {
			return err
		}
		r.Writes++
		r.Restores++
	}
	for _, hook := range hooks {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := fam.repairHook(have, hook.builtin, "-j "+hook.target, hook.target, r); err != nil {
			return fmt.Errorf("call %s from %s: %w", hook.target, hook.builtin, err)
		}
	}
	return nil
}

// repairHook makes the jump to target the first rule of a built-in chain, and DROP its policy. It does not change the
// other rules of the chain.
func (fam *family) repairHook(have kernelTable, builtin, rule, target string, r *Result) error {
	rules := have.chains[builtin]
	if len(rules) == 0 || rules[0] != rule {
		for range count(rules, rule) {
			if err := fam.hooks.Delete("filter", builtin, "-j", target); err != nil {
				return err
			}
			r.Writes++
		}
		if err := fam.hooks.Insert("filter", builtin, 1, "-j", target); err != nil {
			return err
		}
		r.Writes++
	}
	if have.policies[builtin] != "DROP" {
		if err := fam.hooks.ChangePolicy("filter", builtin, "DROP"); err != nil {
			return err
		}
		r.Writes++
	}
	return nil
}

func count(list []string, s string) int {
	n := 0
	for _, other := range list {
		if other == s {
			n++
		}
	}
	return n
}

// restoreText returns the input for iptables-restore that changes the package's chains from have to want. It is empty
// if they are equal.
func restoreText(have kernelTable, want table) string {
	var declare, add, remove strings.Builder
	wanted := map[string]bool{}
	for _, c := range want.chains {
		wanted[c.name] = true
		rules, exists := have.chains[c.name]
		if exists && slices.Equal(rules, c.rules) {
			continue
		}
		fmt.Fprintf(&declare, ":%s - [0:0]\n", c.name)
		for _, rule := range c.rules {
			fmt.Fprintf(&add, "-A %s %s\n", c.name, rule)
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
		fmt.Fprintf(&declare, ":%s - [0:0]\n", name) // empties the chain, so that it refers to no other obsolete chain
		fmt.Fprintf(&remove, "-X %s\n", name)
	}
	if declare.Len() == 0 {
		return ""
	}
	return "*filter\n" + declare.String() + add.String() + remove.String() + "COMMIT\n"
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
