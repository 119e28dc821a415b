// Package systemd_test checks the unit files of this directory with systemd's own tools where they are installed, and
// checks settings that those tools do not check, for example that a stop of the agent does not end its guests.
package systemd_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// tool returns the path of the systemd program name. If that is not installed, the test is skipped, or fails if CI is
// true.
func tool(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil && os.Getenv("CI") != "true" {
		t.Skipf("no %s here", name)
	}
	require.NoError(t, err)
	return path
}

// units returns the names of the four unit files in this directory.
func units(t *testing.T) []string {
	t.Helper()
	services, err := filepath.Glob("*.service")
	require.NoError(t, err)
	slices, err := filepath.Glob("*.slice")
	require.NoError(t, err)
	all := append(services, slices...)
	require.Len(t, all, 4)
	return all
}

func write(t *testing.T, mode os.FileMode, text string, path ...string) string {
	t.Helper()
	file := filepath.Join(path...)
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, os.WriteFile(file, []byte(text), mode))
	return file
}

// root creates a directory tree for systemd's tools and returns its path. It contains the units as changed by change,
// the targets that they refer to, and empty programs.
func root(t *testing.T, change func(unit, text string) string) string {
	t.Helper()
	dir := t.TempDir()
	system := filepath.Join(dir, "usr/lib/systemd/system")
	for _, target := range []string{"sysinit", "basic", "shutdown", "slices", "multi-user", "network-online", "time-sync"} {
		write(t, 0o644, "[Unit]\nDescription="+target+"\nDefaultDependencies=no\n", system, target+".target")
	}
	for _, program := range []string{"usr/bin/trivet-controlplane", "usr/bin/trivet-nodeagent", "bin/sh", "bin/kill"} {
		write(t, 0o755, "#!/bin/sh\n", dir, program)
	}
	for _, unit := range units(t) {
		text, err := os.ReadFile(unit)
		require.NoError(t, err)
		write(t, 0o644, change(unit, string(text)), system, unit)
	}
	return dir
}

func asIs(_, text string) string { return text }

// verify returns the output of systemd-analyze verify for the units in root; "" means that they are correct.
func verify(t *testing.T, root string) string {
	t.Helper()
	cmd := exec.Command(tool(t, "systemd-analyze"), append([]string{"verify", "--man=no", "--generators=no", "--root=" + root}, units(t)...)...)
	// The result must not depend on the environment of the user who runs the test.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return strings.TrimSpace(string(out) + err.Error())
	}
	return strings.TrimSpace(string(out))
}

func TestSystemdAcceptsTheUnits(t *testing.T) {
	require.Empty(t, verify(t, root(t, asIs)))
}

// TestSystemdReportsInvalidUnits checks that verify reports errors: an unknown key, an invalid value, a missing
// program, a missing unit and an unknown system call group.
func TestSystemdReportsInvalidUnits(t *testing.T) {
	for want, change := range map[string]func(unit, text string) string{
		"Unknown key": func(_, text string) string { return strings.ReplaceAll(text, "KillMode=", "KilMode=") },
		"Failed to parse": func(_, text string) string {
			return strings.ReplaceAll(text, "Restart=always", "Restart=perhaps")
		},
		"is not executable": func(_, text string) string {
			return strings.ReplaceAll(text, "/usr/bin/trivet-nodeagent", "/usr/bin/trivet-nodeagents")
		},
		"not found": func(_, text string) string {
			return strings.ReplaceAll(text, "Requires=trivet-guests.service", "Requires=trivet-guest.service")
		},
		"@clocks": func(_, text string) string { return strings.ReplaceAll(text, "@clock ", "@clocks ") },
	} {
		require.Contains(t, verify(t, root(t, change)), want)
	}
}

// TestControlPlaneExposure checks that systemd rates the privileges of the control plane's unit at most 2.0, on a scale
// from 0 (none) to 10 (all).
func TestControlPlaneExposure(t *testing.T) {
	// The rating is above 0 because the service listens on the network and may use the system calls of an ordinary
	// service.
	const threshold = "20" // in tenths
	cmd := exec.Command(tool(t, "systemd-analyze"), "security", "--no-pager", "--offline=true", "--threshold="+threshold,
		"--root="+root(t, asIs), "trivet-controlplane.service")
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// settings returns the values of each key in the file unit, in their order in the file.
func settings(t *testing.T, unit string) map[string][]string {
	t.Helper()
	f, err := os.Open(unit)
	require.NoError(t, err)
	defer f.Close()
	all := map[string][]string{}
	s := bufio.NewScanner(f)
	for s.Scan() {
		if k, v, ok := strings.Cut(s.Text(), "="); ok && !strings.HasPrefix(k, "#") {
			all[k] = append(all[k], v)
		}
	}
	require.NoError(t, s.Err())
	return all
}

func TestSettingsOfUnits(t *testing.T) {
	for unit, promises := range map[string]map[string]string{
		"trivet-controlplane.service": {
			"User": "trivet", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes", "NoNewPrivileges": "yes",
			"CapabilityBoundingSet": "", "SystemCallFilter": "@system-service", "StateDirectory": "trivet", "Restart": "always",
			"TimeoutStopSec": "15", "EnvironmentFile": "-/etc/trivet/controlplane.env",
			"ExecStart":  "/usr/bin/trivet-controlplane --config /etc/trivet/controlplane.yaml",
			"ExecReload": "/bin/kill -HUP $MAINPID", "Environment": "GOMEMLIMIT=2GiB",
		},
		// A stop of this unit must end only the agent's process. The control groups of the guests belong to another
		// unit.
		"trivet-nodeagent.service": {
			"KillMode": "process", "Requires": "trivet-guests.service", "NoNewPrivileges": "yes", "LimitCORE": "0",
			"Environment": "TRIVET_CGROUP=trivet.slice/trivet-guests.service", "ProtectControlGroups": "no",
			"ExecStart": "/usr/bin/trivet-nodeagent --config /etc/trivet/nodeagent.yaml",
		},
		"trivet-guests.service": {
			"Slice": "trivet.slice", "Delegate": "cpu memory pids", "RefuseManualStop": "yes", "ExitType": "cgroup", "OOMPolicy": "continue",
		},
	} {
		have := settings(t, unit)
		for key, value := range promises {
			require.Equal(t, []string{value}, have[key], "%s: %s", unit, key)
		}
	}
	require.NotContains(t, settings(t, "trivet-controlplane.service"), "RestrictSUIDSGID", "imports need openat2")
	agent := settings(t, "trivet-nodeagent.service")
	require.NotContains(t, agent, "MemoryDenyWriteExecute", "QEMU without KVM translates code")
	require.NotContains(t, agent, "User", "files of guests' uids, and control groups")
	require.Contains(t, strings.Fields(agent["After"][0]), "trivet-guests.service")
}

// TestAgentIsInTheMountNamespaceOfTheHost checks that the agent's unit has no setting for which systemd makes a mount
// namespace. The network namespaces of VPCs are mounts, which would end with the agent.
func TestAgentIsInTheMountNamespaceOfTheHost(t *testing.T) {
	have := settings(t, "trivet-nodeagent.service")
	for _, key := range []string{
		"ProtectSystem", "ProtectHome", "PrivateTmp", "PrivateDevices", "PrivateMounts", "ProtectKernelTunables", "ProtectKernelModules",
		"ProtectKernelLogs", "ProtectProc", "ProcSubset", "ReadOnlyPaths", "ReadWritePaths", "InaccessiblePaths", "ExecPaths", "NoExecPaths",
		"BindPaths", "BindReadOnlyPaths", "TemporaryFileSystem", "MountFlags", "RootDirectory", "RootImage", "DynamicUser",
	} {
		require.NotContains(t, have, key)
	}
	require.Equal(t, []string{"no"}, have["ProtectControlGroups"])
}

// TestEachCapabilityHasAReason checks that the agent's unit grants exactly the capabilities listed here, and that a
// comment in the unit gives a reason for each.
func TestEachCapabilityHasAReason(t *testing.T) {
	text, err := os.ReadFile("trivet-nodeagent.service")
	require.NoError(t, err)
	granted := strings.Fields(settings(t, "trivet-nodeagent.service")["CapabilityBoundingSet"][0])
	require.Equal(t, []string{
		"CAP_SYS_ADMIN", "CAP_MKNOD", "CAP_CHOWN", "CAP_SETUID", "CAP_SETGID", "CAP_DAC_OVERRIDE", "CAP_SYS_RESOURCE",
		"CAP_KILL", "CAP_SETPCAP", "CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_NET_BIND_SERVICE",
	}, granted)
	above, refused, ok := strings.Cut(string(text), "# Capabilities that one might expect")
	require.True(t, ok)
	refused, _, _ = strings.Cut(refused, "CapabilityBoundingSet=")
	for _, c := range granted {
		require.Contains(t, above, "# "+c+" ")
		require.NotContains(t, refused, c)
	}
}

func TestSysusersCreatesTheUser(t *testing.T) {
	conf, err := filepath.Abs("sysusers.d/trivet.conf")
	require.NoError(t, err)
	dir := t.TempDir()
	write(t, 0o644, "root:x:0:0:root:/root:/bin/sh\n", dir, "etc/passwd")
	write(t, 0o644, "root:x:0:\n", dir, "etc/group")
	out, err := exec.Command(tool(t, "systemd-sysusers"), "--root="+dir, conf).CombinedOutput()
	require.NoError(t, err, "%s", out)
	passwd, err := os.ReadFile(filepath.Join(dir, "etc/passwd"))
	require.NoError(t, err)
	i := slices.IndexFunc(strings.Split(string(passwd), "\n"), func(l string) bool { return strings.HasPrefix(l, "trivet:") })
	require.Positive(t, i, "%s", passwd)
	user := strings.Split(strings.Split(string(passwd), "\n")[i], ":")
	require.Equal(t, "/var/lib/trivet", user[5])
	require.Contains(t, user[6], "nologin")
}

func TestTmpfilesSetsModesOfSecrets(t *testing.T) {
	if os.Getuid() != 0 && os.Getenv("CI") != "true" {
		t.Skip("changes owners: run as root")
	}
	configs, err := filepath.Glob("tmpfiles.d/*.conf")
	require.NoError(t, err)
	require.Len(t, configs, 2)
	for i, conf := range configs {
		configs[i], err = filepath.Abs(conf)
		require.NoError(t, err)
	}
	dir := t.TempDir()
	write(t, 0o644, "root:x:0:0:root:/root:/bin/sh\ntrivet:x:990:990::/var/lib/trivet:/usr/sbin/nologin\n", dir, "etc/passwd")
	write(t, 0o644, "root:x:0:\ntrivet:x:990:\n", dir, "etc/group")
	for _, name := range []string{"cluster.key", "tls.key", "controlplane.yaml", "nodeagent.yaml", "join.token"} {
		write(t, 0o666, "secret", dir, "etc/trivet", name)
	}
	out, err := exec.Command(tool(t, "systemd-tmpfiles"), append([]string{"--create", "--root=" + dir}, configs...)...).CombinedOutput()
	require.NoError(t, err, "%s", out)
	for name, mode := range map[string]os.FileMode{"": os.ModeDir | 0o750, "cluster.key": 0o600, "tls.key": 0o600, "controlplane.yaml": 0o640, "nodeagent.yaml": 0o600, "join.token": 0o600} {
		info, err := os.Stat(filepath.Join(dir, "etc/trivet", name))
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode(), name)
	}
	require.NoFileExists(t, filepath.Join(dir, "etc/trivet/nodeagent.env"), "what is not there is not made")
}
