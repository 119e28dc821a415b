package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFindDev checks that the command dev runs the program beside this one, and what it reports if that is missing.
func TestFindDev(t *testing.T) {
	dir := t.TempDir()
	_, err := findDev(dir)
	require.ErrorContains(t, err, filepath.Join(dir, "trivet-dev")+" is missing: it is a part of the package")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "trivet-dev"), nil, 0o755))
	program, err := findDev(dir)
	require.NoError(t, err)
	require.Equal(t, filepath.Join(dir, "trivet-dev"), program)
	// The command has all flags of the program, so that it parses none itself.
	dev, args, err := command().Find([]string{"dev", "--dir", "x"})
	require.NoError(t, err)
	require.Equal(t, "dev", dev.Name())
	require.True(t, dev.DisableFlagParsing)
	require.Equal(t, []string{"--dir", "x"}, args)
}
