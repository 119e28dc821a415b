// Package report prints the progress and the results of the benchmark programs bench, kvbench, creditbench,
// networkbench and storagebench. The main type is Run. It decides whether the figures of a run may be used.
package report

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/e2e/usage"
)

// Say prints a line that begins with the time of day.
func Say(format string, args ...any) {
	fmt.Printf("%s  %s\n", time.Now().Format("15:04:05"), fmt.Sprintf(format, args...))
}

// Run holds the conditions of a run: whether the machine was idle, whether the run did all of its work, and which parts
// failed.
type Run struct {
	// Calm has waited for the machine to be idle.
	Calm *usage.Calm
	// Quick is true for a run that does a tenth of the work. Its figures are never used, and this is not an error.
	Quick bool
	// Failures are the errors of the parts of the run that failed.
	Failures []string
}

// RunPart runs a part of the run with a timeout. If the part fails, RunPart adds the error to r.Failures and returns
// nil, so that the next part can run. RunPart returns an error only if ctx ends.
func (r *Run) RunPart(ctx context.Context, name string, timeout time.Duration, part func(context.Context) error) error {
	Say("%s; load %s", name, usage.Load())
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	began := time.Now()
	err := part(limited)
	if ctx.Err() != nil {
		return errors.Join(ctx.Err(), err)
	}
	if err != nil {
		r.Failures = append(r.Failures, fmt.Sprintf("%s: %v", name, err))
		Say("failed: %v", err)
	}
	Say("%s took %.0f s", name, time.Since(began).Seconds())
	return nil
}

// InTurn calls the functions one after the other in each round, in the reverse order in every other round. Before each
// round it waits until the machine is idle.
func (r *Run) InTurn(ctx context.Context, rounds int, measure ...func(round int) error) error {
	for round := range rounds {
		if err := r.Calm.Await(ctx); err != nil {
			return err
		}
		for i := range measure {
			if round%2 == 1 {
				i = len(measure) - 1 - i
			}
			if err := errors.Join(ctx.Err(), measure[i](round)); err != nil {
				return fmt.Errorf("round %d: %w", round+1, err)
			}
		}
	}
	return nil
}

// Unusable returns the reason why the figures of the run must not be used, or "" if there is none.
func (r *Run) Unusable() (string, error) {
	if r.Quick {
		return "a quick run does a tenth of the work that the lines name", nil
	}
	return r.Calm.Disturbed()
}

// Remark returns the lines of the result that follow its tables: the reason why the figures must not be used, unless it
// is "", and the failures.
func (r *Run) Remark(unusable string) string {
	var out strings.Builder
	if unusable != "" {
		fmt.Fprintf(&out, "\n**No verdict: %s. The figures must not be used.**\n", unusable)
	}
	for _, f := range r.Failures {
		out.WriteString("\n- failed: " + f)
	}
	return out.String()
}

// Write prints the text of the result and writes it to the file out. Then it returns an error if parts of the run have
// failed or its figures must not be used. parts is the plural noun for that of which Failures counts.
func (r *Run) Write(out, text, unusable, parts string) error {
	fmt.Print("\n", text)
	if err := os.WriteFile(out, []byte(text), 0o644); err != nil {
		return err
	}
	if len(r.Failures) > 0 {
		return fmt.Errorf("%d %s failed", len(r.Failures), parts)
	}
	if unusable != "" && !r.Quick {
		return fmt.Errorf("no verdict: %s", unusable)
	}
	return nil
}
