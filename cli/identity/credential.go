package identity

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/session"
)

// PasswordFileFlag adds the flag --password-file to c, which sets *file.
func PasswordFileFlag(c *cobra.Command, file *string) {
	c.Flags().StringVar(file, "password-file", "", "file with the password, - for standard input (default: ask)")
	_ = c.MarkFlagFilename("password-file") // its only error is for an unknown flag
}

// ReadCredential returns a user ID and a password. If user is empty, it prompts for the user ID on the terminal. It
// reads the password from file or, if file is empty, prompts for it.
func ReadCredential(ctx context.Context, s *session.Session, user, file string) (string, account.Secret, error) {
	if s.Ask == nil && (user == "" || file == "") {
		missing := "--user and --password-file"
		switch {
		case user != "":
			missing = "--password-file"
		case file != "":
			missing = "--user"
		}
		return "", "", session.Usagef("cannot ask without a terminal: give %s", missing)
	}
	if user == "" {
		var err error
		if user, err = s.Ask(ctx, "User: ", false); err != nil {
			return "", "", err
		}
	}
	password, err := readPassword(ctx, s, file)
	if err != nil {
		return "", "", err
	}
	if user == "" || password == "" {
		return "", "", errors.New("the user and the password must not be empty")
	}
	return user, password, nil
}

// ReadNewPassword reads a new password from a file or, if file is empty, from the terminal. At the terminal it prompts
// twice, to detect typing errors.
func ReadNewPassword(ctx context.Context, s *session.Session, file string) (account.Secret, error) {
	if s.Ask == nil && file == "" {
		return "", session.Usagef("cannot ask without a terminal: give --password-file")
	}
	first, err := readPassword(ctx, s, file)
	if err != nil || file != "" {
		return first, err
	}
	again, err := s.Ask(ctx, "Password again: ", true)
	if err != nil {
		return "", err
	}
	if s.Keep(account.Secret(again)); account.Secret(again) != first {
		return "", errors.New("the two passwords differ: nothing was changed")
	}
	return first, nil
}

// readCurrentPassword reads the caller's current password from a file or, if file is empty, from the terminal.
func readCurrentPassword(ctx context.Context, s *session.Session, file string) (account.Secret, error) {
	if s.Ask == nil && file == "" {
		return "", session.Usagef("cannot ask without a terminal: give --current-password-file")
	}
	return readPasswordFrom(ctx, s, "Current password: ", "--current-password-file", file)
}

func readPassword(ctx context.Context, s *session.Session, file string) (account.Secret, error) {
	return readPasswordFrom(ctx, s, "Password: ", "--password-file", file)
}

func readPasswordFrom(ctx context.Context, s *session.Session, question, flag, file string) (account.Secret, error) {
	if file != "" {
		secret, err := account.ReadSecret(file, s.Stdin)
		if err != nil {
			return "", fmt.Errorf("%s: %w", flag, err)
		}
		s.Keep(secret)
		return secret, nil
	}
	answer, err := s.Ask(ctx, question, true)
	if err != nil {
		return "", err
	}
	s.Keep(account.Secret(answer))
	return account.Secret(answer), nil
}
