package main

import (
	"fmt"
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTimerSlack runs setTimerSlack in a child process. The program must be executed again in the same process with the
// same arguments, and its threads must have the timer slack of 1 ms.
func TestTimerSlack(t *testing.T) {
	const child = "TRIVET_TEST_TIMER_SLACK"
	if os.Getenv(child) != "" {
		setTimerSlack()
		fmt.Println("process", os.Getpid(), "slack", currentTimerSlack())
		os.Exit(0)
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestTimerSlack$")
	cmd.Env = append(os.Environ(), child+"=1")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, fmt.Sprintf("process %d slack 1ms\n", cmd.Process.Pid), string(out))
}
