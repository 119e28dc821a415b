package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// devProgram is the name of the program that runs a small cloud for a first look. It is a program of its own because the
// control plane starts no programs and never imports the agent.
const devProgram = "trivet-dev"

// devCommand returns the command dev, which runs devProgram in place of this process, with the same arguments. main
// calls execDev for it before it changes the process, so that this command only describes itself in the help.
func devCommand() *cobra.Command {
	return &cobra.Command{
		Use: "dev [FLAG...]", Short: "Run a whole small cloud for a first look, until Ctrl-C",
		Long: `Run a small cloud on this machine until it is interrupted: one member of the control plane with all APIs on
127.0.0.1, a user, and, as root with QEMU, a host for VMs. It needs no configuration, and prints the logins and commands
to try. All files are in a temporary directory, which is removed at the end, unless --dir gives another directory.

The command runs the program trivet-dev, which is beside this one, with the same flags: see trivet-dev --help. The flag
--dev of a member is something else: it lets every caller act in the project default.`,
		Example:            "  trivet-controlplane dev\n  trivet-controlplane dev --dir /var/tmp/cloud",
		DisableFlagParsing: true,
		RunE:               func(_ *cobra.Command, args []string) error { return execDev(args) },
	}
}

// execDev runs devProgram in place of this process. It returns only if that fails.
func execDev(args []string) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	program, err := findDev(filepath.Dir(self))
	if err != nil {
		return err
	}
	return fmt.Errorf("run %s: %w", program, unix.Exec(program, append([]string{program}, args...), os.Environ()))
}

// findDev returns the path of devProgram in a directory. It does not look elsewhere: a program of another version could
// not run this one.
func findDev(dir string) (string, error) {
	program := filepath.Join(dir, devProgram)
	if _, err := os.Stat(program); errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("%s is missing: it is a part of the package trivet-controlplane, and `make build` makes it", program)
	} else if err != nil {
		return "", err
	}
	return program, nil
}
