package sim

import (
	"bytes"
	"fmt"
	"sync"
)

// Trace is the log of a run, as text. It is safe for concurrent use.
type Trace struct {
	clock func() string

	mu   sync.Mutex
	text bytes.Buffer
}

// NewTrace returns an empty trace. Each line begins with the result of clock.
func NewTrace(clock func() string) *Trace { return &Trace{clock: clock} }

// Add formats a line as fmt.Sprintf does and adds it to the trace.
func (t *Trace) Add(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text.WriteString(t.clock())
	t.text.WriteString("  ")
	fmt.Fprintf(&t.text, format, args...)
	t.text.WriteByte('\n')
}

// String returns the whole trace.
func (t *Trace) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.String()
}

// Tail returns the last lines of the trace; lines is their number.
func (t *Trace) Tail(lines int) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := t.text.Bytes()
	at := len(text)
	for ; lines >= 0 && at > 0; lines-- {
		at = max(bytes.LastIndexByte(text[:at], '\n'), 0)
	}
	return string(bytes.TrimPrefix(text[at:], []byte("\n")))
}

// Violation is the error of a run in which a guarantee was violated.
type Violation struct {
	Ring  string // "a" or "b"
	Seed  uint64
	Says  string
	Trace *Trace
}

// tailLines is the number of lines of the trace in the message of a Violation.
const tailLines = 80

func (v *Violation) Error() string {
	test := map[string]string{"a": "TestRingA", "b": "TestRingB"}[v.Ring]
	return fmt.Sprintf("ring (%s), seed %d: %s\nthe last of its trace:\n%s\nagain: %s=%d %s=trace.txt go test ./controlplane/sim -run '^%s$' -v\n",
		v.Ring, v.Seed, v.Says, v.Trace.Tail(tailLines), SeedVariable, v.Seed, TraceVariable, test)
}
