package cgroup

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// fakeHost is a directory that takes the place of the cgroup file systems. It creates the control files of a new group,
// as the kernel would.
type fakeHost struct {
	t   *testing.T
	dir string
}

// newFiles lists, for each hierarchy, the control files that a new group has.
var newFiles = map[string][]string{
	"unified": {"cgroup.controllers", "cgroup.subtree_control", "cgroup.procs", "cgroup.kill", "cpu.max", "cpu.weight", "cpu.stat",
		"memory.max", "memory.stat", "memory.events", "pids.max"},
	"cpu,cpuacct":  {"cgroup.procs", "cpu.cfs_period_us", "cpu.cfs_quota_us", "cpu.shares", "cpuacct.usage"},
	"memory":       {"cgroup.procs", "memory.limit_in_bytes", "memory.stat", "memory.oom_control"},
	"pids":         {"cgroup.procs", "pids.max"},
	"name=systemd": {"cgroup.procs"},
}

func newFakeHost(t *testing.T, hierarchies ...string) *fakeHost {
	h := &fakeHost{t: t, dir: filepath.Join(t.TempDir(), "with space")}
	require.NoError(t, os.Mkdir(h.dir, 0o755))
	for _, name := range hierarchies {
		require.NoError(t, h.mkdir(filepath.Join(h.dir, name)))
	}
	return h
}

func (h *fakeHost) mkdir(dir string) error {
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	rel, err := filepath.Rel(h.dir, dir)
	require.NoError(h.t, err)
	hierarchy, _, _ := strings.Cut(rel, "/")
	for _, f := range newFiles[hierarchy] {
		require.NoError(h.t, os.WriteFile(filepath.Join(dir, f), nil, 0o644))
	}
	return nil
}

func (h *fakeHost) write(file, text string) {
	require.NoError(h.t, os.WriteFile(filepath.Join(h.dir, file), []byte(text), 0o644))
}

// open opens a tree with a mountinfo that lists all hierarchies of h, a mount of /proc, and an invalid line.
func (h *fakeHost) open(root string) (*Tree, error) {
	entries, err := os.ReadDir(h.dir)
	require.NoError(h.t, err)
	info := "23 1 0:4 / /proc rw,relatime - proc proc rw\nnot a line of mountinfo\n"
	for i, e := range entries {
		at := strings.ReplaceAll(filepath.Join(h.dir, e.Name()), " ", `\040`)
		kind, options := "cgroup", "rw,"+e.Name()
		if e.Name() == "unified" {
			kind, options = "cgroup2", "rw,nsdelegate"
		}
		info += fmt.Sprintf("%d 23 0:%d / %s rw,relatime shared:4 - %s %s %s\n", 30+i, i, at, kind, kind, options)
	}
	return open(strings.NewReader(info), root, system{mkdir: h.mkdir, rmdir: func(dir string) error {
		if _, err := os.Stat(dir); err != nil {
			return err
		}
		return os.RemoveAll(dir)
	}})
}

// dump returns the path and content of every file that is not empty.
func (h *fakeHost) dump() string {
	var out strings.Builder
	require.NoError(h.t, filepath.WalkDir(h.dir, func(path string, d fs.DirEntry, err error) error {
		require.NoError(h.t, err)
		rel, _ := filepath.Rel(h.dir, path)
		if text, err := os.ReadFile(path); err == nil && len(text) > 0 && !d.IsDir() {
			fmt.Fprintf(&out, "%s: %s\n", rel, strings.TrimSpace(string(text)))
		}
		return nil
	}))
	return out.String()
}

func TestVersion2(t *testing.T) {
	h := newFakeHost(t, "unified", "memory") // a version 1 controller beside it is not used
	h.write("unified/cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma misc\n")
	tree, err := h.open("guests.slice/guests.service")
	require.NoError(t, err)
	require.Equal(t, 2, tree.Version())
	require.NoError(t, tree.Create("vm-1", Limits{CPUs: 2, Memory: 1 << 30, Tasks: 500}))
	require.NoError(t, tree.Create("vm-2", Limits{CPUs: 288, Memory: 1 << 20}))
	require.Equal(t, `unified/cgroup.controllers: cpuset cpu io memory hugetlb pids rdma misc
unified/cgroup.subtree_control: +cpu +memory +pids
unified/guests.slice/cgroup.subtree_control: +cpu +memory +pids
unified/guests.slice/guests.service/cgroup.subtree_control: +cpu +memory +pids
unified/guests.slice/guests.service/cpu.weight: 50
unified/guests.slice/guests.service/vm-1/cpu.max: 200000 100000
unified/guests.slice/guests.service/vm-1/cpu.weight: 50
unified/guests.slice/guests.service/vm-1/memory.max: 1073741824
unified/guests.slice/guests.service/vm-1/pids.max: 500
unified/guests.slice/guests.service/vm-2/cpu.max: 28800000 100000
unified/guests.slice/guests.service/vm-2/cpu.weight: 7200
unified/guests.slice/guests.service/vm-2/memory.max: 1048576
unified/guests.slice/guests.service/vm-2/pids.max: max
`, h.dump())

	base := "unified/guests.slice/guests.service/"
	require.Equal(t, []string{filepath.Join(h.dir, base, "vm-1/cgroup.procs")}, tree.Entries("vm-1"))
	names, err := tree.List()
	require.NoError(t, err)
	require.Equal(t, []string{"vm-1", "vm-2"}, names)

	h.write(base+"vm-1/cgroup.procs", "0\n71\n8\n")
	procs, err := tree.Procs("vm-1")
	require.NoError(t, err)
	require.Equal(t, []int{8, 71}, procs)

	h.write(base+"vm-1/cpu.stat", "usage_usec 1500000\nuser_usec 1\nsystem_usec 2\n")
	h.write(base+"vm-1/memory.stat", "anon 1000\nfile 5000\nkernel 77\nshmem 24\n")
	h.write(base+"vm-1/memory.events", "low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\n")
	usage, err := tree.Usage("vm-1")
	require.NoError(t, err)
	require.Equal(t, Usage{CPU: 1500 * time.Millisecond, Memory: 1024, OOMKills: 1}, usage)

	require.NoError(t, tree.Remove(t.Context(), "vm-1"))
	require.NoError(t, tree.Remove(t.Context(), "vm-1"), "again")
	_, err = tree.Usage("vm-1")
	require.ErrorIs(t, err, fs.ErrNotExist)
	procs, err = tree.Procs("vm-1")
	require.NoError(t, err)
	require.Empty(t, procs)
}

func TestVersion1(t *testing.T) {
	h := newFakeHost(t, "unified", "cpu,cpuacct", "memory", "name=systemd", "freezer") // hybrid: version 2 without controllers, and no pids
	h.write("unified/cgroup.controllers", "hugetlb\n")
	tree, err := h.open("trivet")
	require.NoError(t, err)
	require.Equal(t, 1, tree.Version())
	require.NoError(t, tree.Create("vm-1", Limits{CPUs: 1, Memory: 300 << 20, Tasks: 500}))
	require.Equal(t, `cpu,cpuacct/trivet/cpu.shares: 512
cpu,cpuacct/trivet/vm-1/cpu.cfs_period_us: 100000
cpu,cpuacct/trivet/vm-1/cpu.cfs_quota_us: 100000
cpu,cpuacct/trivet/vm-1/cpu.shares: 256
memory/trivet/vm-1/memory.limit_in_bytes: 314572800
unified/cgroup.controllers: hugetlb
`, h.dump())
	require.Equal(t, []string{
		filepath.Join(h.dir, "cpu,cpuacct/trivet/vm-1/cgroup.procs"),
		filepath.Join(h.dir, "memory/trivet/vm-1/cgroup.procs"),
		filepath.Join(h.dir, "name=systemd/trivet/vm-1/cgroup.procs"),
		filepath.Join(h.dir, "unified/trivet/vm-1/cgroup.procs"),
	}, tree.Entries("vm-1"))

	// A launcher that was killed between entering two hierarchies is in one of them only. Procs must return the
	// processes of both.
	h.write("cpu,cpuacct/trivet/vm-1/cgroup.procs", "12\n11\n")
	h.write("memory/trivet/vm-1/cgroup.procs", "12\n")
	procs, err := tree.Procs("vm-1")
	require.NoError(t, err)
	require.Equal(t, []int{11, 12}, procs)

	h.write("cpu,cpuacct/trivet/vm-1/cpuacct.usage", "2500000000\n")
	h.write("memory/trivet/vm-1/memory.stat", "rss 1\ntotal_rss 4096\ntotal_shmem 4\n")
	h.write("memory/trivet/vm-1/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
	usage, err := tree.Usage("vm-1")
	require.NoError(t, err)
	require.Equal(t, Usage{CPU: 2500 * time.Millisecond, Memory: 4100, OOMKills: 3}, usage)

	// A group that is missing in one of the hierarchies is still listed, and can be removed.
	require.NoError(t, os.RemoveAll(filepath.Join(h.dir, "memory/trivet/vm-1")))
	names, err := tree.List()
	require.NoError(t, err)
	require.Equal(t, []string{"vm-1"}, names)
	require.NoError(t, tree.Remove(t.Context(), "vm-1"))
	require.NoError(t, tree.Close())
	require.NoDirExists(t, filepath.Join(h.dir, "memory/trivet"))
}

func TestOpenRefuses(t *testing.T) {
	h := newFakeHost(t, "unified", "memory")
	h.write("unified/cgroup.controllers", "hugetlb\n")
	_, err := h.open("trivet")
	require.ErrorIs(t, err, ErrNoControllers)
	for _, root := range []string{"", "/", "/trivet", "trivet/", "../trivet", "a/../b", "a//b", ".", "a/..", "a b"} {
		_, err := h.open(root)
		require.Error(t, err, root)
		require.NotErrorIs(t, err, ErrNoControllers, root)
	}
}

func TestCreateRefuses(t *testing.T) {
	h := newFakeHost(t, "unified")
	h.write("unified/cgroup.controllers", "cpu memory\n")
	tree, err := h.open("trivet")
	require.NoError(t, err)
	good := Limits{CPUs: 1, Memory: 1 << 30}
	for _, name := range []string{"", ".", "..", "a/b", "../x", "A", "-a", strings.Repeat("a", 65)} {
		require.Error(t, tree.Create(name, good), name)
		require.Error(t, tree.Remove(t.Context(), name), name)
	}
	for _, l := range []Limits{{}, {CPUs: 1}, {CPUs: 1, Memory: 4096}, {CPUs: 1, Memory: 1 << 63}, {CPUs: 2000, Memory: 1 << 30},
		{CPUs: -1, Memory: 1 << 30}, {CPUs: 1, Memory: 1 << 30, Tasks: -1}} {
		require.Error(t, tree.Create("vm", l), "%+v", l)
	}
	names, err := tree.List()
	require.NoError(t, err)
	require.Empty(t, names)
}
