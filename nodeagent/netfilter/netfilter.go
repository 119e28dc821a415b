// Package netfilter contains what the packages that translate addresses share: [Table] replaces an nftables table as a
// whole when it differs from the wanted one, and [DeleteConnections] deletes tracked connections.
//
// # Decisions
//
//   - A table is replaced in one transaction, so the rules of the old and the new table never apply to a packet
//     together.
//   - A table is compared by the hashes of its rules. The hash of a rule's text is the rule's comment. The rules
//     themselves cannot be compared, because nft prints them in a form that depends on its version. Callers put address
//     lists into anonymous sets and maps: the kernel cannot change these, so the hash of the rule covers them too.
//   - nft is run as a program. The library google/nftables fails with ENOBUFS for transactions of some hundred rules.
//
// The package knows neither VPCs nor what the rules are for. Package firewall does not use it, because its bridge table
// has large named sets that change element by element.
package netfilter

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
)

// Chain is a chain of nftables. It is a base chain if it has a Hook; Kind, Priority and Policy are those of base chains
// only.
type Chain struct {
	Name, Kind, Hook string
	Priority         int
	Policy           string
	Rules            []string
}

// Table names an nftables table.
type Table struct{ Family, Name string }

// String returns the family and the name, as nft takes them.
func (t Table) String() string { return t.Family + " " + t.Name }

// structure returns the lines that list returns for a table with these chains.
func structure(chains []Chain) []string {
	lines := []string{}
	for i := range chains {
		c := &chains[i]
		lines = append(lines, chainLine(c.Name, c.Kind, c.Hook, c.Priority, c.Policy))
		for i, rule := range c.Rules {
			lines = append(lines, fmt.Sprintf("rule %s %d %s", c.Name, i, ruleComment(rule)))
		}
	}
	slices.Sort(lines)
	return lines
}

func chainLine(name, kind, hook string, priority int, policy string) string {
	if hook == "" {
		return "chain " + name
	}
	return fmt.Sprintf("chain %s %s %s %d %s", name, kind, hook, priority, policy)
}

func ruleComment(rule string) string {
	sum := sha256.Sum256([]byte(rule))
	return hex.EncodeToString(sum[:8])
}

// Script returns the input for nft that replaces the table.
func (t Table) Script(chains []Chain) string {
	var b strings.Builder
	fmt.Fprintf(&b, "add table %s\ndelete table %[1]s\nadd table %[1]s\n", t)
	for i := range chains { // before the rules, which may refer to any chain
		c := &chains[i]
		fmt.Fprintf(&b, "add chain %s %s", t, c.Name)
		if c.Hook != "" {
			fmt.Fprintf(&b, " { type %s hook %s priority %d; policy %s; }", c.Kind, c.Hook, c.Priority, c.Policy)
		}
		b.WriteByte('\n')
	}
	for i := range chains {
		for _, rule := range chains[i].Rules {
			fmt.Fprintf(&b, "add rule %s %s %s comment %q\n", t, chains[i].Name, rule, ruleComment(rule))
		}
	}
	return b.String()
}

// Set makes the table in the namespace equal to chains, in one transaction. It returns false if it wrote nothing,
// because the table was equal already.
func (t Table) Set(ctx context.Context, ns netns.NsHandle, chains []Chain) (changed bool, err error) {
	have, err := t.list(ctx, ns)
	if err != nil || have != nil && slices.Equal(have, structure(chains)) {
		return false, err
	}
	_, err = run(ctx, ns, t.Script(chains), "-f", "-")
	return err == nil, err
}

// Delete deletes the table in the namespace. It returns false if there was none.
func (t Table) Delete(ctx context.Context, ns netns.NsHandle) (changed bool, err error) {
	have, err := t.list(ctx, ns)
	if err != nil || have == nil {
		return false, err
	}
	_, err = run(ctx, ns, "", "delete", "table", t.Family, t.Name)
	return err == nil, err
}

// list returns a line for each object in the table, sorted, or nil if there is no table.
func (t Table) list(ctx context.Context, ns netns.NsHandle) ([]string, error) {
	out, err := run(ctx, ns, "", "--json", "--numeric", "list", "table", t.Family, t.Name)
	// nft has no exit status of its own for an absent table.
	if errors.As(err, new(*exec.ExitError)) && strings.Contains(strings.ToLower(err.Error()), unix.ENOENT.Error()) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list struct {
		Nftables []map[string]object `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, fmt.Errorf("list rules: %w", err)
	}
	lines := []string{}
	count := map[string]int{}
	for _, entry := range list.Nftables {
		for kind, o := range entry {
			switch kind {
			case "metainfo", "table":
			case "chain":
				lines = append(lines, chainLine(o.Name, fmt.Sprint(o.Type), o.Hook, o.Priority, o.Policy))
			case "rule":
				lines = append(lines, fmt.Sprintf("rule %s %d %s", o.Chain, count[o.Chain], o.Comment))
				count[o.Chain]++
			default:
				lines = append(lines, kind+" "+o.Name)
			}
		}
	}
	slices.Sort(lines)
	return lines, nil
}

// object has the fields that the package reads of the objects in nft's JSON output (libnftables-json(5)).
type object struct {
	Name     string `json:"name"`
	Chain    string `json:"chain"`
	Comment  string `json:"comment"`
	Type     any    `json:"type"` // a string for chains
	Hook     string `json:"hook"`
	Priority int    `json:"prio"`
	Policy   string `json:"policy"`
}

// run runs nft in the namespace and returns its output.
func run(ctx context.Context, ns netns.NsHandle, input string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	err := nsthread.In(ns, func() error {
		cmd := exec.CommandContext(ctx, "nft", args...)
		cmd.WaitDelay = time.Second
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
		return cmd.Run()
	})
	if err != nil {
		return "", fmt.Errorf("run nft: %w: %s", err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
