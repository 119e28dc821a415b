package consensus

import (
	"context"
	"fmt"
	"log/slog"
)

// raftLogger passes raft's log messages to slog. Messages of raft's info level get slog's debug level. The methods
// Fatal and Panic panic with a raftPanic, which Host.guard recovers.
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
