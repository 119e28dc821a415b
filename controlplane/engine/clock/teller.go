package clock

import (
	"fmt"
	"log/slog"
	"time"
)

// teller says in the log how the clock is, when that changes and then once in a while.
type teller struct {
	log   *slog.Logger
	last  slog.Level
	ahead bool
	at    time.Duration
	// doubted is when it was last said that nobody knows.
	doubted time.Duration
}

// Words say how far a clock is off, for whoever has to set it.
func Words(skew time.Duration) string {
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

// doubt is called after a round that found clocks which differ, and not whose is wrong.
func (t *teller) doubt(now, apart time.Duration) {
	if t.doubted != 0 && now-t.doubted < sayEvery {
		return
	}
	t.doubted = max(now, 1)
	t.log.Error(fmt.Sprintf("the members' clocks are %s apart, and too few are heard to say whose is wrong: look at all of them", apart.Round(time.Millisecond)))
}

// tell is called after each round that found out how the clock is.
func (t *teller) tell(now, skew time.Duration) {
	level, ahead := level(skew), skew > 0
	same := level == t.last && (ahead == t.ahead || level == slog.LevelInfo)
	if same && (level == slog.LevelInfo || now-t.at < sayEvery) {
		return
	}
	t.last, t.ahead, t.at = level, ahead, now
	if level == slog.LevelInfo {
		t.log.Info("this member's clock agrees with the others' again")
		return
	}
	if level == slog.LevelWarn {
		t.log.Warn(Words(skew), "skew", skew)
		return
	}
	t.log.Error(Words(skew), "skew", skew)
}
