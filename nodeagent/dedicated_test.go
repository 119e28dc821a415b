package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/pinning"
)

func TestReadCPUs(t *testing.T) {
	system := t.TempDir()
	for name, text := range map[string]string{"cpu/online": "0-3\n", "node/node0/cpulist": "0-1\n", "node/node1/cpulist": "2-3\n"} {
		require.NoError(t, os.MkdirAll(filepath.Dir(filepath.Join(system, name)), 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(system, name), []byte(text), 0o600))
	}
	c, err := readCPUs("", system)
	require.NoError(t, err)
	require.Nil(t, c.pool())
	require.Empty(t, c.shared)

	c, err = readCPUs("1-2", system)
	require.NoError(t, err)
	require.Equal(t, hostCPUs{[]int{1, 2}, []int{0, 3}, []pinning.Node{{ID: 0, CPUs: []int{0, 1}}, {ID: 1, CPUs: []int{2, 3}}}}, c)
	require.NotNil(t, c.pool())
	for list, says := range map[string]string{"x": "not a list", "1,4": "the host has no CPU 4", "0-3": "at least one of the CPUs 0-3 must be left"} {
		_, err := readCPUs(list, system)
		require.ErrorContains(t, err, says)
	}
}
