package firewall

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"

	"sigs.k8s.io/knftables"
)

const bridgeTableName = "trivet"

// Named counters of the bridge table.
var bridgeCounters = []string{"spoof", "unassigned"}

// nftPool holds values of knftables.Interface for the bridge table. One value runs one transaction at a time, so
// concurrent calls for different namespaces need different values. Making a value runs nft several times.
type nftPool struct {
	mu   sync.Mutex
	free []knftables.Interface // guarded by mu
}

func (p *nftPool) get() (knftables.Interface, error) {
	p.mu.Lock()
	if last := len(p.free) - 1; last >= 0 {
		nft := p.free[last]
		p.free = p.free[:last]
		p.mu.Unlock()
		return nft, nil
	}
	p.mu.Unlock()
	nft, err := knftables.New(knftables.BridgeFamily, bridgeTableName, knftables.NoObjectCommentEmulation)
	if err != nil {
		return nil, fmt.Errorf("use nftables: %w", err)
	}
	return nft, nil
}

func (p *nftPool) put(nft knftables.Interface) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.free = append(p.free, nft)
}

// check returns an error if nft cannot be run.
func (p *nftPool) check() error {
	nft, err := p.get()
	if err != nil {
		return err
	}
	p.put(nft)
	return nil
}

// kernelBridge is the bridge table as the kernel has it.
type kernelBridge struct {
	structure []string // the lines of bridgeTable.structure
	elements  map[string][]string
}

// structure describes everything but the elements of sets: the table's sets, counters, chains and rules, in the order
// of the rules. Two tables with equal structures differ in elements only. A rule is represented by the hash of its text
// (see ruleComment), because nft prints rules in a normalized form that depends on its version.
func (t *bridgeTable) structure() []string {
	var lines []string
	for _, s := range bridgeSets {
		typ := s.typ
		if typ == "" {
			typ = keyTypes[s.typeOf]
		}
		lines = append(lines, fmt.Sprintf("set %s %s %t", s.name, typ, s.interval))
	}
	for _, name := range bridgeCounters {
		lines = append(lines, "counter "+name)
	}
	for _, c := range t.chains {
		line := "chain " + c.name
		if c.hook != "" {
			line += " " + strings.Join([]string{c.hook, c.priority, c.policy}, " ")
		}
		lines = append(lines, line)
		for i := range c.rules {
			lines = append(lines, fmt.Sprintf("rule %s %d %s", c.name, i, ruleComment(c.rules[i])))
		}
	}
	slices.Sort(lines)
	return lines
}

// keyTypes are the types of sets, as nft lists them, that are defined by an expression.
var keyTypes = map[string]string{
	"iifname . ether saddr . @th,64,128": "ifname . ether_addr . integer",
	"@th,64,128":                         "integer",
}

func ruleComment(rule string) string { return hash(rule) }

// kernel returns the table as the kernel has it after applyBridge.
func (t *bridgeTable) kernel() *kernelBridge { return &kernelBridge{t.structure(), t.elements} }

// applyBridge changes the bridge table of the calling thread's namespace from have to want, in one transaction. It
// replaces the table if its structure differs, and otherwise changes elements only.
func (f *Firewall) applyBridge(ctx context.Context, have *kernelBridge, want *bridgeTable, r *Result) error {
	nft, err := f.nft.get()
	if err != nil {
		return err
	}
	defer f.nft.put(nft)
	tx := nft.NewTransaction()
	if slices.Equal(have.structure, want.structure()) {
		changeElements(tx, have.elements, want.elements)
	} else {
		tx.Add(&knftables.Table{})
		tx.Delete(&knftables.Table{})
		createBridge(tx, want)
	}
	if tx.NumOperations() == 0 {
		return nil
	}
	if err := nft.Run(ctx, tx); err != nil {
		return fmt.Errorf("change the anti-spoofing rules: %w", err)
	}
	r.Writes++
	r.Transactions++
	return nil
}

// createBridge adds the operations that create the table with all its content.
func createBridge(tx *knftables.Transaction, t *bridgeTable) {
	tx.Add(&knftables.Table{})
	for _, name := range bridgeCounters {
		tx.Add(&knftables.Counter{Name: name})
	}
	for _, s := range bridgeSets {
		set := &knftables.Set{Name: s.name, Type: s.typ, TypeOf: s.typeOf}
		if s.interval {
			set.Flags = []knftables.SetFlag{knftables.IntervalFlag}
		}
		tx.Add(set)
	}
	for _, c := range t.chains {
		chain := &knftables.Chain{Name: c.name}
		if c.hook != "" {
			chain.Type = knftables.PtrTo(knftables.FilterType)
			chain.Hook = knftables.PtrTo(knftables.BaseChainHook(c.hook))
			chain.Priority = knftables.PtrTo(knftables.BaseChainPriority(c.priority))
			chain.Policy = knftables.PtrTo(knftables.BaseChainPolicy(c.policy))
		}
		tx.Add(chain)
	}
	changeElements(tx, nil, t.elements)
	for _, c := range t.chains {
		for _, rule := range c.rules {
			tx.Add(&knftables.Rule{Chain: c.name, Rule: rule, Comment: knftables.PtrTo(ruleComment(rule))})
		}
	}
}

// changeElements adds the operations that change the elements of all sets, first all deletions: an interval may be
// added only after the intervals that it overlaps are deleted.
func changeElements(tx *knftables.Transaction, have, want map[string][]string) {
	for _, s := range bridgeSets {
		for _, element := range without(have[s.name], want[s.name]) {
			tx.Delete(&knftables.Element{Set: s.name, Key: []string{element}})
		}
	}
	for _, s := range bridgeSets {
		for _, element := range without(want[s.name], have[s.name]) {
			tx.Add(&knftables.Element{Set: s.name, Key: []string{element}})
		}
	}
}

// without returns the strings of the sorted list that are not in the sorted list remove.
func without(list, remove []string) []string {
	var rest []string
	for _, s := range list {
		if _, found := slices.BinarySearch(remove, s); !found {
			rest = append(rest, s)
		}
	}
	return rest
}

// listBridge reads the bridge table of the calling thread's namespace. A missing table is an empty one. knftables would
// run one program for each set; listing the whole table takes one.
func listBridge(ctx context.Context) (*kernelBridge, error) {
	out, err := run(ctx, "", "nft", "--json", "--numeric", "list", "ruleset", "bridge")
	if err != nil {
		return nil, fmt.Errorf("list the anti-spoofing rules: %w", err)
	}
	var list struct {
		Nftables []map[string]nftObject `json:"nftables"`
	}
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		return nil, fmt.Errorf("list the anti-spoofing rules: %w", err)
	}
	k := &kernelBridge{elements: map[string][]string{}}
	count := map[string]int{}
	for _, entry := range list.Nftables {
		for kind, o := range entry {
			if o.Table != bridgeTableName {
				continue
			}
			switch kind {
			case "set":
				if err := k.addSet(&o); err != nil {
					return nil, err
				}
			case "chain":
				line := "chain " + o.Name
				if o.Hook != "" {
					line += fmt.Sprintf(" %s %d %s", o.Hook, o.Priority, o.Policy)
				}
				k.structure = append(k.structure, line)
			case "rule":
				k.structure = append(k.structure, fmt.Sprintf("rule %s %d %s", o.Chain, count[o.Chain], o.Comment))
				count[o.Chain]++
			default:
				k.structure = append(k.structure, kind+" "+o.Name)
			}
		}
	}
	slices.Sort(k.structure)
	return k, nil
}

// nftObject has the fields that the package reads of the objects in nft's JSON output (libnftables-json(5)).
type nftObject struct {
	Table    string            `json:"table"`
	Name     string            `json:"name"`
	Chain    string            `json:"chain"`
	Comment  string            `json:"comment"`
	Hook     string            `json:"hook"`
	Priority int               `json:"prio"`
	Policy   string            `json:"policy"`
	Flags    []string          `json:"flags"`
	Type     any               `json:"type"` // a string, or a list of strings for concatenations
	Elements []json.RawMessage `json:"elem"`
}

func (k *kernelBridge) addSet(o *nftObject) error {
	var types []string
	switch typ := o.Type.(type) {
	case string:
		types = []string{typ}
	case []any:
		for _, part := range typ {
			types = append(types, fmt.Sprint(part))
		}
	}
	interval := slices.Contains(o.Flags, "interval")
	k.structure = append(k.structure, fmt.Sprintf("set %s %s %t", o.Name, strings.Join(types, " . "), interval))
	elements := make([]string, len(o.Elements))
	for i, raw := range o.Elements {
		var err error
		if elements[i], err = elementText(raw, len(types) > 0 && types[0] == "ifname"); err != nil {
			return fmt.Errorf("list the set %s: %w", o.Name, err)
		}
	}
	slices.Sort(elements)
	k.elements[o.Name] = elements
	return nil
}

// elementText converts an element from nft's JSON to nft's text. The first field is quoted if it is a device name. A
// value of a raw expression is a JSON number if it has up to 64 bits, and otherwise a string of hexadecimal digits.
func elementText(raw json.RawMessage, device bool) (string, error) {
	var text string
	if json.Unmarshal(raw, &text) == nil {
		if device {
			return `"` + text + `"`, nil
		}
		return text, nil
	}
	var number uint64
	if json.Unmarshal(raw, &number) == nil {
		return fmt.Sprintf("%#x", number), nil
	}
	var value struct {
		Concat []json.RawMessage `json:"concat"`
		Prefix *struct {
			Address string `json:"addr"`
			Length  int    `json:"len"`
		} `json:"prefix"`
		Range []json.RawMessage `json:"range"`
	}
	if err := json.Unmarshal(raw, &value); err != nil {
		return "", err
	}
	switch {
	case value.Prefix != nil:
		return fmt.Sprintf("%s/%d", value.Prefix.Address, value.Prefix.Length), nil
	case len(value.Range) == 2:
		first, err := elementText(value.Range[0], false)
		if err != nil {
			return "", err
		}
		last, err := elementText(value.Range[1], false)
		return first + "-" + last, err
	case len(value.Concat) > 0:
		fields := make([]string, len(value.Concat))
		for i, part := range value.Concat {
			var err error
			if fields[i], err = elementText(part, device && i == 0); err != nil {
				return "", err
			}
		}
		return strings.Join(fields, " . "), nil
	}
	return "", fmt.Errorf("an element of an unknown kind: %s", raw)
}
