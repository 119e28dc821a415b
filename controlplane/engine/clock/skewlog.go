package clock

import (
	"fmt"
	"log/slog"
	"time"
)

// skewLogger logs the skew when it crosses Tolerance or Bound, and when a clock that was ahead is behind or vice versa.
// It repeats a warning or an error once per logEvery.
type skewLogger struct {
	log   *slog.Logger
	last  slog.Level
	ahead bool
	at    time.Duration
	// doubted is the Elapsed time at which reportUnknown last logged; 0 if it has not logged yet.
	doubted time.Duration
}

// DescribeSkew returns a message for an operator: how far this member's clock is ahead or behind, and the request to
// set it.
func DescribeSkew(skew time.Duration) string {
	way := "ahead of"
	if skew < 0 {
		way = "behind"
	}
	return fmt.Sprintf("this member's clock is %s %s the others': set it", skew.Abs().Round(time.Millisecond), way)
}

func level(skew time.Duration) slog.Level {
	switch {
	case skew.Abs() > Bound:
		return slog.LevelError
	case skew.Abs() > Tolerance:
		return slog.LevelWarn
	}
	return slog.LevelInfo
}

// reportUnknown logs that the clocks of two members differ by the duration apart and that it is unknown which one is
// wrong. It does so at most once per logEvery. now is the current Elapsed time.
func (t *skewLogger) reportUnknown(now, apart time.Duration) {
	if t.doubted != 0 && now-t.doubted < logEvery {
		return
	}
	t.doubted = max(now, 1)
	t.log.Error(fmt.Sprintf("the members' clocks are %s apart, and too few are heard to say whose is wrong: look at all of them", apart.Round(time.Millisecond)))
}

// report logs the skew that a round has found. It does not log a skew of at most Tolerance if the previous one was that
// small, too. It does not log a larger skew of the same level and direction again before logEvery has passed. now is
// the current Elapsed time.
func (t *skewLogger) report(now, skew time.Duration) {
	level, ahead := level(skew), skew > 0
	same := level == t.last && (ahead == t.ahead || level == slog.LevelInfo)
	if same && (level == slog.LevelInfo || now-t.at < logEvery) {
		return
	}
	t.last, t.ahead, t.at = level, ahead, now
	if level == slog.LevelInfo {
		t.log.Info("this member's clock agrees with the others' again")
		return
	}
	if level == slog.LevelWarn {
		t.log.Warn(DescribeSkew(skew), "skew", skew)
		return
	}
	t.log.Error(DescribeSkew(skew), "skew", skew)
}
