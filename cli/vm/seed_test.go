package vm

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const sshKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ6WxdvRv5Xk3WqvRkZ2m4o5oM2m0p8F1Wq1xJ8mBq2P ada@example.org"

func TestSeedFiles(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	key, script := file("key.pub", "# laptop\n"+sshKey+"\n"), file("setup.sh", "#!/bin/sh\ntrue\n")
	f := createFlags{kernel: "k", memory: "512", vcpus: 1, sshKeys: []string{key, key}, userData: script}
	req, _, err := f.request("web")
	require.NoError(t, err)
	require.Equal(t, map[string]string{"trivet/ssh-keys": sshKey + "\n" + sshKey + "\n", "trivet/user-data": "#!/bin/sh\ntrue\n"}, req.GetMetadata())

	for _, c := range []struct{ keys, user, want string }{
		{filepath.Join(dir, "missing"), "", "--ssh-key"},
		{file("key", "-----BEGIN OPENSSH PRIVATE KEY-----\n"), "", "give the public one"},
		{file("text", "hello\n"), "", "authorized_keys"},
		{"", file("empty.sh", "#!\n"), "names no interpreter"},
		{"", file("large", strings.Repeat("x", 64<<10+1)), "at most 65536"},
	} {
		f := createFlags{kernel: "k", memory: "512", vcpus: 1, userData: c.user}
		if c.keys != "" {
			f.sshKeys = []string{c.keys}
		}
		_, _, err := f.request("web")
		require.ErrorContains(t, err, c.want)
	}
}
