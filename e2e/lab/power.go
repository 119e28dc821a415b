package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// PowerOff kills all processes of the host at once, as a loss of power does: the agent, its guard process and the
// guests. The files of the host stay. Start switches the host on again.
func (a *Agent) PowerOff(ctx context.Context) error {
	a.Dir.Signal(a.Name, syscall.SIGKILL)
	for _, pid := range a.guards() {
		_ = syscall.Kill(pid, syscall.SIGKILL) // the process may have ended
	}
	_, err := a.EndGuests(ctx)
	return errors.Join(err, a.Dir.Kill(a.Name))
}

// guards returns the pids of the guard processes that the agent has started.
func (a *Agent) guards() (pids []int) {
	all, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is valid
	for _, file := range all {
		line, err := os.ReadFile(file)
		args := bytes.Split(line, []byte{0})
		if err != nil || len(args) < 3 || string(args[1]) != "guard-lease" || string(args[2]) != a.DataDir() {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Cut drops all packets from the agent to members, without an error, until heal is called. The agent must have a GID
// that no other process in its network namespace has, and must be in the namespace of the calling process.
func (a *Agent) Cut() (heal func() error, err error) {
	if a.GID == 0 || a.Net != "" {
		return nil, fmt.Errorf("cut %s off: it has no GID, or a network namespace of its own", a.Name)
	}
	table := fmt.Sprintf("lab-cut-%d", a.GID)
	heal = func() error { return tool("nft", "delete", "table", "inet", table) }
	for _, line := range []string{
		"add table inet " + table,
		"add chain inet " + table + " output { type filter hook output priority 0; }",
		fmt.Sprintf("add rule inet %s output meta skgid %d tcp dport 7443 drop", table, a.GID),
	} {
		if err := tool("nft", strings.Fields(line)...); err != nil {
			return nil, errors.Join(err, heal())
		}
	}
	return heal, nil
}
