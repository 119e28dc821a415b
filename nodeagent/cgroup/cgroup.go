// Package cgroup manages a control group for each guest. The groups limit and measure the resource usage of the guests'
// processes. They are also the only list of running guests that survives everything except a reboot of the host.
//
// A [Tree] is a directory with one group per guest. It lies outside the agent's own group, so that stopping the agent's
// service does not stop its guests. The package handles names, numbers of processors and bytes. It does not depend on
// VMs and starts no processes: a launcher enters a group by writing to the files that [Tree.Entries] returns.
//
// # Versions
//
// [Open] checks which cgroup file systems are mounted. It uses version 2 if its hierarchy has the cpu and memory
// controllers (systemd's unified mode), otherwise version 1, with each controller where it is mounted. In the hybrid
// mode, version 2 is mounted without controllers, so version 1 is used. The pids controller is used if the host has it.
//
// # Decisions
//
//   - A guest may use at most as many processors as it has vCPUs (a quota). Its weight against other guests is
//     proportional to its number of vCPUs. The whole tree has half the default weight, so that Trivet's own processes
//     take precedence on a busy host.
//   - Memory has a hard limit. The caller must include the memory needed besides the guest's RAM. The kernel kills a
//     process that exceeds the limit, and [Usage.OOMKills] counts such kills.
//   - A process enters a group by writing "0" to its files before exec, on both versions. clone3's CLONE_INTO_CGROUP
//     would work on version 2 only, and the launcher is needed for other reasons anyway.
//   - On version 1 a guest also leaves the agent's groups in the devices controller and in systemd's own hierarchies
//     (name=systemd, and version 2 mounted without controllers), because systemd stops a service's processes by these
//     groups. No limits are set there.
package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// Tree is the parent of all guests' groups. Its methods may be called concurrently for different groups, but not for
// the same group.
type Tree struct {
	version int               // 1 or 2
	dirs    map[string]string // directory of the tree for each controller; on version 2 all are the same
	sys     system
}

// system holds the functions that create and remove a directory. Tests replace them: in a cgroup file system they also
// create and remove the control files of the group, but in the ordinary directories of tests they do not.
type system struct {
	mkdir func(dir string) error
	rmdir func(dir string) error
}

// Names of the controllers that the package uses. The pids controller is optional. Version 2 has no cpuacct controller;
// its cpu controller also measures processor time.
const (
	cpu, cpuacct, memory, pids = "cpu", "cpuacct", "memory", "pids"

	devices, systemd, unified = "devices", "name=systemd", "unified" // on version 1 guests enter these too, if mounted
)

var (
	// ErrNoControllers means that the host has no usable cpu and memory controllers.
	ErrNoControllers = errors.New("no usable cgroup controllers")

	validName = regexp.MustCompile(`^[a-z0-9][a-z0-9-]{0,63}$`)
	validRoot = regexp.MustCompile(`^[A-Za-z0-9_@-][A-Za-z0-9_.@-]*(/[A-Za-z0-9_@-][A-Za-z0-9_.@-]*)*$`)
)

// Open finds the host's controllers and makes the tree at root, such as "trivet" or "system.slice/guests.service",
// relative to the mount points. Existing groups in the tree are left unchanged.
func Open(root string) (*Tree, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("list mounts: %w", err)
	}
	defer f.Close()
	return open(f, root, system{
		mkdir: func(dir string) error { return os.Mkdir(dir, 0o755) },
		rmdir: syscall.Rmdir,
	})
}

func open(mountinfo io.Reader, root string, sys system) (*Tree, error) {
	if !validRoot.MatchString(root) {
		return nil, fmt.Errorf("open cgroup tree: %q is not a relative path of plain names", root)
	}
	m, err := findMounts(mountinfo)
	if err != nil {
		return nil, err
	}
	t := &Tree{dirs: map[string]string{}, sys: sys}
	if m.unified != "" {
		have, err := os.ReadFile(filepath.Join(m.unified, "cgroup.controllers"))
		if err != nil {
			return nil, fmt.Errorf("read controllers: %w", err)
		}
		if f := strings.Fields(string(have)); slices.Contains(f, cpu) && slices.Contains(f, memory) {
			t.version = 2
			return t, t.createVersion2(m.unified, root, f)
		}
	}
	if m.v1[cpu] == "" || m.v1[cpuacct] == "" || m.v1[memory] == "" {
		return nil, fmt.Errorf("%w: neither a cgroup2 mount with cpu and memory, nor cpu, cpuacct and memory of version 1", ErrNoControllers)
	}
	t.version = 1
	m.v1[unified] = m.unified
	for _, c := range []string{cpu, cpuacct, memory, pids, devices, systemd, unified} {
		if mount := m.v1[c]; mount != "" {
			t.dirs[c] = filepath.Join(mount, root)
			if err := t.mkdirs(mount, root); err != nil {
				return nil, err
			}
		}
	}
	return t, t.apply("", treeSettings(t.version))
}

// mounts holds the mount points of the cgroup file systems.
type mounts struct {
	unified string
	v1      map[string]string // mount point for each controller of version 1
}

// findMounts returns the cgroup mounts in r, which has the format of /proc/self/mountinfo (proc(5)).
func findMounts(r io.Reader) (mounts, error) {
	m := mounts{v1: map[string]string{}}
	unescape := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)
	s := bufio.NewScanner(r)
	for s.Scan() {
		before, after, ok := strings.Cut(s.Text(), " - ")
		left, right := strings.Fields(before), strings.Fields(after)
		if !ok || len(left) < 5 || len(right) < 3 {
			continue
		}
		at := unescape.Replace(left[4])
		switch right[0] {
		case "cgroup2":
			m.unified = at
		case "cgroup":
			for c := range strings.SplitSeq(right[2], ",") {
				m.v1[c] = at
			}
		}
	}
	if err := s.Err(); err != nil {
		return mounts{}, fmt.Errorf("list mounts: %w", err)
	}
	return m, nil
}

// createVersion2 makes the tree on version 2 and enables the controllers in each group from the mount point to the
// tree.
func (t *Tree) createVersion2(mount, root string, have []string) error {
	dir := filepath.Join(mount, root)
	var down []string
	for _, c := range []string{cpu, memory, pids} {
		if slices.Contains(have, c) {
			t.dirs[c] = dir
			down = append(down, "+"+c)
		}
	}
	if err := t.mkdirs(mount, root); err != nil {
		return err
	}
	at := mount
	for _, part := range append(strings.Split(root, "/"), "") {
		if err := write(filepath.Join(at, "cgroup.subtree_control"), strings.Join(down, " ")); err != nil {
			return fmt.Errorf("hand controllers down (the group must be delegated, and have no processes of its own): %w", err)
		}
		at = filepath.Join(at, part)
	}
	return t.apply("", treeSettings(t.version))
}

func (t *Tree) mkdirs(mount, root string) error {
	at := mount
	for part := range strings.SplitSeq(root, "/") {
		at = filepath.Join(at, part)
		if err := t.sys.mkdir(at); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	return nil
}

// Version returns the version of the cgroup file systems that the tree uses, 1 or 2.
func (t *Tree) Version() int { return t.version }

// paths returns the directories of a group in all hierarchies, without duplicates. For an empty name it returns the
// directories of the tree itself.
func (t *Tree) paths(name string) []string {
	all := slices.Sorted(maps.Values(t.dirs))
	for i := range all {
		all[i] = filepath.Join(all[i], name)
	}
	return slices.Compact(all)
}

// Create makes a group, or updates the limits of an existing one. If the new memory limit is below the current usage
// and the kernel cannot free enough memory, version 1 refuses the limit and version 2 kills processes of the group.
func (t *Tree) Create(name string, l Limits) error {
	if !validName.MatchString(name) {
		return fmt.Errorf("create cgroup: %q is not a name", name)
	}
	set, err := l.settings(t.version)
	if err != nil {
		return fmt.Errorf("create cgroup %s: %w", name, err)
	}
	for _, dir := range t.paths(name) {
		if err := t.sys.mkdir(dir); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("create cgroup %s: %w", name, err)
		}
	}
	if err := t.apply(name, set); err != nil {
		return fmt.Errorf("create cgroup %s: %w", name, err)
	}
	return nil
}

// Entries returns the files through which a process enters a group: it must write "0" to each of them.
func (t *Tree) Entries(name string) []string {
	files := t.paths(name)
	for i := range files {
		files[i] = filepath.Join(files[i], "cgroup.procs")
	}
	return files
}

// List returns the sorted names of all existing groups, with and without processes. It includes groups that exist in
// only some of the hierarchies of version 1.
func (t *Tree) List() ([]string, error) {
	names := map[string]bool{}
	for _, dir := range t.paths("") {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, fmt.Errorf("list cgroups: %w", err)
		}
		for _, e := range entries {
			if e.IsDir() && validName.MatchString(e.Name()) {
				names[e.Name()] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(names)), nil
}

// Close removes the tree, which must be empty, to restore the host to its original state.
func (t *Tree) Close() error {
	for _, dir := range t.paths("") {
		if err := t.sys.rmdir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove cgroup tree: %w", &fs.PathError{Op: "rmdir", Path: dir, Err: err})
		}
	}
	return nil
}
