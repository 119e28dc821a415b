package settings

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

type config struct {
	Name   string            `yaml:"name"`
	Hosts  []string          `yaml:"hosts"`
	Dirs   []dir             `yaml:"dirs"`
	Labels map[string]string `yaml:"labels"`
	Ports  struct {
		VM   uint16        `yaml:"vm"`
		Wait time.Duration `yaml:"wait"`
	} `yaml:"ports"`
	limits `yaml:",inline"`
	Own    int `yaml:"-"`
}

type dir struct {
	Path string   `yaml:"path"`
	Orgs []string `yaml:"orgs"`
}

type limits struct {
	Calls int `yaml:"calls"`
}

func (c *config) BindFlags(f *pflag.FlagSet) {
	f.StringVar(&c.Name, "name", c.Name, "")
	f.StringSliceVar(&c.Hosts, "hosts", c.Hosts, "")
	f.Uint16Var(&c.Ports.VM, "ports-vm", c.Ports.VM, "")
	f.IntVar(&c.Calls, "calls", c.Calls, "")
}

// load calls Load with a file that contains text, environment variables of the form NAME=value, and command-line
// arguments. It returns the configuration.
func load(t *testing.T, text string, environ []string, args ...string) (config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "c.yaml")
	require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
	var bound config
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.String("config", "", "")
	bound.BindFlags(flags)
	require.NoError(t, flags.Parse(args))
	c := config{Name: "default", limits: limits{Calls: 1}}
	err := Load(&c, Sources{File: file, Flags: flags, LookupEnv: func(name string) (string, bool) {
		for _, pair := range environ {
			if value, ok := strings.CutPrefix(pair, name+"="); ok {
				return value, true
			}
		}
		return "", false
	}})
	if err != nil {
		err = errorIn{strings.ReplaceAll(err.Error(), file, "FILE")}
	}
	return c, err
}

type errorIn struct{ text string }

func (e errorIn) Error() string { return e.text }

func TestPrecedence(t *testing.T) {
	const text = `
name: file
hosts: [a, b]
ports: {vm: 1, wait: 2s}
calls: 5
dirs: [{path: /a}, {path: /b, orgs: [x]}]
labels: {rack: a}
`
	c, err := load(t, text, nil)
	require.NoError(t, err)
	want := config{Name: "file", Hosts: []string{"a", "b"}, Dirs: []dir{{Path: "/a"}, {"/b", []string{"x"}}}, Labels: map[string]string{"rack": "a"},
		limits: limits{Calls: 5}}
	want.Ports.VM, want.Ports.Wait = 1, 2*time.Second
	require.Equal(t, want, c)

	c, err = load(t, text, []string{"TRIVET_NAME=environment", "TRIVET_HOSTS=c", "TRIVET_PORTS_VM=3", "TRIVET_OTHER=1"}, "--config=x", "--hosts=d", "--hosts=e", "--ports-vm=4")
	require.NoError(t, err)
	want.Name, want.Hosts, want.Ports.VM = "environment", []string{"d", "e"}, 4
	require.Equal(t, want, c)

	c, err = load(t, text, nil, "--hosts=", "--name=")
	require.NoError(t, err)
	require.Empty(t, c.Hosts)
	require.Empty(t, c.Name)
}

func TestEmptyFileChangesNothing(t *testing.T) {
	for _, text := range []string{"", "# nothing\n", "ports:\n", "{}"} {
		c, err := load(t, text, nil)
		require.NoError(t, err, text)
		require.Equal(t, config{Name: "default", limits: limits{Calls: 1}}, c, text)
	}
}

func TestAnchors(t *testing.T) {
	c, err := load(t, "name: &n x\nhosts: [*n]\ndirs: [&d {path: *n}, *d]", nil)
	require.NoError(t, err)
	require.Equal(t, []string{"x"}, c.Hosts)
	require.Equal(t, []dir{{Path: "x"}, {Path: "x"}}, c.Dirs)
}

// TestErrors checks that each error names the line and the path of its key, or its environment variable, and that all
// errors are reported.
func TestErrors(t *testing.T) {
	for text, want := range map[string]string{
		"speed: 9":                           "FILE: line 1: speed: unknown key",
		"own: 9":                             "FILE: line 1: own: unknown key",
		"'-': 9":                             "FILE: line 1: -: unknown key",
		"limits: {calls: 1}":                 "FILE: line 1: limits: unknown key",
		"name: a\nports:\n  vm: -1":          "FILE: line 3: ports.vm: cannot unmarshal !!int `-1` into uint16",
		"ports: {wait: soon}":                "FILE: line 1: ports.wait: cannot unmarshal !!str `soon` into time.Duration",
		"ports: 5":                           "FILE: line 1: ports: want keys with values",
		"dirs: [{path: /a}, {pfad: /b}]":     "FILE: line 1: dirs[1].pfad: unknown key",
		"dirs: /a":                           "FILE: line 1: dirs: want a list",
		"name: a\nname: b":                   "FILE: line 2: name: occurs twice",
		"labels: {a: b, a: c}":               "FILE: line 1: labels: mapping key \"a\" already defined at line 1",
		"name: a\n---\nname: b":              "FILE: more than one document",
		"[name]":                             "FILE: line 1: want keys with values",
		"name: [":                            "FILE: yaml: line 1: did not find expected node content",
		"calls: x\nspeed: 9\nports: {vm: y}": "FILE: line 1: calls: cannot unmarshal !!str `x` into int\nFILE: line 2: speed: unknown key\nFILE: line 3: ports.vm: cannot unmarshal !!str `y` into uint16",
	} {
		_, err := load(t, text, nil)
		require.EqualError(t, err, want, text)
	}
	_, err := load(t, "speed: 9", []string{"TRIVET_CALLS=many", "TRIVET_PORTS_VM=x"}, "--name=a")
	require.EqualError(t, err, `FILE: line 1: speed: unknown key
TRIVET_CALLS: strconv.ParseInt: parsing "many": invalid syntax
TRIVET_PORTS_VM: strconv.ParseUint: parsing "x": invalid syntax`)
	require.ErrorContains(t, Load(new(config), Sources{File: "/nowhere"}), "read configuration: open /nowhere: no such file")
	require.NoError(t, Load(new(config), Sources{}))
}
