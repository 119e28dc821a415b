package raftlog

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
)

// pebbleLogger passes Pebble's log messages to slog. Pebble expects that Fatalf ends the process. Here Fatalf stores
// the first message for Engine.Err and returns. That is safe because Engine.Commit then returns an error, so nothing is
// acknowledged.
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
	l.log.Error("the log engine has failed", "err", err)
}
