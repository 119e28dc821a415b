package qemu

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// affinities returns the CPUs on which each thread of QEMU may run, by the name of the thread. It checks that threads of
// the same name have the same CPUs.
func affinities(t *testing.T, p *Process) map[string][]int {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/task", p.Record().PID)
	threads, err := os.ReadDir(dir)
	require.NoError(t, err)
	out := map[string][]int{}
	for _, thread := range threads {
		tid, err := strconv.Atoi(thread.Name())
		require.NoError(t, err)
		name, err := os.ReadFile(fmt.Sprintf("%s/%d/comm", dir, tid))
		if err != nil {
			continue // the thread has ended
		}
		var set unix.CPUSet
		if unix.SchedGetaffinity(tid, &set) != nil {
			continue
		}
		var cpus []int
		for cpu := range 1024 {
			if set.IsSet(cpu) {
				cpus = append(cpus, cpu)
			}
		}
		key := strings.TrimSpace(string(name))
		if known, ok := out[key]; ok {
			require.Equal(t, known, cpus, key)
		}
		out[key] = cpus
	}
	return out
}

// TestDedicatedCPUs starts a guest with a dedicated CPU. Only its vCPU may run there, also after a new agent with another
// setting has adopted the process.
func TestDedicatedCPUs(t *testing.T) {
	l := newLab(t)
	l.launcher.SharedCPUs = []int{0}
	s, files := l.bootable()
	s.DedicatedCPUs, s.CPUs = true, []int{1}
	p := l.launch(s, files)
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")
	check := func(p *Process, vcpu, others []int) {
		t.Helper()
		all := affinities(t, p)
		require.Equal(t, vcpu, all["CPU 0/TCG"])
		delete(all, "CPU 0/TCG")
		require.NotEmpty(t, all)
		for name, cpus := range all {
			require.Equal(t, others, cpus, name)
		}
	}
	check(p, []int{1}, []int{0})
	text, err := p.Machine()
	require.NoError(t, err)
	require.Contains(t, string(text), `"version":2`, "agents that do not know dedicated CPUs must refuse it")
	moved, err := ParseMachine(text)
	require.NoError(t, err)
	require.True(t, moved.DedicatedCPUs)
	require.Empty(t, moved.CPUs, "the target of a migration chooses its own CPUs")

	l.launcher.SharedCPUs = []int{0, 1}
	next := l.readopt(p)
	check(next, []int{1}, []int{0, 1})
	l.launcher.SharedCPUs = nil
	next = l.readopt(next)
	check(next, []int{1}, []int{0, 1})
	l.writes()
}
