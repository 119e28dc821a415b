package raftlog

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
)

// pebbleLogger gives Pebble's lines to slog and remembers the first one that Pebble calls fatal. Pebble would end the
// process; here the host ends itself, because nothing is acknowledged before Engine.Err was asked.
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
