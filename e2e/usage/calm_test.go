package usage

import (
	"context"
	"fmt"
	"os/exec"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestProcesses(t *testing.T) {
	stat := func(flags, user, system, children, started int) *fstest.MapFile {
		return &fstest.MapFile{Data: fmt.Appendf(nil, "1 (a ) b) S 1 1 1 0 -1 %d 1 2 3 4 %d %d %d 0 20 0 12 0 %d 1 1\n", flags, user, system, children, started)}
	}
	proc := fstest.MapFS{
		"1/stat":      stat(0, 10, 5, 1000, 1),
		"2/stat":      stat(kernelThread, 700, 0, 0, 1),
		"30/stat":     stat(64, 20, 5, 100, 50),
		"31/stat":     stat(64, 20, 5, 0, 60),
		"self/stat":   stat(0, 9, 9, 9, 9),
		"uptime":      {Data: []byte("1 1")},
		"40/cmdline":  {Data: []byte("a process that ended while it was read")},
		"version/any": {},
	}
	before, err := processes(proc)
	require.NoError(t, err)
	require.Equal(t, map[int]process{
		1:  {1, 15 * tick}, // for PID 1, the 1000 ticks of its children are not counted
		30: {50, 125 * tick},
		31: {60, 25 * tick},
	}, before)

	proc["30/stat"] = stat(64, 25, 5, 150, 50) // the process has used 55 more ticks, with its children
	proc["31/stat"] = stat(64, 9000, 0, 0, 99) // a new process with the PID of one that has ended
	proc["32/stat"] = stat(64, 9000, 0, 0, 99) // a process that did not exist before
	now, err := processes(proc)
	require.NoError(t, err)
	require.Equal(t, 55*tick, used(before, now))

	proc["33/stat"] = &fstest.MapFile{Data: []byte("33 (x) S 1")}
	_, err = processes(proc)
	require.EqualError(t, err, "process 33: 2 fields after the name in stat")
}

// TestDisturbed checks that a busy process makes a run disturbed if it existed before the run, but not if it was
// started during the run, and that a run is disturbed if Await used up its patience.
func TestDisturbed(t *testing.T) {
	busy := func(t *testing.T) {
		cmd := exec.Command("sh", "-c", "while :; do :; done")
		require.NoError(t, cmd.Start())
		t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	}
	disturbed := func(c *Calm) string {
		reason, err := c.Disturbed()
		require.NoError(t, err)
		return reason
	}
	busy(t)
	c, err := NewCalm(time.Nanosecond)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return disturbed(c) != "" }, time.Minute, 10*time.Millisecond)
	require.Regexp(t, `^other processes used \d+ % of a core during the run$`, disturbed(c))

	own, err := NewCalm(time.Nanosecond)
	require.NoError(t, err)
	own.others = nil // ignore processes that run on this machine beside the test
	busy(t)
	require.Empty(t, disturbed(own))
	require.NoError(t, own.Await(context.Background()))
	require.NoError(t, own.Await(context.Background()), "Await must return at once when its patience is used up")
	require.Equal(t, "the machine was not idle before a round", disturbed(own))
}
