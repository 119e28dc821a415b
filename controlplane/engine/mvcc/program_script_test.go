package mvcc

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/cockroachdb/datadriven"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// program applies a program in the notation of the scripts: one step a line, with the lines of branches indented. Flags
// set the fields of command.Step with the same names.
//
//	put KEY VALUE [lease=ID] [prev] [ignore-value] [ignore-lease]: write VALUE at KEY
//	range KEY [END] [limit=KEYS] [revision=N] [reverse] [count]: read KEY or [KEY, END)
//	delete KEY [END] [prev]: remove KEY or the keys of [KEY, END)
//	grant ID TTL: create a lease of TTL seconds
//	revoke ID: remove a lease and its keys
//	set NAME VALUE, unset NAME: write or remove a named record
//	if TARGET KEY [END] RELATION VALUE, …: run the lines below `then` if all compares hold, else those below `else`
func (s *script) program(d *datadriven.TestData) string {
	lines := programLines{lines: strings.Split(d.Input, "\n")}
	p := command.Program{Epoch: int64(number(d, "epoch")), Steps: lines.steps(0)}
	data, err := command.EncodeProgram(p)
	if err != nil {
		return fmt.Sprintf("invalid: %v\n", err)
	}
	c := command.Command{Index: uint64(len(s.log)) + 1, Term: 1, Data: data, WantSteps: true}
	s.log = append(s.log, c)
	r, err := s.e.Apply([]command.Command{c})
	if err != nil {
		return fmt.Sprintf("error: %v\n", err)
	}
	var b strings.Builder
	b.WriteString(formatResult(r[0]))
	formatSteps(&b, r[0].Steps, "  ")
	return b.String()
}

func formatSteps(b *strings.Builder, steps []command.StepResult, indent string) {
	names := map[command.StepKind]string{
		command.StepRange: "range", command.StepPut: "put", command.StepDelete: "delete", command.StepBranch: "if", command.StepGrant: "grant", command.StepRevoke: "revoke",
		command.StepSetRecord: "set", command.StepDeleteRecord: "unset",
	}
	for _, r := range steps {
		fmt.Fprintf(b, "%s%s", indent, names[r.Kind])
		switch r.Kind {
		case command.StepRange:
			fmt.Fprintf(b, " count %d", r.Range.Count)
		case command.StepDelete, command.StepRevoke:
			fmt.Fprintf(b, " count %d", r.Count)
		case command.StepBranch:
			fmt.Fprintf(b, " %v", r.Succeeded)
		}
		b.WriteString("\n")
		for _, kv := range r.Range.KVs {
			fmt.Fprintf(b, "%s  %s\n", indent, formatKV(kv))
		}
		formatSteps(b, r.Steps, indent+"  ")
	}
}

type programLines struct{ lines []string }

func (p *programLines) steps(indent int) (steps []command.Step) {
	for len(p.lines) > 0 {
		line := p.lines[0]
		depth := len(line) - len(strings.TrimLeft(line, " "))
		f := strings.Fields(line)
		if len(f) == 0 || depth < indent || f[0] == "then" || f[0] == "else" {
			return steps
		}
		p.lines = p.lines[1:]
		if f[0] != "if" {
			steps = append(steps, scriptStep(f))
			continue
		}
		st := command.Step{Kind: command.StepBranch}
		for _, c := range strings.Split(strings.TrimPrefix(strings.TrimSpace(line), "if"), ",") {
			if f := strings.Fields(c); len(f) > 0 {
				st.If = append(st.If, scriptCompare(f))
			}
		}
		for _, branch := range []struct {
			word string
			to   *[]command.Step
		}{{"then", &st.Then}, {"else", &st.Else}} {
			if len(p.lines) > 0 && strings.TrimSpace(p.lines[0]) == branch.word {
				p.lines = p.lines[1:]
				*branch.to = p.steps(depth + 1)
			}
		}
		steps = append(steps, st)
	}
	return steps
}

func scriptStep(f []string) (st command.Step) {
	var words []string
	for _, w := range f[1:] {
		name, value, _ := strings.Cut(w, "=")
		n, _ := strconv.ParseInt(value, 10, 64)
		switch name {
		case "lease":
			st.Lease = n
		case "limit":
			st.Range.Limit = int(n)
		case "revision":
			st.Range.Revision = n
		case "reverse":
			st.Range.Reverse = true
		case "count":
			st.Range.WantCount = true
		case "prev":
			st.PrevKV = true
		case "ignore-value":
			st.IgnoreValue = true
		case "ignore-lease":
			st.IgnoreLease = true
		default:
			words = append(words, w)
		}
	}
	words = append(words, "", "")
	kinds := map[string]command.StepKind{
		"put": command.StepPut, "range": command.StepRange, "delete": command.StepDelete, "grant": command.StepGrant, "revoke": command.StepRevoke,
		"set": command.StepSetRecord, "unset": command.StepDeleteRecord,
	}
	st.Kind = kinds[f[0]]
	switch st.Kind {
	case command.StepPut, command.StepSetRecord:
		st.Key, st.Value = key(words[0]), []byte(words[1])
	case command.StepRange, command.StepDelete:
		st.Key, st.End = key(words[0]), end(words[1])
	case command.StepGrant, command.StepRevoke:
		st.Lease, _ = strconv.ParseInt(words[0], 10, 64)
		st.TTL, _ = strconv.ParseInt(words[1], 10, 64)
	case command.StepDeleteRecord:
		st.Key = key(words[0])
	}
	return st
}

func scriptCompare(f []string) command.Compare {
	c := command.Compare{
		Key: key(f[1]),
		Target: map[string]command.CompareTarget{
			"version": command.CompareVersion, "create": command.CompareCreate, "mod": command.CompareMod, "value": command.CompareValue, "lease": command.CompareLease,
		}[f[0]],
		Relation: map[string]command.CompareRelation{
			"=": command.CompareEqual, ">": command.CompareGreater, "<": command.CompareLess, "!=": command.CompareNotEqual,
		}[f[len(f)-2]],
	}
	if len(f) == 5 {
		c.End = end(f[2])
	}
	if c.Target == command.CompareValue {
		c.Value = []byte(f[len(f)-1])
	} else {
		c.Number, _ = strconv.ParseInt(f[len(f)-1], 10, 64)
	}
	return c
}
