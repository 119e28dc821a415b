// Package load sends requests to servers of etcd's API and measures the latency of each: with etcd's own program
// `benchmark` where that has the case, otherwise with generators of its own. It is the same for both kinds of servers.
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

// Tool runs etcd's program `benchmark`.
type Tool struct {
	Binary    string
	Endpoints []string // host:port; connections go to them in rotation
	// Conns is the number of connections, Clients the number of callers that share them.
	Conns, Clients int
}

// Run runs one command of the tool and parses the summaries that it prints; a number other than wanted is an error.
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

// last keeps the last 1024 bytes written to it: a progress bar is long.
type last struct{ to *bytes.Buffer }

func (l *last) Write(p []byte) (int, error) {
	l.to.Write(p)
	if over := l.to.Len() - 1024; over > 0 {
		l.to.Next(over)
	}
	return len(p), nil
}

// Summary is one report of the tool.
type Summary struct {
	Took    time.Duration
	Rate    float64 // successes per second
	Slowest time.Duration
	// quantiles is keyed by percent; see Quantile.
	quantiles map[float64]time.Duration
	// Failed is the number of failed requests, which the other figures exclude.
	Failed int
}

// Count returns the number of successful requests.
func (s Summary) Count() int { return int(s.Rate*s.Took.Seconds() + 0.5) }

// Quantile returns a latency; percent must be 10, 25, 50, 75, 90, 95, 99 or 99.9. The tool omits quantiles that are 0,
// as its watch latencies are when an event came before the response of its put: Quantile then returns 0. It also omits
// those that it has too few samples for: Quantile then returns the slowest.
func (s Summary) Quantile(percent float64) time.Duration {
	if q, ok := s.quantiles[percent]; ok {
		return q
	}
	if float64(s.Count())*(1-percent/100) < 1 {
		return s.Slowest
	}
	return 0
}

// Parse parses the whole output of the tool. It returns an error with the first failure if all requests failed.
func Parse(text string) (all []Summary, err error) {
	var now *Summary
	failing, first := false, ""
	orphans := 0 // failures in reports without a success, which have no summary
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

// parseFailed returns the count in "[12] the error".
func parseFailed(line string) (int, error) {
	count, _, ok := strings.Cut(strings.TrimPrefix(line, "["), "]")
	if !ok {
		return 0, fmt.Errorf("a count of failures in %q", line)
	}
	return strconv.Atoi(count)
}

// parse reads a line of a report; it ignores lines that hold no figure.
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

// seconds parses "0.25 secs.".
func seconds(text string) (time.Duration, error) {
	v, err := strconv.ParseFloat(strings.TrimSuffix(text, " secs."), 64)
	return time.Duration(v * float64(time.Second)), err
}
