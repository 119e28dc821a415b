package explain

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/trivet-cloud/trivet/cli/dial"
)

// TestExplain checks the text for each error in testdata/explain.txt. Commands, each with a message as input:
//
//	status CODE [field=] [reason=] [nodes] [info] [NODE=reason]  a gRPC status; the options add google.rpc details
//	unreachable            a *dial.Unreachable; the input is a line "ENDPOINT WHY" for each endpoint
//	unavailable [doubtful] a *dial.Unavailable
//	problem CODE [hint=] [responded]  a *Problem
//	usage, canceled        a *Usage, and context.Canceled
//	late                   an error that wraps context.DeadlineExceeded
//	other                  any other error
//
// The option source= sets Facts.Source, login sets Facts.LoggingIn, ongoing Facts.Ongoing, and command= the fields of
// Facts that describe the command. The option request= of a status adds a request ID, and wrapped= wraps the status.
// The option output= prints the report as JSON or YAML.
func TestExplain(t *testing.T) {
	datadriven.RunTest(t, "testdata/explain.txt", func(t *testing.T, d *datadriven.TestData) string {
		facts := Facts{Timeout: 30 * time.Second}
		if d.HasArg("source") {
			d.ScanArgs(t, "source", &facts.Source)
			if facts.Source == "saved" {
				facts.Source = SavedLogin
			}
		}
		facts.LoggingIn = d.HasArg("login")
		if d.HasArg("ongoing") {
			facts.Ongoing = Ongoing{What: "web is still being stopped", Look: "trivet vm wait web --for STOPPED"}
		}
		facts.RequestID = "last"
		if d.HasArg("command") {
			d.ScanArgs(t, "command", &facts.Command)
			facts.Use = "rename VM NAME"
			facts.HasFlag = func(name string) bool { return slices.Contains([]string{"org", "project", "min-disk", "name"}, name) }
		}
		r := New(errorOf(t, d), facts)
		form := ""
		d.MaybeScanArgs(t, "output", &form)
		switch form {
		case "json":
			return r.JSON() + "\n"
		case "yaml":
			return r.YAML() + "\n"
		}
		return fmt.Sprintf("%s\nexit %d\n", r.Text(), r.Exit)
	})
}

func errorOf(t *testing.T, d *datadriven.TestData) error {
	switch d.Cmd {
	case "status":
		return statusOf(t, d)
	case "unreachable":
		e := &dial.Unreachable{}
		for line := range strings.Lines(d.Input) {
			endpoint, why, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
			e.Tried = append(e.Tried, dial.Tried{Endpoint: endpoint, Why: why})
		}
		return fmt.Errorf("create: %w", e)
	case "unavailable":
		return &dial.Unavailable{Endpoint: "a:1", Doubtful: d.HasArg("doubtful"), Err: status.Error(codes.Unavailable, d.Input)}
	case "problem":
		var code codes.Code
		if d.CmdArgs[0].Key != Failed {
			require.NoError(t, code.UnmarshalJSON([]byte(strconv.Quote(d.CmdArgs[0].Key))))
		}
		p := &Problem{Code: code, Message: d.Input, Responded: d.HasArg("responded")}
		if d.HasArg("hint") {
			d.ScanArgs(t, "hint", &p.Hint)
		}
		return fmt.Errorf("not shown: %w", p)
	case "usage":
		return &Usage{Message: d.Input}
	case "canceled":
		return fmt.Errorf("copy: %w", context.Canceled)
	case "late":
		return fmt.Errorf("%s: %w", d.Input, context.DeadlineExceeded)
	case "other":
		return errors.New(d.Input)
	}
	d.Fatalf(t, "unknown case %s", d.Cmd)
	return nil
}

func statusOf(t *testing.T, d *datadriven.TestData) error {
	var code codes.Code
	require.NoError(t, code.UnmarshalJSON([]byte(`"`+d.CmdArgs[0].Key+`"`)))
	s := status.New(code, d.Input)
	var all []protoadapt.MessageV1
	info := &errdetails.ErrorInfo{Domain: "trivet", Metadata: map[string]string{}}
	for _, a := range d.CmdArgs[1:] {
		switch a.Key {
		case "field":
			all = append(all, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: a.Vals[0]}}})
		case "source", "login", "ongoing", "command", "output", "wrapped":
		case "request":
			all = append(all, &errdetails.RequestInfo{RequestId: a.Vals[0]})
		case "reason":
			info.Reason = a.Vals[0]
		case "nodes":
			for i := range 22 {
				info.Metadata[fmt.Sprintf("n%02d", i)] = "is NOT_READY"
			}
			fallthrough
		case "info":
			all = append(all, info)
		default:
			info.Metadata[a.Key] = strings.ReplaceAll(a.Vals[0], "_", " ")
		}
	}
	s, err := s.WithDetails(all...)
	require.NoError(t, err)
	if d.HasArg("wrapped") {
		var text string
		d.ScanArgs(t, "wrapped", &text)
		return fmt.Errorf("%s: %w", text, s.Err())
	}
	return s.Err()
}
