package qemu

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
)

// fakeAgent is an agent of a guest that answers at the socket in place of the guest's virtio-serial port.
type fakeAgent struct {
	mu       sync.Mutex
	received []string
	// refuse has the commands to which the agent answers with an error, and ignore those that it does not answer.
	refuse, ignore map[string]bool
	// replies has the replies to commands, and sync what comes before the answer to the first message: see nextReply
	// and answerSync. given has the commands with their arguments.
	replies map[string][]string
	sync    string
	given   []string
}

// fakeAgent replaces the socket of the running QEMU by a fake agent. QEMU does not know that this agent has the port
// open.
func (l *copyLab) fakeAgent() *fakeAgent {
	l.Helper()
	require.NoError(l, os.Remove(l.home.path(agentSocket)))
	dir, err := os.Open(l.home.dir)
	require.NoError(l, err)
	defer dir.Close()
	listener, err := net.Listen("unix", socketPath(dir, agentSocket))
	require.NoError(l, err)
	l.p.agentPortOpen = func(context.Context) (bool, error) { return true, nil }
	a := &fakeAgent{refuse: map[string]bool{}, ignore: map[string]bool{}, replies: map[string][]string{}}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			a.serve(c)
			_ = c.Close()
		}
	})
	l.Cleanup(func() { _ = listener.Close(); serving.Wait() })
	return a
}

func (a *fakeAgent) serve(c net.Conn) {
	fmt.Fprint(c, "{\"return\": \"of an earlier client\"}\n")
	in := bufio.NewReader(c)
	for {
		line, err := in.ReadBytes('\n')
		if err != nil {
			return
		}
		if len(line) > 0 && line[0] == 0xff {
			line = line[1:]
		}
		var q struct {
			Execute   string          `json:"execute"`
			Arguments json.RawMessage `json:"arguments"`
		}
		if json.Unmarshal(line, &q) != nil {
			return
		}
		if q.Execute == "guest-sync-delimited" {
			var sync struct {
				ID int64 `json:"id"`
			}
			_ = json.Unmarshal(q.Arguments, &sync)
			a.answerSync(c, sync.ID)
			continue
		}
		a.mu.Lock()
		a.received = append(a.received, q.Execute)
		refuse, ignore := a.refuse[q.Execute], a.ignore[q.Execute]
		reply, set := a.nextReply(q.Execute, q.Arguments)
		a.mu.Unlock()
		switch {
		case set:
			_, _ = io.WriteString(c, reply)
		case ignore:
		case refuse:
			fmt.Fprint(c, "{\"error\": {\"class\": \"GenericError\", \"desc\": \"not today\"}}\n")
		default:
			fmt.Fprint(c, "{\"return\": 2}\n")
		}
	}
}

func (a *fakeAgent) commands() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.received)
}

// TestGuestWithoutAgent checks that a guest without an agent, and one whose agent refuses to freeze, is not frozen, and
// that its disks are copied all the same.
func TestGuestWithoutAgent(t *testing.T) {
	l := newCopyLab(t)
	out, err := l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes)})
	require.NoError(t, err)
	require.False(t, out.Frozen, "nothing in the guest answers")
	agent := l.fakeAgent()
	agent.refuse["guest-fsfreeze-freeze"] = true
	out, err = l.p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(t.TempDir(), "d0", diskBytes)})
	require.NoError(t, err)
	require.False(t, out.Frozen)
	require.Equal(t, []string{"guest-fsfreeze-freeze", "guest-fsfreeze-thaw"}, agent.commands(), "a part may have been frozen")
}
