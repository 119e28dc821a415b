package nettest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// CountPrograms makes t and the code that it calls run the programs of nftables and iptables through scripts that record
// each call. It must be called before the code looks up the programs. The returned function returns the names of the
// programs that were run since its last call.
func CountPrograms(t *testing.T) (take func() []string) {
	t.Helper()
	dir := t.TempDir()
	log := filepath.Join(dir, "log")
	for _, name := range []string{"nft", "iptables-nft", "iptables-nft-save", "iptables-nft-restore", "ip6tables-nft",
		"ip6tables-nft-save", "ip6tables-nft-restore"} {
		path, err := exec.LookPath(name)
		require.NoError(t, err)
		script := fmt.Sprintf("#!/bin/sh\necho %s >> %s\nexec %s \"$@\"\n", name, log, path)
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o700))
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return func() []string {
		t.Helper()
		lines, err := os.ReadFile(log)
		if os.IsNotExist(err) {
			return nil
		}
		require.NoError(t, err)
		require.NoError(t, os.Remove(log))
		return strings.Fields(string(lines))
	}
}
