package vm

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/identity"
	"github.com/trivet-cloud/trivet/cli/session"
	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

func setPasswordCommand(s *session.Session) *cobra.Command {
	var file string
	c := vmArgCommand(s, "set-password VM USER", "Set the password of a user in the guest of a VM")
	c.Args = session.Exactly("VM", "USER")
	c.Long = `Set the password of a user in the guest of a VM. The user must exist there. The VM needs the package
qemu-guest-agent in its guest. The password is passed to the guest, and stored nowhere else.`
	c.Example = `  trivet vm set-password web root
  pwgen 20 1 | trivet vm set-password web root --password-file -`
	identity.PasswordFileFlag(c, &file)
	// The password may be typed slowly, so the deadline begins afterwards.
	c.RunE = s.Run(0, func(ctx context.Context, conn *dial.Conn, args []string) error {
		password, err := identity.ReadNewPassword(ctx, s, file)
		if err != nil {
			return err
		}
		ctx, cancel := s.Limit(ctx, callTimeout)
		defer cancel()
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		if _, err := guestv1.NewGuestServiceClient(conn).SetGuestPassword(ctx, &guestv1.SetGuestPasswordRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id, Username: args[1], Password: string(password),
		}); err != nil {
			return err
		}
		return s.Done(args[0], "has a new password for "+args[1])
	})
	return c
}

func addSSHKeyCommand(s *session.Session) *cobra.Command {
	var replace bool
	c := vmArgCommand(s, "add-ssh-key VM USER FILE", "Add SSH public keys to a user in the guest of a VM")
	c.Args = session.Exactly("VM", "USER", "FILE")
	c.Long = `Add the public keys in FILE, or in standard input if FILE is -, to those of a user in the guest of a VM. The user must
exist there. The VM needs the package qemu-guest-agent in its guest. With --replace, the keys replace all keys in the
file .ssh/authorized_keys of the user.`
	c.Example = `  trivet vm add-ssh-key web root ~/.ssh/id_ed25519.pub
  ssh-add -L | trivet vm add-ssh-key web root - --replace`
	c.Flags().BoolVar(&replace, "replace", false, "remove all other keys of the user")
	c.RunE = s.Run(callTimeout, func(ctx context.Context, conn *dial.Conn, args []string) error {
		keys, err := readKeys(s, args[2])
		if err != nil {
			return err
		}
		t, err := find(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		if _, err := guestv1.NewGuestServiceClient(conn).AddGuestSshKeys(ctx, &guestv1.AddGuestSshKeysRequest{
			OrgId: t.org, ProjectId: t.project, VmId: t.id, Username: args[1], Keys: keys, Replace: replace,
		}); err != nil {
			return err
		}
		return s.Done(args[0], fmt.Sprintf("has new SSH keys for %s: %d", args[1], len(keys)))
	})
	return c
}

// readKeys returns the public keys in the file at path, or in standard input if path is "-".
func readKeys(s *session.Session, path string) ([]string, error) {
	var text string
	if path == "-" {
		data, err := io.ReadAll(io.LimitReader(s.Stdin, cloudinit.MaxSSHKeys+1))
		if err != nil {
			return nil, fmt.Errorf("read standard input: %w", err)
		}
		if len(data) > cloudinit.MaxSSHKeys {
			return nil, session.Usagef("standard input has more than %d bytes", cloudinit.MaxSSHKeys)
		}
		text = string(data)
	} else {
		var err error
		if text, err = readSeedFile("FILE", path, cloudinit.MaxSSHKeys); err != nil {
			return nil, err
		}
	}
	keys, err := publicKeys("FILE "+path, text)
	if err == nil && len(keys) == 0 {
		return nil, session.Usagef("FILE %s: has no keys", path)
	}
	return keys, err
}
