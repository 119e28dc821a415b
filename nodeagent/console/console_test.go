package console

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const keep = 256 << 10

func newLog(t *testing.T) (*Log, *os.File) {
	t.Helper()
	l := At(filepath.Join(t.TempDir(), "console.log"), keep)
	w, err := l.Writer()
	require.NoError(t, err)
	t.Cleanup(func() { _ = w.Close() })
	return l, w
}

// line returns line number n of a log: 64 bytes that contain the number.
func line(n int) string { return fmt.Sprintf("%-63d\n", n) }

// appendLines appends the lines [from, to) in several writes, as a guest would.
func appendLines(t *testing.T, w *os.File, from, to int) {
	t.Helper()
	var b strings.Builder
	for i := from; i < to; i++ {
		b.WriteString(line(i))
		if b.Len() >= 4096 || i == to-1 {
			_, err := w.WriteString(b.String())
			require.NoError(t, err)
			b.Reset()
		}
	}
}

func TestTail(t *testing.T) {
	l, w := newLog(t)
	out, err := l.Tail(100)
	require.NoError(t, err)
	require.Empty(t, out)
	_, err = w.WriteString("hello, world\n")
	require.NoError(t, err)
	for n, want := range map[int64]string{-1: "", 0: "", 6: "world\n", 13: "hello, world\n", 1 << 40: "hello, world\n"} {
		out, err := l.Tail(n)
		require.NoError(t, err)
		require.Equal(t, want, string(out))
	}
	_, err = At(filepath.Join(t.TempDir(), "none"), keep).Tail(1)
	require.ErrorIs(t, err, fs.ErrNotExist)
}

// TestTrimBoundsTheDisk writes 16 times the kept size, and calls Trim after each half of it. It checks that the file
// never occupies much more than the kept size, and that the last output stays readable.
func TestTrimBoundsTheDisk(t *testing.T) {
	l, w := newLog(t)
	const each = keep / 64 / 2
	for i := range 32 {
		appendLines(t, w, i*each, (i+1)*each)
		require.NoError(t, l.Trim())
		st, err := os.Stat(l.Path())
		require.NoError(t, err)
		require.LessOrEqual(t, allocatedBytes(st), int64(keep+slack+8192))
		require.EqualValues(t, (i+1)*each*64, st.Size(), "Trim must keep the offsets of the remaining output")
	}
	out, err := l.Tail(1 << 40)
	require.NoError(t, err)
	require.Len(t, out, keep)
	require.Equal(t, line(32*each-keep/64), string(out[:64]))
	require.Equal(t, line(32*each-1), string(out[keep-64:]))
	require.NoError(t, At(filepath.Join(t.TempDir(), "none"), keep).Trim())
}

func TestTrimWithoutHoles(t *testing.T) {
	l, w := newLog(t)
	l.punch = func(*os.File, int64) error { return errors.ErrUnsupported }
	appendLines(t, w, 0, 2*keep/64)
	require.NoError(t, l.Trim())
	st, err := os.Stat(l.Path())
	require.NoError(t, err)
	require.EqualValues(t, 2*keep, st.Size(), "Trim must not shorten a file of at most twice the kept size")
	appendLines(t, w, 0, 1)
	require.NoError(t, l.Trim())
	appendLines(t, w, 7, 8)
	out, err := l.Tail(1 << 20)
	require.NoError(t, err)
	require.Equal(t, line(7), string(out))
}

func TestWriterReplacesLongFile(t *testing.T) {
	l, w := newLog(t)
	l.longest = 2 * keep
	appendLines(t, w, 0, 2*keep/64)
	again, err := l.Writer()
	require.NoError(t, err)
	defer again.Close()
	appendLines(t, again, 2*keep/64, 2*keep/64+1)
	st, err := os.Stat(l.Path())
	require.NoError(t, err)
	require.EqualValues(t, keep+64, st.Size())
	require.EqualValues(t, 0o600, st.Mode().Perm())
	out, err := l.Tail(128)
	require.NoError(t, err)
	require.Equal(t, line(2*keep/64-1)+line(2*keep/64), string(out))
}

func TestFollow(t *testing.T) {
	l, w := newLog(t)
	_, err := w.WriteString("before\nlast\n")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var got bytes.Buffer
	step := 0
	err = l.Follow(ctx, 5, func(c Chunk) error {
		require.Zero(t, c.Skipped)
		got.Write(c.Data)
		// Chunks 1 and 3 cause the next output.
		switch step++; step {
		case 1:
			appendLines(t, w, 1, 1000) // more than one chunk
		case 3:
			_, err := w.WriteString("end")
			require.NoError(t, err)
		}
		if bytes.HasSuffix(got.Bytes(), []byte("end")) {
			cancel()
		}
		return nil
	})
	require.ErrorIs(t, err, context.Canceled)
	var want strings.Builder
	want.WriteString("last\n")
	for i := 1; i < 1000; i++ {
		want.WriteString(line(i))
	}
	require.Equal(t, want.String()+"end", got.String())
}

// TestFollowTooSlow checks a reader that stalls while the guest prints more than is kept: it must continue with the
// remaining output, and get the number of skipped bytes.
func TestFollowTooSlow(t *testing.T) {
	l, w := newLog(t)
	appendLines(t, w, 0, 1)
	done := errors.New("done")
	last := 3*keep/64 - 1
	var next int64
	err := l.Follow(t.Context(), 64, func(c Chunk) error {
		if next == 0 {
			require.Equal(t, line(0), string(c.Data))
			appendLines(t, w, 1, last+1)
			require.NoError(t, l.Trim())
		} else if next == 64 {
			require.EqualValues(t, 2*keep-64, c.Skipped)
		}
		next += c.Skipped
		require.Equal(t, line(int(next/64)), string(c.Data[:64]), "Follow must not return the zeros of a hole")
		next += int64(len(c.Data))
		if next == int64(last+1)*64 {
			return done
		}
		return nil
	})
	require.ErrorIs(t, err, done)
}

func TestFollowReplacedFile(t *testing.T) {
	l, w := newLog(t)
	appendLines(t, w, 0, 1)
	done := errors.New("done")
	var got strings.Builder
	err := l.Follow(t.Context(), 1<<20, func(c Chunk) error {
		got.Write(c.Data)
		if got.Len() > 64 {
			return done
		}
		require.NoError(t, os.Remove(l.Path()))
		again, err := l.Writer()
		require.NoError(t, err)
		defer again.Close()
		appendLines(t, again, 1, 2)
		return nil
	})
	require.ErrorIs(t, err, done)
	require.Equal(t, line(0)+line(1), got.String())
}

func TestFollowRemovedFile(t *testing.T) {
	l, w := newLog(t)
	appendLines(t, w, 0, 1)
	err := l.Follow(t.Context(), 1<<20, func(Chunk) error { return os.Remove(l.Path()) })
	require.ErrorIs(t, err, fs.ErrNotExist)
	require.ErrorIs(t, l.Follow(t.Context(), 1, nil), fs.ErrNotExist)
}

// TestConcurrentReaders checks that every line that Follow returns is complete and in order while another goroutine
// writes and trims the log.
func TestConcurrentReaders(t *testing.T) {
	l, w := newLog(t)
	appendLines(t, w, 0, 64)
	const lines = 20 * keep / 64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for i := 64; i < lines; i += 64 {
			appendLines(t, w, i, i+64)
			if err := l.Trim(); err != nil {
				t.Error(err)
			}
		}
	}()
	var at int64
	end := errors.New("end")
	err := l.Follow(t.Context(), 64, func(c Chunk) error {
		if at == 0 {
			// The first line that Follow returns depends on how much was written before it started.
			var first int64
			_, err := fmt.Sscan(string(c.Data[:64]), &first)
			require.NoError(t, err)
			at = first * 64
		} else {
			at += c.Skipped
		}
		for d := c.Data; len(d) > 0; d = d[min(64, len(d)):] {
			require.Equal(t, line(int(at / 64))[:min(64, len(d))], string(d[:min(64, len(d))]))
			at += int64(min(64, len(d)))
		}
		if at == lines*64 {
			return end
		}
		return nil
	})
	require.ErrorIs(t, err, end)
	<-done
}

// TestTrimCutsLongFile checks that Trim shortens a file that has reached its longest length while a program has it open
// for appending, and that the program then writes at the new end. No kept output may be lost if the file system
// supports that; otherwise the file is emptied.
func TestTrimCutsLongFile(t *testing.T) {
	for name, collapse := range map[string]func(*os.File, int64) error{
		"collapse": collapse,
		"empty":    func(*os.File, int64) error { return errors.ErrUnsupported },
	} {
		l, w := newLog(t)
		l.longest, l.collapse = 4*keep, collapse
		const lines = 4 * keep / 64
		appendLines(t, w, 0, lines-1)
		require.NoError(t, l.Trim())
		before, err := l.Length()
		require.NoError(t, err)
		require.EqualValues(t, 4*keep-64, before, name)
		appendLines(t, w, lines-1, lines)
		require.NoError(t, l.Trim())
		after, err := l.Length()
		require.NoError(t, err)
		require.LessOrEqual(t, after, int64(keep+128<<10), name)
		appendLines(t, w, lines, lines+1)
		out, err := l.Tail(keep)
		require.NoError(t, err)
		require.Equal(t, line(lines), string(out[len(out)-64:]), name)
		if after > 0 {
			require.Len(t, out, keep)
			require.Equal(t, line(lines+1-keep/64), string(out[:64]), name)
		}
	}
}
