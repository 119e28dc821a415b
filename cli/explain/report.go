package explain

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
	"google.golang.org/genproto/googleapis/rpc/errdetails"

	"github.com/trivet-cloud/trivet/cli/show"
)

// Report is an error as the user sees it.
type Report struct {
	// Code is the name of a gRPC code, such as NOT_FOUND, or Failed.
	Code string
	// Reason is the reason in the google.rpc.ErrorInfo of the server's error, or else Code.
	Reason string
	// Message says what happened. Details are further lines of it.
	Message string
	Details []string
	// Hint says what the user can do; it is empty for no hint.
	Hint string
	// RequestID is the ID of the failed call, as in the logs and audit records of the members; empty if there was none.
	RequestID string
	// Exit is the exit code of the program.
	Exit int
}

// Text returns the report for a terminal: the message, its details, and the hint on a line of its own.
func (r Report) Text() string {
	first := "trivet: " + r.Code + ": " + show.Text(r.Message)
	if r.RequestID != "" {
		first += " (request " + show.Text(r.RequestID) + ")"
	}
	out := []string{first}
	for _, d := range r.Details {
		out = append(out, show.Text(d))
	}
	if r.Hint != "" {
		out = append(out, "hint: "+show.Text(r.Hint))
	}
	return strings.Join(out, "\n")
}

// object is the form of a report for programs.
type object struct {
	Error struct {
		Code      string   `json:"code" yaml:"code"`
		Reason    string   `json:"reason" yaml:"reason"`
		Message   string   `json:"message" yaml:"message"`
		Details   []string `json:"details" yaml:"details"`
		Hint      string   `json:"hint" yaml:"hint"`
		RequestID string   `json:"request_id" yaml:"request_id"`
	} `json:"error" yaml:"error"`
}

func (r Report) object() (o object) {
	e := &o.Error
	e.Code, e.Reason, e.Message, e.Details, e.Hint, e.RequestID = r.Code, r.Reason, r.Message, r.Details, r.Hint, r.RequestID
	if e.Details == nil {
		e.Details = []string{}
	}
	return o
}

// JSON returns the report as a JSON object on one line.
func (r Report) JSON() string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	// The error is ignored: strings are always valid JSON.
	_ = e.Encode(r.object())
	return strings.TrimSuffix(b.String(), "\n")
}

// YAML returns the report as YAML.
func (r Report) YAML() string {
	// The error is ignored: strings are always valid YAML.
	text, _ := yaml.Marshal(r.object())
	return strings.TrimSuffix(string(text), "\n")
}

// maxRefusals is the maximum number of hosts that refusals lists, each with the reason why it cannot run the VM.
const maxRefusals = 20

// refusals returns a table of the hosts that refused a VM with their reasons, or nil if the message has all reasons.
func refusals(message string, info *errdetails.ErrorInfo) []string {
	all := info.GetMetadata()
	var rows [][2]string
	said := true
	for _, k := range slices.Sorted(maps.Keys(all)) {
		rows = append(rows, [2]string{k, all[k]})
		said = said && strings.Contains(message, all[k])
	}
	if said {
		return nil
	}
	out := table(rows[:min(len(rows), maxRefusals)])
	if len(rows) > maxRefusals {
		out = append(out, fmt.Sprintf("  and %d more", len(rows)-maxRefusals))
	}
	return out
}

func table(rows [][2]string) []string {
	width := 0
	for i, r := range rows {
		rows[i] = [2]string{show.Text(r[0]), show.Text(r[1])}
		width = max(width, len(rows[i][0]))
	}
	out := make([]string, len(rows))
	for i, r := range rows {
		out[i] = fmt.Sprintf("  %-*s  %s", width, r[0], r[1])
	}
	return out
}
