package edge

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// tableName is the name of the package's nftables table, of family ip, in the edge namespace and in those of VPCs.
const tableName = "trivet-edge"

// chain is a base chain of nftables.
type chain struct {
	name, kind, hook string
	priority         int
	policy           string
	rules            []string
}

// structure describes the chains and rules in the form of listStructure. A rule is represented by the hash of its text,
// because nft prints rules in a normalized form that depends on its version.
func structure(chains []chain) []string {
	var lines []string
	for _, c := range chains {
		lines = append(lines, fmt.Sprintf("chain %s %s %s %d %s", c.name, c.kind, c.hook, c.priority, c.policy))
		for i, rule := range c.rules {
			lines = append(lines, fmt.Sprintf("rule %s %d %s", c.name, i, ruleComment(rule)))
		}
	}
	slices.Sort(lines)
	return lines
}

func ruleComment(rule string) string {
	sum := sha256.Sum256([]byte(rule))
	return hex.EncodeToString(sum[:8])
}

// script returns the input for nft that replaces the table.
func script(chains []chain) string {
	var b strings.Builder
	fmt.Fprintf(&b, "add table ip %s\ndelete table ip %[1]s\nadd table ip %[1]s\n", tableName)
	for _, c := range chains {
		fmt.Fprintf(&b, "add chain ip %s %s { type %s hook %s priority %d; policy %s; }\n",
			tableName, c.name, c.kind, c.hook, c.priority, c.policy)
		for _, rule := range c.rules {
			fmt.Fprintf(&b, "add rule ip %s %s %s comment %q\n", tableName, c.name, rule, ruleComment(rule))
		}
	}
	return b.String()
}

// setTable makes the package's table in the namespace equal to chains, in one transaction.
func (s *space) setTable(chains []chain) error {
	have, err := s.listStructure()
	if err != nil || slices.Equal(have, structure(chains)) {
		return err
	}
	if _, err := s.nft(script(chains), "-f", "-"); err != nil {
		return err
	}
	s.changed("nft replace table ip %s", tableName)
	return nil
}

// deleteTable deletes the package's table in the namespace if it exists.
func (s *space) deleteTable() error {
	have, err := s.listStructure()
	if err != nil || have == nil {
		return err
	}
	if _, err := s.nft("", "delete", "table", "ip", tableName); err != nil {
		return err
	}
	s.changed("nft delete table ip %s", tableName)
	return nil
}

// listStructure reads the package's table. It returns nil if there is no table.
func (s *space) listStructure() ([]string, error) {
	out, err := s.nft("", "--json", "--numeric", "list", "table", "ip", tableName)
	if errors.As(err, new(*exec.ExitError)) && s.ctx.Err() == nil {
		return nil, nil // nft has no exit status of its own for an absent table; a broken nft fails on the next write
	}
	if err != nil {
		return nil, err
	}
	var list struct {
		Nftables []map[string]nftObject `json:"nftables"`
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
				lines = append(lines, fmt.Sprintf("chain %s %s %s %d %s", o.Name, o.Type, o.Hook, o.Priority, o.Policy))
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

// nftObject has the fields that the package reads of the objects in nft's JSON output (libnftables-json(5)).
type nftObject struct {
	Name     string `json:"name"`
	Chain    string `json:"chain"`
	Comment  string `json:"comment"`
	Type     any    `json:"type"` // a string for chains
	Hook     string `json:"hook"`
	Priority int    `json:"prio"`
	Policy   string `json:"policy"`
}

// nft runs nft in the namespace and returns its output.
func (s *space) nft(input string, args ...string) (string, error) {
	var stdout, stderr bytes.Buffer
	err := s.in(func() error {
		cmd := exec.CommandContext(s.ctx, "nft", args...)
		cmd.WaitDelay = time.Second
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
		return cmd.Run()
	})
	if err != nil {
		return "", fmt.Errorf("run nft in %s: %w: %s", s.path, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
