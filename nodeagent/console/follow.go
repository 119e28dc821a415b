package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// Between two looks of a reader, after data and when there was none for long.
const (
	soon = 20 * time.Millisecond
	late = 250 * time.Millisecond
)

// maxChunk is the longest piece that Follow hands over, in bytes.
const maxChunk = 32 << 10

// Chunk is a piece of a log.
type Chunk struct {
	Data    []byte // valid until the function that got it returns
	Skipped int64  // bytes between this piece and the one before that were gone before they were read
}

// Follow hands the last n bytes of the log to send, then everything that is appended, until ctx ends or send fails,
// and returns that error. A reader slower than the writer is told what it missed.
// The error wraps fs.ErrNotExist when there is no log, or it is removed.
func (l *Log) Follow(ctx context.Context, n int64, send func(Chunk) error) error {
	f, err := os.Open(l.path)
	if err != nil {
		return fmt.Errorf("follow log: %w", err)
	}
	defer func() { _ = f.Close() }()
	size, err := length(f)
	if err != nil {
		return fmt.Errorf("follow log: %w", err)
	}
	at := size - max(0, min(n, l.keep, size))
	buf := make([]byte, maxChunk)
	for pause := soon; ; {
		c, next, err := l.next(f, at, buf)
		if err != nil {
			return fmt.Errorf("follow log: %w", err)
		}
		if at = next; len(c.Data) > 0 {
			if err := send(c); err != nil {
				return err
			}
			pause = soon
			if err := ctx.Err(); err != nil {
				return err
			}
			continue
		}
		if replaced(f) {
			g, err := os.Open(l.path)
			if err != nil {
				return fmt.Errorf("follow log: %w", err)
			}
			_ = f.Close()
			f, at = g, 0
			continue
		}
		t := time.NewTimer(pause)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
		pause = min(2*pause, late)
	}
}

// next reads what follows at, into buf, and returns where to go on.
func (l *Log) next(f *os.File, at int64, buf []byte) (Chunk, int64, error) {
	size, err := length(f)
	if err != nil {
		return Chunk{}, at, err
	}
	if size < at { // emptied
		at = 0
	}
	var c Chunk
	for {
		if gone := size - l.keep - at; gone > 0 {
			c.Skipped += gone
			at += gone
		}
		n, err := f.ReadAt(buf, at)
		if err != nil && !errors.Is(err, io.EOF) {
			return Chunk{}, at, err
		}
		now, err := length(f)
		if err != nil {
			return Chunk{}, at, err
		}
		// What was read may have been trimmed before it was: then it is zeros.
		if now-l.keep <= at {
			c.Data = buf[:n]
			return c, at + int64(n), nil
		}
		size = now
	}
}

// replaced reports whether f has no name any more.
func replaced(f *os.File) bool {
	st, err := f.Stat()
	if err != nil {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && sys.Nlink == 0
}
