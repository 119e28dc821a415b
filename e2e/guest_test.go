package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// guestCommands runs programs in the guest of the VM web of TestCommandLine, and sets a password and SSH keys, with the
// program trivet. The VM's second disk has QEMU's guest agent, which is started after the first call. The password and
// the output of a program must not be in any file of the cloud. The guest gets the address 10.9.8.7.
func (w *world) guestCommands(ctx context.Context, home, admin string) {
	t := w.t
	var vm struct{ ID string }
	out, errs, code := w.trivet(ctx, home, "vm", "show", "web", "-o", "json")
	require.Zero(t, code, errs)
	require.NoError(t, json.Unmarshal([]byte(out), &vm))
	_, errs, code = w.trivet(ctx, home, "vm", "exec", "web", "--", "true")
	require.Equal(t, 5, code)
	require.Contains(t, errs, "install the package qemu-guest-agent")

	_, errs, code = w.trivet(ctx, home, "vm", "update", "web", "--metadata", "trivet/guest-exec=refused")
	require.Zero(t, code, errs)
	_, errs, code = w.trivet(ctx, home, "vm", "exec", "web", "--", "true")
	require.Equal(t, 5, code)
	require.Contains(t, errs, "does not allow commands in its guest")
	_, errs, code = w.trivet(ctx, home, "vm", "update", "web", "--metadata", "trivet/guest-exec=allowed")
	require.Zero(t, code, errs)

	prepare := "mkdir -p /fs /etc /root && mount -t ext4 -o ro /dev/vdb /fs && ip addr add 10.9.8.7/32 dev lo && ip link set lo up" +
		" && echo root:x:0:0::/root:/bin/sh >/etc/passwd && printf '#!/bin/sh\\ncat >/root/new\\n' >/sbin/chpasswd && chmod +x /sbin/chpasswd && "
	// The guest agent has opened its port when the command has ended.
	open := " && until ls -l /proc/$(cat /tmp/pid)/fd | grep -q vport; do sleep 0.1; done"
	w.command(ctx, vm.ID, "run "+prepare+testenv.StartGuestAgent+open, "RAN rc=0")

	result := random()
	out, errs, code = w.trivet(ctx, home, "vm", "exec", "web", "--", "/bin/sh", "-c", "echo "+result[:9]+"$1; echo err >&2; exit 7", "sh", result[9:])
	require.Equal(t, []any{result + "\n", "err\n", 7}, []any{out, errs, code})
	_, errs, code = w.trivet(ctx, home, "vm", "exec", "--time-limit", "1s", "web", "--", "/bin/sh", "-c", "sleep 60")
	require.Equal(t, 7, code)
	require.Contains(t, errs, "has not ended within 1 s")

	password := random()
	file := filepath.Join(home, "guest-password")
	require.NoError(t, os.WriteFile(file, []byte(password+"\n"), 0o600))
	_, errs, code = w.trivet(ctx, home, "vm", "set-password", "web", "root", "--password-file", file)
	require.Zero(t, code, errs)
	key := "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJdD7y3aLq454yWBdwLWbieU1ebz9/cu7/QEXn9OIeZJ ada"
	require.NoError(t, os.WriteFile(filepath.Join(home, "key.pub"), []byte(key+"\n"), 0o600))
	_, errs, code = w.trivet(ctx, home, "vm", "add-ssh-key", "web", "root", filepath.Join(home, "key.pub"))
	require.Zero(t, code, errs)
	out, errs, code = w.trivet(ctx, home, "vm", "exec", "web", "--", "/bin/sh", "-c", "cat /root/new /root/.ssh/authorized_keys")
	require.Zero(t, code, errs)
	require.Equal(t, "root:"+password+"\n"+key, strings.TrimSpace(out))

	// The administrator's token is in a file of this directory. Audit records are written up to a second after a call.
	require.NoError(t, lab.Until(ctx, "the audit has the calls", func(context.Context) error {
		list, errs, code := w.trivet(ctx, admin, "--token-file", filepath.Join(admin, "token"), "--org", "default", "audit", "list")
		for _, call := range []string{"SetGuestPassword", "AddGuestSshKeys", "RunGuestCommand"} {
			if code != 0 || !strings.Contains(list, call) {
				return fmt.Errorf("no %s in %s%s", call, list, errs)
			}
		}
		return nil
	}))
	w.scanAll(secrets{"the guest's password": []byte(password), "the output of a program": []byte(result)})
}

// scanAll checks that no file of the members and the agent, and no log, contains a secret.
func (w *world) scanAll(hidden secrets) {
	files := 0
	dirs := []string{w.agent.DataDir(), w.dir.Path("log")}
	for id := range w.trio.Members {
		dirs = append(dirs, w.trio.DataDir(id))
	}
	for _, dir := range dirs {
		require.NoError(w.t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if os.IsNotExist(err) || err == nil && !d.Type().IsRegular() {
				return nil
			}
			if err != nil {
				return err
			}
			text, err := os.ReadFile(path)
			if os.IsNotExist(err) { // such as a file that a compaction has removed
				return nil
			}
			require.Empty(w.t, hidden.found(text), "%s contains a secret", path)
			files++
			return err
		}))
	}
	require.NotZero(w.t, files)
}
