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

// Limits of the interval at which a reader polls the file. It is minPoll after new data. Without new data it doubles up
// to maxPoll.
const (
	minPoll = 20 * time.Millisecond
	maxPoll = 250 * time.Millisecond
)

// maxChunk is the maximum size of a Chunk, in bytes.
const maxChunk = 32 << 10

// Chunk is a part of a log that Follow passes to its send function.
type Chunk struct {
	Data    []byte // valid until the send function returns
	Skipped int64  // bytes before this chunk that were trimmed before they could be read
	End     int64  // offset in the log of the first byte after Data
}

// Follow calls send with the last n bytes of the log, then with everything that is appended. If ctx ends or send
// returns an error, Follow returns that error. Chunk.Skipped is the number of bytes that were trimmed before a slow
// reader could read them. If there is no log, or the log is removed, the error of Follow wraps fs.ErrNotExist.
func (l *Log) Follow(ctx context.Context, n int64, send func(Chunk) error) error {
	return l.follow(ctx, nil, func(size int64) int64 { return size - max(0, min(n, l.keep, size)) }, send)
}

// FollowFrom sends the log from offset (the End of an earlier Chunk) and then new data, like Follow. If the log is
// shorter, because it was emptied, FollowFrom begins with its last kept bytes. A value in the channel wake makes
// FollowFrom look for new data at once; wake may be nil.
func (l *Log) FollowFrom(ctx context.Context, offset int64, wake <-chan struct{}, send func(Chunk) error) error {
	return l.follow(ctx, wake, func(size int64) int64 {
		if offset > size {
			return size - min(l.keep, size)
		}
		return max(0, offset)
	}, send)
}

// follow implements Follow and FollowFrom. The function begin returns the offset of the first byte for the size of the
// file.
func (l *Log) follow(ctx context.Context, wake <-chan struct{}, begin func(size int64) int64, send func(Chunk) error) error {
	f, err := os.Open(l.path)
	if err != nil {
		return fmt.Errorf("follow log: %w", err)
	}
	defer func() { _ = f.Close() }()
	size, err := length(f)
	if err != nil {
		return fmt.Errorf("follow log: %w", err)
	}
	at := begin(size)
	buf := make([]byte, maxChunk)
	for pause := minPoll; ; {
		c, next, err := l.next(f, at, buf)
		if err != nil {
			return fmt.Errorf("follow log: %w", err)
		}
		if at = next; len(c.Data) > 0 {
			c.End = at
			if err := send(c); err != nil {
				return err
			}
			pause = minPoll
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
		pause = min(2*pause, maxPoll)
		select {
		case <-t.C:
		case <-wake:
			t.Stop()
			pause = minPoll
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		}
	}
}

// next reads bytes of f into buf. The parameter at is the offset of the first byte. next also returns the offset at
// which the next call must continue.
func (l *Log) next(f *os.File, at int64, buf []byte) (Chunk, int64, error) {
	size, err := length(f)
	if err != nil {
		return Chunk{}, at, err
	}
	if size < at { // the file was emptied, or its beginning was removed
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
		// If the range was trimmed before it was read, buf contains zeros, and the loop reads from the new beginning.
		if now-l.keep <= at {
			c.Data = buf[:n]
			return c, at + int64(n), nil
		}
		size = now
	}
}

// replaced reports whether the file f was removed or replaced by another one at its path. Then f has no hard link.
func replaced(f *os.File) bool {
	st, err := f.Stat()
	if err != nil {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && sys.Nlink == 0
}
