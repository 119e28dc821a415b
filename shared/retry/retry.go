// Package retry repeats an operation with growing pauses until it succeeds. It configures package backoff in one way for
// all programs: every pause is bounded, and the error of a retry that was given up contains the last error of the
// operation.
//
// Loops that wait for an event as well as for a pause use a select of their own, with the pauses of [Pauses.Start].
// Tickers with a fixed interval do not use this package.
package retry

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cenkalti/backoff/v5"
)

// Pauses describes the pauses between attempts.
type Pauses struct {
	// First is the first pause. Each later pause is Factor times as long as the one before, and at most Last. A Factor
	// of 0 means 2.
	First, Last time.Duration
	Factor      float64
	// Jitter is the maximum random change of a pause, in either direction, as a fraction of the pause. It can make a
	// pause longer than Last.
	Jitter float64
	// Within limits the time for all attempts: when it has passed since the call of Do, Do begins no further attempt. 0
	// means no limit.
	Within time.Duration
}

// Start returns a new sequence of pauses. Its method NextBackOff returns the next pause, and its method Reset makes the
// sequence begin again with the first pause. Only one goroutine may use the sequence.
func (p Pauses) Start() *backoff.ExponentialBackOff {
	if p.Factor == 0 {
		p.Factor = 2
	}
	return &backoff.ExponentialBackOff{InitialInterval: p.First, MaxInterval: p.Last, Multiplier: p.Factor, RandomizationFactor: p.Jitter}
}

// Do calls operation at least once, and until it returns nil or an error made by [Permanent]. Do then returns nil or
// the error that was given to Permanent. If the next attempt would begin after p.Within, Do returns the last error of
// operation. If ctx ends, Do returns an error that wraps the last error of operation and the error of ctx.
func Do(ctx context.Context, p Pauses, operation func() error) error {
	var last error
	_, err := backoff.Retry(ctx, func() (struct{}, error) {
		last = operation()
		return struct{}{}, last
	}, backoff.WithBackOff(p.Start()), backoff.WithMaxElapsedTime(p.Within))
	var permanent *backoff.PermanentError
	if err == nil || ctx.Err() == nil || errors.As(last, &permanent) {
		return err
	}
	return fmt.Errorf("%w: %w", last, ctx.Err())
}

// Permanent marks an error of an operation, so that Do returns it and does not call the operation again. It returns nil
// if err is nil.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return backoff.Permanent(err)
}
