package terminal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// pty opens a pseudo-terminal. The result terminal is the end that the program uses. The result keys is the other end,
// at which the test writes the user's input and reads what the terminal shows.
func pty(t *testing.T) (keys, terminal *os.File) {
	t.Helper()
	keys, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil && os.Getenv("CI") != "true" {
		t.Skipf("no pseudo-terminal here: %v", err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { _ = keys.Close() })
	n, err := unix.IoctlGetInt(int(keys.Fd()), unix.TIOCGPTN)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlSetPointerInt(int(keys.Fd()), unix.TIOCSPTLCK, 0))
	terminal, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	require.NoError(t, err)
	t.Cleanup(func() { _ = terminal.Close() })
	return keys, terminal
}

func echoes(t *testing.T, terminal *os.File) bool {
	t.Helper()
	a, err := unix.IoctlGetTermios(int(terminal.Fd()), getAttributes)
	require.NoError(t, err)
	return a.Lflag&unix.ECHO != 0
}

// asked is a writer that discards prompts and calls the function after for each.
type asked struct{ after func() }

func (a asked) Write(p []byte) (int, error) {
	a.after()
	return len(p), nil
}

func TestPasswordIsNotEchoed(t *testing.T) {
	keys, terminal := pty(t)
	require.True(t, Is(terminal))
	require.True(t, echoes(t, terminal))

	type answer struct {
		text string
		err  error
	}
	got := make(chan answer)
	go func() {
		text, err := Ask(t.Context(), terminal, io.Discard, "Password: ", true)
		got <- answer{text, err}
	}()
	for echoes(t, terminal) {
		// Wait until Ask has turned the echo off, or the test's context ends.
		require.NoError(t, t.Context().Err())
	}
	_, err := keys.WriteString("s3cret\n")
	require.NoError(t, err)
	a := <-got
	require.NoError(t, a.err)
	require.Equal(t, "s3cret", a.text)
	require.True(t, echoes(t, terminal), "Ask must turn the echo on again")

	// The terminal must have shown only the newline.
	seen := make([]byte, 64)
	n, err := keys.Read(seen)
	require.NoError(t, err)
	require.Equal(t, "\r\n", string(seen[:n]))
}

func TestPromptForName(t *testing.T) {
	keys, terminal := pty(t)
	var out bytes.Buffer
	_, err := keys.WriteString("demo\nnext\n")
	require.NoError(t, err)
	name, err := Ask(t.Context(), terminal, &out, "User: ", false)
	require.NoError(t, err)
	require.Equal(t, "demo", name)
	require.Equal(t, "User: ", out.String())
	next, err := Ask(t.Context(), terminal, &out, "Again: ", false)
	require.NoError(t, err)
	require.Equal(t, "next", next)
}

func TestInterruptedPromptRestoresTerminal(t *testing.T) {
	_, terminal := pty(t)
	ctx, cancel := context.WithCancel(t.Context())
	_, err := Ask(ctx, terminal, asked{cancel}, "Password: ", true)
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, echoes(t, terminal))
}

func TestEndOfInputIsAnError(t *testing.T) {
	keys, terminal := pty(t)
	_, err := keys.WriteString("\x04") // ^D
	require.NoError(t, err)
	_, err = Ask(t.Context(), terminal, io.Discard, "User: ", false)
	require.True(t, errors.Is(err, io.ErrUnexpectedEOF), "%v", err)
}

func TestFileIsNotATerminal(t *testing.T) {
	f, err := os.Open("/dev/null")
	require.NoError(t, err)
	defer f.Close()
	require.False(t, Is(f))
	_, err = Ask(t.Context(), f, io.Discard, "Password: ", true)
	require.ErrorContains(t, err, "turn the echo off")
}
