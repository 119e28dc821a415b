package explain

import (
	"errors"
	"fmt"
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
//	other                  any other error
//
// The option source= sets Facts.Source, and login sets Facts.LoggingIn.
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
		return Error(errorOf(t, d), facts) + "\n"
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
		case "source", "login":
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
	return s.Err()
}
