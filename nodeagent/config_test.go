package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
)

func with(vars map[string]string) func(string) (string, bool) {
	return func(name string) (string, bool) { v, ok := vars[name]; return v, ok }
}

func configFile(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "agent.yaml")
	require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

// TestPrecedence checks that the file, the environment and the flags each set values, and that a flag overrides the
// environment, which overrides the file.
func TestPrecedence(t *testing.T) {
	file := configFile(t, `
controlplane: [10.0.0.1, "cp2.example:9999", "[fd00::1]:7443", "fd00::2"]
name: from-file
accel: tcg
allow_tcg: true
overcommit: {vcpus: 64, memory: 1, storage: 20}
reserve: {memory_mib: 1024}
labels: {rack: a}
`)
	c, err := load([]string{"--config", file, "--name=from-flag", "--labels", "rack=c,row=7"}, with(map[string]string{
		"TRIVET_NAME": "from-env", "TRIVET_LABELS": "rack=b", "TRIVET_RESERVE_MEMORY_MIB": "2048", "TRIVET_ACCEL": "kvm",
	}), io.Discard)
	require.NoError(t, err)
	require.Equal(t, []string{"10.0.0.1:7443", "cp2.example:9999", "[fd00::1]:7443", "[fd00::2]:7443"}, c.ControlPlane)
	require.Equal(t, "from-flag", c.Name)
	require.Equal(t, facts.WantKVM, c.Accel)
	require.True(t, c.AllowTCG)
	require.Equal(t, Overcommit{64, 1, 20}, c.Overcommit)
	require.Equal(t, Reserve{MemoryMiB: 2048, StorageGiB: 1}, c.Reserve)
	require.Equal(t, map[string]string{"rack": "c", "row": "7"}, c.Labels)
	require.Equal(t, "/var/lib/trivet-agent", c.DataDir)
}

func manyLabels(n, bytes int) string {
	var pairs []string
	for i := range n {
		pairs = append(pairs, fmt.Sprintf("label-%d: '%s'", i, strings.Repeat("x", bytes)))
	}
	return strings.Join(pairs, ", ")
}

func TestBadConfig(t *testing.T) {
	for text, want := range map[string]string{
		"controlplane: [a]\nspeed: 9":                                           "speed",
		"controlplane: [a]\novercommit: {cpu: 9}":                               "cpu",
		"controlplane: [a]\n---\nname: b":                                       "more than one document",
		"name: b":                                                               "controlplane",
		"controlplane: ['a b']":                                                 "not an address",
		"controlplane: [a]\nleave_cluster: old":                                 "leave_cluster",
		"controlplane: ['a:0']":                                                 "not an address",
		"controlplane: [a]\naccel: fast":                                        "accel",
		"controlplane: [a]\novercommit: {vcpus: -1}":                            "overcommit",
		"controlplane: [a]\nuid_range: '0-100'":                                 "uid_range",
		"controlplane: [a]\nuid_range: '60000-70000'":                           "uid_range",
		"controlplane: [a]\nmigration: {address: host}":                         "migration.address",
		"controlplane: [a]\nmigration: {address: '0.0.0.0'}":                    "migration.address",
		"controlplane: [a]\nmigration: {ports: '80-90'}":                        "migration.ports",
		"controlplane: [a]\nmigration: {ports: '5000-4000'}":                    "migration.ports",
		"controlplane: [a]\nmigration: {max_downtime_ms: 30001}":                "migration.max_downtime_ms",
		"controlplane: [a]\nmigration: {max_bytes_per_second: 1048575}":         "migration.max_bytes_per_second",
		"controlplane: [a]\nlog_format: xml":                                    "log_format",
		"controlplane: [a]\nmetrics_listen: '7444'":                             "metrics_listen",
		"controlplane: [a]\nlabels: {trivet/accel: kvm}":                        "trivet/",
		"controlplane: [a]\nname: 'über'":                                       "name",
		"controlplane: [a]\ndata_dir: ''":                                       "data_dir",
		"controlplane: [a]\nreserve: {memory_mib: -1}":                          "line 2",
		"controlplane: [a]\nqemu: ''":                                           "qemu",
		"controlplane: [a]\nname: a\nname: b":                                   "name",
		"controlplane: [a]\nlabels: {x: \"" + strings.Repeat("y", 2000) + "\"}": "labels",
		"controlplane: [a]\nlabels: {" + manyLabels(5, 1000) + "}":              "labels: at most 4096 bytes together",
		"controlplane: [a]\nlabels: {" + manyLabels(64, 1) + "}":                "labels: at most 64 pairs",
		"controlplane: [a]\nmetrics_hosts: ['a:7444']":                          "metrics_hosts",
		"controlplane: [a]\nmetrics_cert: /c":                                   "metrics_cert, metrics_key: set both",
		"controlplane: [a]\nmetrics_token: token":                               "metrics_token: \"token\" is not an absolute path",
		"controlplane: [a]\nmetrics_listen: ':7444'\nmetrics_token: /t":         "without encryption",
		"controlplane: [a]\nmetrics_hosts: ['*']":                               "metrics_hosts",
	} {
		_, err := load([]string{"--config", configFile(t, text)}, with(nil), io.Discard)
		require.ErrorContains(t, err, want, text)
	}
	for _, args := range [][]string{
		{"--controlplane", "a", "extra"}, {"--config", "/nowhere"}, {"--overcommit-vcpus", "many"}, {"--labels", "x"}, {"--unknown"},
	} {
		_, err := load(args, with(nil), io.Discard)
		require.Error(t, err, args)
	}
	_, err := load(nil, with(map[string]string{"TRIVET_ALLOW_TCG": "perhaps"}), io.Discard)
	require.ErrorContains(t, err, "TRIVET_ALLOW_TCG")
	_, err = load([]string{"-h"}, with(nil), io.Discard)
	require.True(t, errors.Is(err, pflag.ErrHelp))
	_, err = load([]string{"--version"}, with(nil), io.Discard)
	require.ErrorIs(t, err, errVersion)
}

// TestEveryFieldIsASetting checks that every field of Config has a setting, and every setting a field. A field without
// a setting could not be set by a flag or an environment variable.
func TestEveryFieldIsASetting(t *testing.T) {
	var walk func(reflect.Type, string)
	names := map[string]bool{}
	for _, s := range configSettings {
		names[s.name] = true
	}
	walk = func(typ reflect.Type, prefix string) {
		for i := range typ.NumField() {
			f := typ.Field(i)
			name := prefix + strings.ReplaceAll(f.Tag.Get("yaml"), "_", "-")
			if f.Type.Kind() == reflect.Struct {
				walk(f.Type, name+"-")
				continue
			}
			require.True(t, names[name], "no setting %q for field %s", name, f.Name)
			delete(names, name)
		}
	}
	walk(reflect.TypeFor[Config](), "")
	require.Empty(t, names, "settings without a field")
}

func TestToken(t *testing.T) {
	text := "id.secret." + strings.Repeat("0", 64)
	c := Config{JoinToken: text}
	got, err := c.token()
	require.NoError(t, err)
	require.Equal(t, text, got)
	c.JoinToken = configFile(t, text+"\n")
	got, err = c.token()
	require.NoError(t, err)
	require.Equal(t, text, got)
	for _, bad := range []string{"", "/nowhere"} {
		c.JoinToken = bad
		_, err = c.token()
		require.Error(t, err)
	}
}
