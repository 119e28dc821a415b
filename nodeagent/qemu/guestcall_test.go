package qemu

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// execStatus is the name of the guest agent's command that returns how a program ended.
const execStatus = "guest-exec-status"

// TestGuestCalls checks which commands a guest agent gets for each call.
func TestGuestCalls(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	agent.replies["guest-exec"] = []string{`{"return": {"pid": 7}}` + "\n"}
	agent.replies[execStatus] = []string{
		`{"return": {"exited": false}}` + "\n",
		`{"return": {"exited": true, "exitcode": 3, "out-data": "b3V0", "err-data": "ZXJy", "err-truncated": true}}` + "\n",
	}
	require.NoError(t, l.p.SetGuestPassword(l.ctx, "root", "secret"))
	require.NoError(t, l.p.AddGuestSSHKeys(l.ctx, "root", []string{"ssh-ed25519 AAAA"}, true))
	exit, err := l.p.RunInGuest(l.ctx, GuestProgram{"cat", []string{"-"}, []byte("in")}, time.Minute)
	require.NoError(t, err)
	require.Equal(t, GuestExit{Code: 3, Output: []byte("out"), Errors: []byte("err"), ErrorsCut: true}, exit)
	agent.replies["guest-shutdown"] = []string{""} // as qemu-ga, which does not answer
	require.NoError(t, l.p.ShutDownGuest(l.ctx))
	require.Eventually(t, func() bool { return len(agent.arguments()) == 6 }, 10*time.Second, time.Millisecond)
	require.Equal(t, []string{
		`guest-set-user-password {"username":"root","password":"c2VjcmV0","crypted":false}`,
		`guest-ssh-add-authorized-keys {"username":"root","keys":["ssh-ed25519 AAAA"],"reset":true}`,
		`guest-exec {"path":"cat","arg":["-"],"input-data":"aW4=","capture-output":true}`,
		execStatus + ` {"pid":7}`,
		execStatus + ` {"pid":7}`,
		`guest-shutdown {"mode":"powerdown"}`,
	}, agent.arguments())
}

// TestHostileGuestAgent makes calls to guest agents that answer wrongly, too much or not at all. Each call must end with
// an error that shows nothing of the answer, and the next call must succeed.
func TestHostileGuestAgent(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	started := `{"return": {"pid": 7}}` + "\n"
	ended := func(fields string) string { return `{"return": {"exited": true, ` + fields + "}}\n" }
	for name, c := range map[string]struct {
		sync   string // the answer to the first message, before the right one, or "-" for no right one
		exec   string
		status string
	}{
		"silence":                        {sync: "-"},
		"wrong ids":                      {sync: "\xff{\"return\": 1}\n\xff{\"return\": \"x\"}\n\xff\n-"},
		"flood before the first answer":  {sync: strings.Repeat("x", 1<<20)},
		"flood of marks":                 {sync: strings.Repeat("\xff", 1<<20)},
		"no answer to a command":         {exec: "-"},
		"no JSON":                        {exec: "hello\n"},
		"JSON of another form":           {exec: `{"return": [1, 2]}` + "\n"},
		"deep JSON":                      {exec: `{"return": ` + strings.Repeat("[", 60_000) + "\n"},
		"flood":                          {exec: strings.Repeat("x", 1<<20)},
		"flood of a text":                {exec: `{"return": "` + strings.Repeat("x", 1<<20)},
		"invalid base64":                 {exec: started, status: ended(`"out-data": "*"`)},
		"exit code out of range":         {exec: started, status: ended(`"exitcode": 99999999999`)},
		"many texts":                     {exec: started, status: ended(strings.Repeat(`"x": "`+strings.Repeat("y", 1<<20)+`", `, 8) + `"exitcode": 0`)},
		"flood of output":                {exec: started, status: `{"return": {"out-data": "` + strings.Repeat("A", maxStatusReplies)},
		"flood outside of texts":         {exec: started, status: strings.Repeat(" ", 8<<20)},
		"an error with control codes":    {exec: `{"error": {"desc": "\u001b[2J` + strings.Repeat("z", 10_000) + `"}}` + "\n"},
		"a program that ends without id": {exec: `{"return": {}}` + "\n", status: `{"error": {"desc": "no such process"}}` + "\n"},
	} {
		t.Run(name, func(t *testing.T) {
			agent.set(func() {
				agent.sync = c.sync
				agent.replies = map[string][]string{"guest-exec": {c.exec}, execStatus: {c.status}}
			})
			ctx, cancel := context.WithTimeout(l.ctx, 5*time.Second)
			if strings.HasSuffix(c.sync, "-") || c.exec == "-" {
				ctx, cancel = context.WithTimeout(l.ctx, 200*time.Millisecond)
			}
			defer cancel()
			_, err := l.p.RunInGuest(ctx, GuestProgram{Path: "true"}, time.Minute)
			require.Error(t, err)
			require.LessOrEqual(t, len(err.Error()), 300)
			require.Equal(t, err.Error(), printable(err.Error(), 300))
			agent.set(func() {
				agent.sync = ""
				agent.replies = map[string][]string{"guest-exec": {started}, execStatus: {ended(`"out-data": "b2s="`)}}
			})
			exit, err := l.p.RunInGuest(l.ctx, GuestProgram{Path: "true"}, time.Minute)
			require.NoError(t, err, "the call after it")
			require.Equal(t, "ok", string(exit.Output))
		})
	}
}

// TestGuestStatusFlood checks that all replies about the state of one program are limited together: a guest could
// otherwise send a long reply to each query for as long as the program may run.
func TestGuestStatusFlood(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	agent.replies["guest-exec"] = []string{`{"return": {"pid": 7}}` + "\n"}
	agent.replies[execStatus] = []string{`{"return": {"exited": false, "out-data": "` + strings.Repeat("A", maxStatusReplies/3) + `"}}` + "\n"}
	_, err := l.p.RunInGuest(l.ctx, GuestProgram{Path: "sleep"}, 5*time.Minute)
	require.ErrorIs(t, err, errGuestSilent)
	require.Len(t, agent.commands(), 1+3, "guest-exec, and the queries for the state")
}

// TestProgramOfMigratedGuest checks the error for a program whose guest was paused for the switchover of a migration: the
// guest agent, which then does not answer, has no fault.
func TestProgramOfMigratedGuest(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	agent.replies["guest-exec"] = []string{`{"return": {"pid": 7}}` + "\n"}
	agent.replies[execStatus] = []string{`{"error": {"desc": "paused"}}` + "\n"}
	require.NoError(t, l.home.write(migratingName, struct{}{}))
	_, err := l.p.RunInGuest(l.ctx, GuestProgram{Path: "sleep"}, time.Minute)
	require.ErrorIs(t, err, errProgramMigrated)
}

// TestGuestProgramTimeout checks that a program whose time ends while the guest agent is silent gets ErrGuestTimeout.
func TestGuestProgramTimeout(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	for _, replies := range []map[string][]string{
		{"guest-exec": {"-"}}, {"guest-exec": {`{"return": {"pid": 7}}` + "\n"}, execStatus: {"-"}},
		{"guest-exec": {`{"return": {"pid": 7}}` + "\n"}, execStatus: {`{"return": {"exited": false}}` + "\n"}},
	} {
		agent.set(func() { agent.replies = replies })
		for range 10 {
			_, err := l.p.RunInGuest(l.ctx, GuestProgram{Path: "sleep"}, 120*time.Millisecond)
			require.ErrorIs(t, err, ErrGuestTimeout)
		}
	}
}

// TestHugeGuestOutput checks that the first maxOutput bytes of an output are kept, and that the answer is not kept in
// memory as a whole.
func TestHugeGuestOutput(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	huge := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte("0123456789"), 1<<20))
	agent.replies["guest-exec"] = []string{`{"return": {"pid": 7}}` + "\n"}
	agent.replies[execStatus] = []string{`{"return": {"exited": true, "out-data": "` + huge + `", "err-data": "` + huge + `"}}` + "\n"}
	exit, err := l.p.RunInGuest(l.ctx, GuestProgram{Path: "yes"}, time.Minute)
	require.NoError(t, err)
	require.True(t, exit.OutputCut)
	require.True(t, exit.ErrorsCut)
	require.Len(t, exit.Output, maxOutput)
	require.Len(t, exit.Errors, maxOutput)
}

// TestGuestOutputIsCut checks that readReduced keeps a limited number of bytes of each text.
func TestGuestOutputIsCut(t *testing.T) {
	line := `{"a": "` + strings.Repeat("x", 1000) + `", "b": "\"y"}`
	got, err := readReduced(bufio.NewReader(strings.NewReader(line+"\nmore")), 16)
	require.NoError(t, err, "the output of a program is kept without a limit")
	require.Equal(t, `{"a": "`+strings.Repeat("x", 16)+`", "b": "\"y"}`, string(got))
	_, err = readReduced(bufio.NewReader(strings.NewReader(strings.Repeat(" ", 65)+"\n")), 16)
	require.ErrorIs(t, err, io.ErrShortBuffer)
}

// TestLateAnswer checks that the answer to a call that was given up is not taken for the answer to a later call. The
// later calls are made concurrently.
func TestLateAnswer(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	agent.set(func() { agent.replies["guest-network-get-interfaces"] = []string{"-"} })
	ctx, cancel := context.WithTimeout(l.ctx, 200*time.Millisecond)
	defer cancel()
	_, err := l.p.GuestAddresses(ctx)
	require.ErrorIs(t, err, errGuestSilent)
	answer := func(a string) string {
		return `{"return": [{"name": "eth0", "ip-addresses": [{"ip-address": "` + a + `"}]}]}` + "\n"
	}
	// The late answer comes before the answer to the first message of the next connection.
	agent.set(func() {
		agent.sync = answer("10.0.0.1")
		agent.replies["guest-network-get-interfaces"] = []string{answer("10.0.0.2")}
	})
	ends := make(chan error, 8)
	for range cap(ends) {
		go func() {
			all, err := l.p.GuestAddresses(l.ctx)
			if err == nil && (len(all) != 1 || all[0] != "10.0.0.2") {
				err = fmt.Errorf("addresses %v", all)
			}
			ends <- err
		}()
	}
	for range cap(ends) {
		require.NoError(t, <-ends)
	}
}

// TestFrozenGuestGetsNoCommands checks that a guest whose file systems may be frozen gets no commands.
func TestFrozenGuestGetsNoCommands(t *testing.T) {
	l := newCopyLab(t)
	agent := l.fakeAgent()
	require.NoError(t, l.home.write(frozenName, struct{}{}))
	_, err := l.p.RunInGuest(l.ctx, GuestProgram{Path: "true"}, time.Minute)
	require.ErrorIs(t, err, errFrozen)
	require.ErrorIs(t, l.p.SetGuestPassword(l.ctx, "root", "secret"), errFrozen)
	require.Empty(t, agent.commands())
}

// TestGuestWithoutAgentPort checks the error of calls for a guest in which no guest agent runs.
func TestGuestWithoutAgentPort(t *testing.T) {
	l := newCopyLab(t)
	require.ErrorIs(t, l.p.SetGuestPassword(l.ctx, "root", "secret"), ErrNoGuestAgent)
	_, known, err := l.p.GuestMemory(l.ctx)
	require.NoError(t, err)
	require.False(t, known, "the guest has no balloon driver")
}

// answerSync answers guest-sync-delimited as a.sync says.
func (a *fakeAgent) answerSync(c net.Conn, id int64) {
	a.mu.Lock()
	before, right := strings.CutSuffix(a.sync, "-")
	a.mu.Unlock()
	_, _ = io.WriteString(c, before)
	if !right {
		fmt.Fprintf(c, "\xff{\"return\": %d}\n", id)
	}
}

// nextReply returns the reply to a command: the first of a.replies that is left, or the last one. A reply "-" means
// none. It returns false if a.replies has none for the command.
func (a *fakeAgent) nextReply(command string, arguments json.RawMessage) (string, bool) {
	a.given = append(a.given, strings.TrimSpace(command+" "+string(arguments)))
	all := a.replies[command]
	if len(all) == 0 {
		return "", false
	}
	if len(all) > 1 {
		a.replies[command] = all[1:]
	}
	return strings.TrimSuffix(all[0], "-"), true
}

func (a *fakeAgent) set(change func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change()
}

func (a *fakeAgent) arguments() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.given...)
}
