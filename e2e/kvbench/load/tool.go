// Package load sends requests to servers of etcd's API and measures the latency of each. It runs etcd's own program
// `benchmark`, and has load generators for what that program cannot express. The load is the same for Trivet and etcd.
package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strconv"
	"strings"
	"time"
)

// Tool runs etcd's program `benchmark`. The field Binary is the path of that program.
type Tool struct {
	Binary    string
	Endpoints []string // the servers, as host:port; the tool distributes its connections among them
	// Conns is the number of connections; Clients is the number of concurrent callers that share them. 0 means 1.
	Conns, Clients int
}

// Run runs a command of the tool, such as "put" with its flags, and returns the summaries that the tool prints. It
// returns an error if the number of summaries is not equal to the parameter wanted.
func (t Tool) Run(ctx context.Context, wanted int, args ...string) ([]Summary, error) {
	flags := []string{
		"--precise", "--endpoints", strings.Join(t.Endpoints, ","), "--conns", strconv.Itoa(max(t.Conns, 1)), "--clients", strconv.Itoa(max(t.Clients, 1)),
	}
	cmd := exec.CommandContext(ctx, t.Binary, append(flags, args...)...)
	var out, failure bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &last{to: &failure}
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("benchmark %s: %w: %s", args[0], err, bytes.TrimSpace(failure.Bytes()))
	}
	got, err := Parse(out.String())
	if err == nil && len(got) != wanted {
		err = fmt.Errorf("%d summaries, want %d", len(got), wanted)
	}
	if err != nil {
		return nil, fmt.Errorf("benchmark %s: %w", args[0], err)
	}
	return got, nil
}

// last is a writer that discards all but the last 1024 bytes written to it, because the tool prints a long progress bar
// before its error.
type last struct{ to *bytes.Buffer }

func (l *last) Write(p []byte) (int, error) {
	l.to.Write(p)
	if over := l.to.Len() - 1024; over > 0 {
		l.to.Next(over)
	}
	return len(p), nil
}

// Summary is one report of the tool on a group of requests.
type Summary struct {
	Took    time.Duration
	Rate    float64 // successful requests per second
	Slowest time.Duration
	// quantiles maps a percentage, such as 99, to the latency; see Quantile.
	quantiles map[float64]time.Duration
	// Failed is the number of failed requests. The other fields are about the successful ones only.
	Failed int
}

// Count returns the number of successful requests.
func (s Summary) Count() int { return int(s.Rate*s.Took.Seconds() + 0.5) }

// Quantile returns the latency that percent of the requests did not exceed; percent must be 10, 25, 50, 75, 90, 95, 99
// or 99.9. The tool does not print quantiles that are 0, such as watch latencies when events arrive before the response
// of their put: Quantile then returns 0. It also does not print quantiles for which it has too few samples: Quantile
// then returns the slowest latency.
func (s Summary) Quantile(percent float64) time.Duration {
	if q, ok := s.quantiles[percent]; ok {
		return q
	}
	if float64(s.Count())*(1-percent/100) < 1 {
		return s.Slowest
	}
	return 0
}

// Parse returns the summaries in the complete output of the tool. It returns an error if all requests of a report
// failed, because the tool then prints no summary; the error contains the first failure.
func Parse(text string) (all []Summary, err error) {
	var now *Summary
	failing, first := false, ""
	orphans := 0 // the number of failed requests in reports in which none succeeded; these have no summary
	for number, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		switch {
		case line == "Summary:":
			all = append(all, Summary{quantiles: map[float64]time.Duration{}})
			now, failing = &all[len(all)-1], false
		case line == "Error distribution:":
			failing = true
		case strings.HasPrefix(line, "Total Write Ops:"), strings.HasSuffix(line, " summary:"):
			now, failing = nil, false
		case failing && strings.HasPrefix(line, "["):
			var n int
			if n, err = parseFailed(line); err == nil && now != nil {
				now.Failed += n
			} else if err == nil {
				orphans += n
			}
			if first == "" {
				first = line
			}
		case now != nil && !failing:
			err = now.parse(line)
		}
		if err != nil {
			return nil, fmt.Errorf("line %d of the output: %w", number+1, err)
		}
	}
	if orphans > 0 {
		return nil, fmt.Errorf("%d requests failed and none succeeded: %s", orphans, first)
	}
	if len(all) == 0 {
		return nil, errors.New("no summary in the output")
	}
	return all, nil
}

// parseFailed returns the count of failed requests in a line of the form "[12] the error".
func parseFailed(line string) (int, error) {
	count, _, ok := strings.Cut(strings.TrimPrefix(line, "["), "]")
	if !ok {
		return 0, fmt.Errorf("a count of failures in %q", line)
	}
	return strconv.Atoi(count)
}

// parse adds the figure in a line of a report to s. It ignores lines without a known figure.
func (s *Summary) parse(line string) error {
	if percent, value, ok := strings.Cut(line, "% in "); ok {
		p, err := strconv.ParseFloat(percent, 64)
		if err != nil {
			return err
		}
		s.quantiles[p], err = seconds(value)
		return err
	}
	name, value, ok := strings.Cut(line, ":\t")
	if !ok {
		return nil
	}
	var err error
	switch name {
	case "Total":
		s.Took, err = seconds(value)
	case "Slowest":
		s.Slowest, err = seconds(value)
	case "Requests/sec":
		s.Rate, err = strconv.ParseFloat(value, 64)
	}
	return err
}

// seconds parses a duration as the tool prints it, such as "0.25 secs.".
func seconds(text string) (time.Duration, error) {
	v, err := strconv.ParseFloat(strings.TrimSuffix(text, " secs."), 64)
	return time.Duration(v * float64(time.Second)), err
}
