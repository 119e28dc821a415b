package pinning

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseList(t *testing.T) {
	for list, want := range map[string][]int{
		"": nil, "3": {3}, "2-4": {2, 3, 4}, "8,2-4": {2, 3, 4, 8}, "1,1-2": {1, 2}, "1023": {1023},
	} {
		got, err := ParseList(list)
		require.NoError(t, err, list)
		require.Equal(t, want, got, list)
	}
	for _, list := range []string{"a", "-1", "3-2", "1,", ",", "1024", "0-99999999999", "1 2"} {
		_, err := ParseList(list)
		require.Error(t, err, list)
	}
}

// TestParseKernelList checks that lists of the kernel are counted completely, also on hosts with more CPUs than a thread
// can be fixed on, and that an empty list is an error.
func TestParseKernelList(t *testing.T) {
	for list, want := range map[string]int{
		"0\n": 1, "0-1\n": 2, "0-3,5,8-15\n": 13, "0-65535": 65536,
		"": 0, "\n": 0, "3-1": 0, "0-": 0, "a": 0, "0,,1": 0, "-1": 0, "0-65536": 0, "0-99999999999": 0,
	} {
		cpus, err := ParseKernelList(list)
		require.Len(t, cpus, want, "%q", list)
		require.Equal(t, want == 0, err != nil, "%q", list)
	}
}

func TestReadNodes(t *testing.T) {
	dir := t.TempDir()
	nodes, err := ReadNodes(filepath.Join(dir, "missing"))
	require.NoError(t, err)
	require.Empty(t, nodes)
	for name, list := range map[string]string{"node1": "2-3\n", "node0": "0-1\n", "node10": "\n", "power": "x"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, name, "cpulist"), []byte(list), 0o600))
	}
	nodes, err = ReadNodes(dir)
	require.NoError(t, err)
	require.Equal(t, []Node{{0, []int{0, 1}}, {1, []int{2, 3}}, {10, nil}}, nodes)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "node1", "cpulist"), []byte("x"), 0o600))
	_, err = ReadNodes(dir)
	require.Error(t, err)
}

func TestChoose(t *testing.T) {
	nodes := []Node{{0, []int{0, 1, 2, 3}}, {1, []int{4, 5, 6, 7}}}
	for name, c := range map[string]struct {
		nodes []Node
		free  []int
		n     int
		cpus  []int
		node  int
	}{
		"none":                               {nodes, []int{1, 2}, 0, nil, NoNode},
		"too many":                           {nodes, []int{1, 2}, 3, nil, NoNode},
		"the node with fewer free CPUs":      {nodes, []int{1, 2, 3, 4, 5}, 2, []int{4, 5}, 1},
		"the only node with enough":          {nodes, []int{1, 2, 3, 4, 5}, 3, []int{1, 2, 3}, 0},
		"several nodes":                      {nodes, []int{1, 2, 3, 4, 5}, 4, []int{1, 2, 3, 4}, NoNode},
		"unknown nodes":                      {nil, []int{1, 2, 3}, 2, []int{1, 2}, NoNode},
		"CPUs that are in no node come last": {nodes, []int{3, 9}, 2, []int{3, 9}, NoNode},
	} {
		cpus, node := choose(c.nodes, c.free, c.n)
		require.Equal(t, c.cpus, cpus, name)
		require.Equal(t, c.node, node, name)
	}
}

// TestPool checks that no CPU is used by two VMs, and that the CPUs of a VM that has ended are used again.
func TestPool(t *testing.T) {
	p := NewPool(nil, []int{2, 3, 4})
	a, _, err := p.Take("a", 2)
	require.NoError(t, err)
	require.Equal(t, []int{2, 3}, a)
	_, _, err = p.Take("b", 2)
	require.ErrorContains(t, err, "has 1 free dedicated CPUs, 2 needed")
	b, _, err := p.Take("b", 1)
	require.NoError(t, err)
	require.Equal(t, []int{4}, b)
	again, _, err := p.Take("a", 2)
	require.NoError(t, err)
	require.Equal(t, a, again, "a VM releases its CPUs when it takes others")
	p.Release("a")
	p.Use("c", []int{3, 9})
	_, _, err = p.Take("d", 2)
	require.Error(t, err)
	d, _, err := p.Take("d", 1)
	require.NoError(t, err)
	require.Equal(t, []int{2}, d)

	var none *Pool
	none.Use("a", []int{1})
	none.Release("a")
	_, _, err = none.Take("a", 1)
	require.ErrorContains(t, err, "no dedicated CPUs")
	require.True(t, strings.HasPrefix(err.Error(), "the host"))
}
