package consensus

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
)

// raftLogger gives raft's lines to slog. What raft calls information is debugging to an operator; what raft cannot
// survive becomes a raftPanic for Host.guard.
type raftLogger struct{ log *slog.Logger }

func (l raftLogger) print(level slog.Level, v []any) {
	if l.log.Enabled(context.Background(), level) {
		l.log.Log(context.Background(), level, fmt.Sprint(v...))
	}
}

func (l raftLogger) printf(level slog.Level, format string, v []any) {
	if l.log.Enabled(context.Background(), level) {
		l.log.Log(context.Background(), level, fmt.Sprintf(format, v...))
	}
}

func (l raftLogger) Debug(v ...any)                 { l.print(slog.LevelDebug-4, v) }
func (l raftLogger) Debugf(f string, v ...any)      { l.printf(slog.LevelDebug-4, f, v) }
func (l raftLogger) Info(v ...any)                  { l.print(slog.LevelDebug, v) }
func (l raftLogger) Infof(f string, v ...any)       { l.printf(slog.LevelDebug, f, v) }
func (l raftLogger) Warning(v ...any)               { l.print(slog.LevelWarn, v) }
func (l raftLogger) Warningf(f string, v ...any)    { l.printf(slog.LevelWarn, f, v) }
func (l raftLogger) Error(v ...any)                 { l.print(slog.LevelError, v) }
func (l raftLogger) Errorf(f string, v ...any)      { l.printf(slog.LevelError, f, v) }
func (l raftLogger) Fatal(v ...any)                 { panic(&raftPanic{fmt.Sprint(v...)}) }
func (l raftLogger) Fatalf(format string, v ...any) { panic(&raftPanic{fmt.Sprintf(format, v...)}) }
func (l raftLogger) Panic(v ...any)                 { panic(&raftPanic{fmt.Sprint(v...)}) }
func (l raftLogger) Panicf(format string, v ...any) { panic(&raftPanic{fmt.Sprintf(format, v...)}) }

// pebbleLogger gives Pebble's lines to slog and remembers the first one that Pebble calls fatal. Pebble would end the
// process; here the host ends itself, because nothing is acknowledged before engine.failure was asked.
type pebbleLogger struct {
	log   *slog.Logger
	fatal atomic.Pointer[error]
}

func (l *pebbleLogger) Infof(f string, v ...any) {
	if l.log.Enabled(context.Background(), slog.LevelDebug-4) {
		l.log.Log(context.Background(), slog.LevelDebug-4, fmt.Sprintf(f, v...))
	}
}

func (l *pebbleLogger) Errorf(f string, v ...any) { l.log.Error(fmt.Sprintf(f, v...)) }

func (l *pebbleLogger) Fatalf(f string, v ...any) {
	err := fmt.Errorf(f, v...)
	l.fatal.CompareAndSwap(nil, &err)
	l.log.Error("the log engine cannot go on", "err", err)
}
