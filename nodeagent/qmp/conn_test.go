package qmp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// play acts as QEMU on the other end of a connection. It executes a script with one step per line:
//
//	hello           send the greeting, read qmp_capabilities with the arguments {}, and reply to it
//	hear COMMAND    read one command, whose name must be COMMAND
//	say TEXT        send TEXT and a line end; $1 in TEXT is the id of the first command read after hello, and so on
//	type TEXT       send TEXT without a line end
//	event NAME      send an event with that name
//	flood N SIZE    send N events FLOOD {"n": 0…, "pad": SIZE bytes}
//	read N          read only N bytes
//	sleep DURATION  wait for a duration such as 20s
//	hang up         close the connection and return
//
// After the last step it returns nil without closing nc. It returns the error of a step that fails.
func play(nc net.Conn, script string) error {
	r := bufio.NewReader(nc)
	var heard []string
	ids := func(s string) string {
		for i := len(heard); i > 0; i-- {
			s = strings.ReplaceAll(s, "$"+strconv.Itoa(i), heard[i-1])
		}
		return s
	}
	hear := func(want string) (request, error) {
		line, err := r.ReadBytes('\n')
		if err != nil {
			return request{}, err
		}
		var req request
		if err := json.Unmarshal(line, &req); err != nil || req.Execute != want {
			return req, fmt.Errorf("received %s, want %s (%v)", line, want, err)
		}
		heard = append(heard, strconv.FormatUint(req.ID, 10))
		return req, nil
	}
	for _, line := range strings.Split(strings.TrimSpace(script), "\n") {
		verb, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		var err error
		switch verb {
		case "":
		case "hello":
			fmt.Fprint(nc, `{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "x"}, "capabilities": ["oob"]}}`+"\r\n")
			var req request
			if req, err = hear("qmp_capabilities"); err == nil && string(req.Arguments) != "{}" {
				err = fmt.Errorf("qmp_capabilities %s, want {}", req.Arguments)
			}
			fmt.Fprintln(nc, ids(`{"return": {}, "id": $1}`))
			heard = nil
		case "hear":
			_, err = hear(rest)
		case "say":
			_, err = io.WriteString(nc, ids(rest)+"\r\n")
		case "type":
			_, err = io.WriteString(nc, ids(rest))
		case "event":
			_, err = fmt.Fprintf(nc, `{"event": %q, "data": {}, "timestamp": {"seconds": 7, "microseconds": 9}}`+"\n", rest)
		case "flood":
			var n, size int
			_, err = fmt.Sscan(rest, &n, &size)
			pad := strings.Repeat("x", size)
			for i := 0; i < n && err == nil; i++ {
				_, err = fmt.Fprintf(nc, `{"event": "FLOOD", "data": {"n": %d, "pad": %q}}`+"\n", i, pad)
			}
		case "read":
			n, _ := strconv.Atoi(rest)
			_, err = io.ReadFull(nc, make([]byte, n)) // not r, which would read ahead
		case "sleep":
			d, _ := time.ParseDuration(rest)
			time.Sleep(d)
		case "hang":
			return nc.Close()
		default:
			err = errors.New("unknown step")
		}
		if err != nil {
			return fmt.Errorf("step %q: %w", line, err)
		}
	}
	return nil
}

// against runs client, with virtual time, on a connection to a fake QEMU that executes script (see play). All steps
// must succeed, and no goroutine may outlive the test.
func against(t *testing.T, script string, client func(t *testing.T, nc net.Conn)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		var played error
		var qemu sync.WaitGroup
		qemu.Go(func() { played = play(far, script) })
		defer func() { // this runs also if client has failed
			near.Close()
			qemu.Wait()
			far.Close()
			require.NoError(t, played)
		}()
		client(t, near)
	})
}

// connected does what against does, with a client that gets the connection after the handshake.
func connected(t *testing.T, script string, client func(t *testing.T, c *Conn)) {
	t.Helper()
	against(t, script, func(t *testing.T, nc net.Conn) {
		c, err := New(t.Context(), nc)
		require.NoError(t, err)
		defer c.Close()
		client(t, c)
	})
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// requireUnmatched checks how many replies arrived after their caller had stopped waiting, and how many matched no
// command.
func requireUnmatched(t *testing.T, c *Conn, late, unasked uint64) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	require.Equal(t, [2]uint64{late, unasked}, [2]uint64{c.late, c.unasked})
}

func named(name string) func(Event) bool { return func(e Event) bool { return e.Name == name } }

func TestHandshake(t *testing.T) {
	for name, tc := range map[string]struct {
		script string
		is     error  // error that New must wrap
		says   string // text that the error must contain; "" if New must succeed
	}{
		"plain":                                                   {script: "hello"},
		"an event before the greeting":                            {script: "event EARLY\nhello"},
		"an event before the first reply":                         {script: "say {\"QMP\": {}}\nevent EARLY\nhear qmp_capabilities\nevent EARLY\nsay {\"return\": {}, \"id\": $1}"},
		"empty lines":                                             {script: "say\nsay \nhello"},
		"text that is not JSON":                                   {script: "say SSH-2.0-OpenSSH_9.2", is: ErrClosed, says: "not a QMP message"},
		"JSON object that is not a message":                       {script: "say {\"status\": \"running\"}", is: ErrClosed, says: "neither greeting, event nor reply"},
		"a number":                                                {script: "say 7", is: ErrClosed, says: "not a QMP message"},
		"a line without an end":                                   {script: "type {\"QMP\"\nhang up", is: ErrClosed, says: "unexpected EOF"},
		"connection closed before a greeting":                     {script: "hang up", is: ErrClosed, says: "read greeting"},
		"no greeting because another client is connected":         {script: "sleep 20s", is: ErrBusy, says: "deadline exceeded"},
		"no reply to qmp_capabilities":                            {script: "say {\"QMP\": {}}\nhear qmp_capabilities\nsleep 20s", is: context.DeadlineExceeded, says: "qmp_capabilities"},
		"QEMU that does not read after its greeting":              {script: "say {\"QMP\": {}}\nsleep 20s", is: context.DeadlineExceeded, says: "qmp_capabilities"},
		"qmp_capabilities refused":                                {script: "say {\"QMP\": {}}\nhear qmp_capabilities\nsay {\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"no\"}, \"id\": $1}", says: "qmp_capabilities: CommandNotFound: no"},
		"two greetings":                                           {script: "say {\"QMP\": {}}\nsay {\"QMP\": {}}", is: ErrClosed, says: "second greeting"},
		"a reply to another client's command before the greeting": {script: "say {\"return\": {}, \"id\": 1}\nhello"},
	} {
		t.Run(name, func(t *testing.T) {
			against(t, tc.script, func(t *testing.T, nc net.Conn) {
				c, err := New(t.Context(), nc)
				if tc.says == "" {
					require.NoError(t, err)
					require.Equal(t, Mark(strings.Count(tc.script, "EARLY")), c.Mark(), "events before the greeting must be kept")
					require.NoError(t, c.Close())
					return
				}
				require.ErrorContains(t, err, tc.says)
				if tc.is != nil {
					require.ErrorIs(t, err, tc.is)
				}
				_, err = nc.Write([]byte("x"))
				require.Error(t, err, "a failed New must close the connection")
			})
		})
	}
}

func TestCommandHasDefaultTimeout(t *testing.T) {
	connected(t, "hello\nhear query-status\nsleep 1m", func(t *testing.T, c *Conn) {
		start := time.Now()
		err := c.Do(t.Context(), "query-status", nil, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, DefaultTimeout, time.Since(start))
		time.Sleep(time.Minute)
	})
}

func TestLateReplyIsDropped(t *testing.T) {
	script := `hello
		hear device_add
		sleep 5s
		hear query-status
		say {"return": {"late": true}, "id": $1}
		say {"return": {"status": "running"}, "id": $2}`
	connected(t, script, func(t *testing.T, c *Conn) {
		err := c.Do(within(t, time.Second), "device_add", map[string]string{"driver": "x"}, nil)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "device_add")
		var out map[string]any
		require.NoError(t, c.Do(t.Context(), "query-status", nil, &out))
		require.Equal(t, map[string]any{"status": "running"}, out)
		requireUnmatched(t, c, 1, 0)
		require.Empty(t, c.pending)
	})
}

func TestRepliesAreMatchedByID(t *testing.T) {
	script := `hello
		hear first
		hear second
		say {"return": 2, "id": $2}
		say {"return": 0, "id": 99}
		say {"return": 0, "id": "1"}
		say {"error": {"class": "GenericError", "desc": "JSON parse error"}}
		say {"return": 1, "id": $1}
		say {"return": 1, "id": $1}
		hear last
		say {"return": 3, "id": $3}`
	connected(t, script, func(t *testing.T, c *Conn) {
		var wg sync.WaitGroup
		defer wg.Wait()
		first := 0
		wg.Go(func() { assert.NoError(t, c.Do(t.Context(), "first", nil, &first)) })
		synctest.Wait()
		n := 0
		require.NoError(t, c.Do(t.Context(), "second", nil, &n))
		require.Equal(t, 2, n)
		wg.Wait()
		require.Equal(t, 1, first)
		require.NoError(t, c.Do(t.Context(), "last", nil, &n))
		require.Equal(t, 3, n)
		requireUnmatched(t, c, 1, 3)
	})
}

func TestErrorsKeepTheirClass(t *testing.T) {
	connected(t, "hello\nhear device_del\nsay {\"id\": $1, \"error\": {\"class\": \"DeviceNotFound\", \"desc\": \"Device 'a' not found\"}}", func(t *testing.T, c *Conn) {
		err := c.Do(t.Context(), "device_del", map[string]string{"id": "a"}, nil)
		e, ok := errors.AsType[*Error](err)
		require.True(t, ok)
		require.Equal(t, &Error{Class: "DeviceNotFound", Desc: "Device 'a' not found"}, e)
		require.EqualError(t, err, "device_del: DeviceNotFound: Device 'a' not found")
		require.NoError(t, c.Err(), "a refusal must not end the session")
	})
}

// TestConnectionEnd checks that the command in progress and all later ones fail with the cause of the connection's end,
// and that events before the end can still be read.
func TestConnectionEnd(t *testing.T) {
	for name, tc := range map[string]struct{ script, says string }{
		"text that is not JSON":       {"say qemu: terminating on signal 15", "not a QMP message"},
		"bytes that are not UTF-8":    {"say \x00\xff\xfe{", "not a QMP message"},
		"an incomplete reply":         {"type {\"return\": {\nhang up", "unexpected EOF"},
		"hang up":                     {"hang up", "EOF"},
		"error that is not an object": {"say {\"error\": \"no\", \"id\": $1}", "not a QMP message"},
	} {
		t.Run(name, func(t *testing.T) {
			connected(t, "hello\nhear cont\nevent RESUME\n"+tc.script, func(t *testing.T, c *Conn) {
				for range 2 {
					err := c.Do(t.Context(), "cont", nil, nil)
					require.ErrorIs(t, err, ErrClosed)
					require.ErrorContains(t, err, tc.says)
				}
				<-c.Done()
				require.ErrorIs(t, c.Err(), ErrClosed)
				_, err := c.Wait(t.Context(), 0, named("RESUME"))
				require.NoError(t, err, "events before the end must be readable")
				_, err = c.Wait(t.Context(), 0, named("SHUTDOWN"))
				require.ErrorIs(t, err, ErrClosed)
			})
		})
	}
}

func TestReplyBeforeEndIsReturned(t *testing.T) {
	connected(t, "hello\nhear quit\nsay {\"return\": {}, \"id\": $1}\nhang up", func(t *testing.T, c *Conn) {
		require.NoError(t, c.Do(t.Context(), "quit", nil, nil))
	})
}

func TestLongLines(t *testing.T) {
	for size, ok := range map[int]bool{300 << 10: true, MaxLine - 100: true, MaxLine + 1: false} {
		synctest.Test(t, func(t *testing.T) {
			near, far := net.Pipe()
			var wg sync.WaitGroup
			wg.Go(func() {
				_ = play(far, "hello\nhear query-qmp-schema")
				_, _ = fmt.Fprintf(far, "{\"return\": %q, \"id\": 2}\n", strings.Repeat("x", size))
			})
			c, err := New(t.Context(), near)
			require.NoError(t, err)
			var out string
			err = c.Do(t.Context(), "query-qmp-schema", nil, &out)
			if ok {
				require.NoError(t, err)
				require.Len(t, out, size)
			} else {
				require.ErrorIs(t, err, ErrClosed)
				require.ErrorContains(t, err, "longer than 16777216 bytes")
			}
			c.Close()
			wg.Wait()
		})
	}
}

func TestUnsendableCommandLeavesConnectionUsable(t *testing.T) {
	connected(t, "hello\nhear query-status\nsay {\"return\": {\"a\": 1}, \"id\": $1}", func(t *testing.T, c *Conn) {
		require.ErrorContains(t, c.Do(t.Context(), "a", make(chan int), nil), "a: encode arguments")
		require.ErrorContains(t, c.Do(t.Context(), "a", strings.Repeat("x", MaxLine), nil), "longer than")
		require.ErrorContains(t, c.SendFD(t.Context(), "tap", os.Stdin), "pass descriptor: a *net.pipe cannot")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, c.Do(ctx, "a", nil, nil), context.Canceled)
		require.Empty(t, c.pending)
		var wrong []int
		require.ErrorContains(t, c.Do(t.Context(), "query-status", nil, &wrong), "query-status: decode result")
	})
}

// TestHungQEMU checks that the connection to a QEMU that does not read stays open, unless only a part of a command was
// written.
func TestHungQEMU(t *testing.T) {
	connected(t, "hello\nsleep 30s\nhear cont\nsay {\"return\": {}, \"id\": $1}", func(t *testing.T, c *Conn) {
		require.ErrorIs(t, c.Do(within(t, time.Second), "stop", nil, nil), context.DeadlineExceeded)
		time.Sleep(time.Minute)
		require.NoError(t, c.Do(t.Context(), "cont", nil, nil))
	})
	connected(t, "hello\nread 5\nsleep 1500ms\nevent STOP\nsleep 1m", func(t *testing.T, c *Conn) {
		err := c.Do(within(t, time.Second), "stop", nil, nil)
		require.ErrorIs(t, err, ErrClosed)
		require.ErrorContains(t, err, "write 5 of 26 bytes")
		require.ErrorIs(t, c.Do(t.Context(), "cont", nil, nil), ErrClosed)
		_, err = c.Wait(t.Context(), 0, named("STOP"))
		require.NoError(t, err, "QEMU's last output must still be read")
		<-c.Done()
		time.Sleep(time.Minute)
	})
}

func TestCloseEndsPendingCommands(t *testing.T) {
	connected(t, "hello\nhear stop", func(t *testing.T, c *Conn) {
		var wg sync.WaitGroup
		wg.Go(func() { assert.ErrorIs(t, c.Do(t.Context(), "stop", nil, nil), ErrClosed) })
		wg.Go(func() {
			_, err := c.Wait(t.Context(), 0, named("STOP"))
			assert.ErrorIs(t, err, ErrClosed)
		})
		synctest.Wait()
		require.NoError(t, c.Close())
		wg.Wait()
		require.NoError(t, c.Close())
		require.Equal(t, ErrClosed, c.Err())
	})
}

func TestWaitSeesEventsSinceMark(t *testing.T) {
	script := `hello
		event STOP
		hear cont
		event RESUME
		say {"return": {}, "id": $1}
		hear query-status
		say {"return": {"status": "running"}, "id": $2}
		event STOP`
	connected(t, script, func(t *testing.T, c *Conn) {
		synctest.Wait()
		from := c.Mark()
		require.NoError(t, c.Do(t.Context(), "cont", nil, nil))
		e, err := c.Wait(t.Context(), from, func(e Event) bool {
			// A match function may use the connection.
			return e.Name == "RESUME" && c.Do(t.Context(), "query-status", nil, nil) == nil
		})
		require.NoError(t, err)
		require.Equal(t, time.Unix(7, 9000), e.Time)
		e, err = c.Wait(t.Context(), from, named("STOP"))
		require.NoError(t, err)
		require.Equal(t, Mark(2), e.At, "Wait must not return the STOP event before the mark")
		_, err = c.Wait(within(t, time.Second), e.At+1, named("STOP"))
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestEventFloodDoesNotBlockReaders(t *testing.T) {
	connected(t, "hello\nevent FIRST\nflood 5000 1\nhear query-status\nsay {\"return\": {}, \"id\": $1}\nevent LAST", func(t *testing.T, c *Conn) {
		s := c.Subscribe(0)
		require.NoError(t, c.Do(t.Context(), "query-status", nil, nil))
		synctest.Wait()
		_, err := c.Wait(t.Context(), 0, named("FIRST"))
		require.ErrorIs(t, err, ErrDropped)
		e, err := c.Wait(t.Context(), 0, named("LAST"))
		require.NoError(t, err, "Wait must return an event that follows dropped events")
		require.Equal(t, Mark(5001), e.At)

		e, err = s.Next(t.Context())
		require.NoError(t, err)
		require.Equal(t, uint64(5002-maxEvents), e.Dropped)
		for n := 5000 - maxEvents + 1; n < 5000; n++ {
			var data struct{ N int }
			require.NoError(t, e.Decode(&data))
			require.Equal(t, n, data.N)
			e, err = s.Next(t.Context())
			require.NoError(t, err)
			require.Zero(t, e.Dropped)
		}
		require.Equal(t, "LAST", e.Name)
	})
}

func TestEventLogByteLimit(t *testing.T) {
	connected(t, "hello\nflood 20 1000000", func(t *testing.T, c *Conn) {
		_, err := c.Wait(t.Context(), 19, named("FLOOD"))
		require.NoError(t, err)
		require.LessOrEqual(t, c.log.bytes, maxEventBytes)
		require.Len(t, c.log.events, 4)
	})
	connected(t, "hello\nflood 2 5000000", func(t *testing.T, c *Conn) {
		_, err := c.Wait(t.Context(), 1, named("FLOOD"))
		require.NoError(t, err, "the newest event must be kept whatever its size")
		require.Len(t, c.log.events, 1)
	})
}

func TestConcurrentCallers(t *testing.T) {
	near, far := net.Pipe()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		_ = play(far, "hello")
		r := json.NewDecoder(far)
		for n := 0; ; n++ {
			var req request
			if r.Decode(&req) != nil {
				return
			}
			fmt.Fprintf(far, `{"event": "E%d"}`+"\n"+`{"return": %s, "id": %d}`+"\n", n, req.Arguments, req.ID)
		}
	})
	c, err := New(t.Context(), near)
	require.NoError(t, err)
	defer c.Close()
	var callers sync.WaitGroup
	for i := range 32 {
		callers.Go(func() {
			for j := range 50 {
				var out [2]int
				assert.NoError(t, c.Do(t.Context(), "echo", [2]int{i, j}, &out))
				assert.Equal(t, [2]int{i, j}, out)
			}
		})
	}
	s := c.Subscribe(0)
	for n := Mark(0); n < 32*50; n++ {
		e, err := s.Next(t.Context())
		require.NoError(t, err)
		n += Mark(e.Dropped)
		require.Equal(t, fmt.Sprintf("E%d", n), e.Name)
	}
	callers.Wait()
}

// TestAClosedDescriptorIsNotSent checks that SendFD refuses a closed file before it sends anything, so that the
// connection stays usable.
func TestAClosedDescriptorIsNotSent(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	ends := make([]net.Conn, 2)
	for i, fd := range pair {
		f := os.NewFile(uintptr(fd), "pair")
		ends[i], err = net.FileConn(f)
		require.NoError(t, err)
		f.Close()
	}
	played := make(chan error, 1)
	go func() { played <- play(ends[1], "hello\nhear getfd\nsay {\"return\": {}, \"id\": $1}") }()
	c, err := New(t.Context(), ends[0])
	require.NoError(t, err)
	defer c.Close()

	closed := os.NewFile(uintptr(must(unix.Dup(0))), "closed")
	closed.Close()
	require.ErrorContains(t, c.SendFD(t.Context(), "one", closed), "pass descriptor: use of closed file")
	require.NoError(t, c.Err(), "the connection must stay usable, because nothing was sent")
	require.NoError(t, c.SendFD(t.Context(), "two", os.Stdin))
	require.NoError(t, <-played)
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// FuzzStream checks that any stream gives the same messages and errors however it is split into reads, and that each
// message is either a greeting, an event or a reply.
func FuzzStream(f *testing.F) {
	f.Add([]byte(`{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": ["oob"]}}` + "\r\n" +
		`{"return": {}, "id": 1}` + "\r\n" + `{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "SHUTDOWN", "data": {"guest": true}}` + "\r\n"))
	f.Add([]byte(`{"id": 2, "error": {"class": "GenericError", "desc": "x"}}` + "\n\n{"))
	f.Add([]byte(`{"event": "A", "return": null, "data": null, "timestamp": {"seconds": -1}}` + "\n" + strings.Repeat(" ", 5000) + "\n"))
	f.Add([]byte(`{"id": 18446744073709551616, "return": 1e999}` + "\n"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		complete := readAll(t, bytes.NewReader(stream))
		require.Equal(t, complete, readAll(t, iotest.OneByteReader(bytes.NewReader(stream))))
	})
}

func readAll(t *testing.T, r io.Reader) (got []string) {
	in := newLines(r)
	for {
		line, err := in.next()
		if err != nil {
			return append(got, err.Error())
		}
		m, err := decode(line)
		if err != nil {
			return append(got, err.Error())
		}
		clear(line) // the result of decode must not refer to line
		switch {
		case m.greeting:
			require.True(t, m.event == nil && m.reply == nil)
			got = append(got, "greeting")
		case m.event != nil:
			require.True(t, m.reply == nil && m.event.Name != "")
			require.True(t, m.event.Data == nil || json.Valid(m.event.Data))
			got = append(got, fmt.Sprintf("event %+v", *m.event))
		default:
			ret, err := m.reply.result()
			require.True(t, (err != nil) != json.Valid(ret), "a reply must have either an error or a result")
			got = append(got, fmt.Sprintf("reply %d %s %v", m.reply.id, ret, err))
		}
	}
}
