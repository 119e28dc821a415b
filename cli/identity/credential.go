package identity

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/session"
)

// PasswordFileFlag gives a command the flag for a file with the password.
func PasswordFileFlag(c *cobra.Command, file *string) {
	c.Flags().StringVar(file, "password-file", "", "file with the password, - for standard input (default: asked)")
	_ = c.MarkFlagFilename("password-file") // fails only for a flag that there is not
}

// ReadCredential asks for a user's name, when it is empty, and for the password, when there is no file with it.
func ReadCredential(ctx context.Context, s *session.Session, user, file string) (string, account.Secret, error) {
	if s.Ask == nil && (user == "" || file == "") {
		return "", "", session.Usagef("there is no terminal to ask at: give --user and --password-file")
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
		return "", "", errors.New("neither the name nor the password can be empty")
	}
	return user, password, nil
}

// readNewPassword is a password to be set. A typed one is asked for twice: a slip of the finger would lock its owner out.
func readNewPassword(ctx context.Context, s *session.Session, file string) (account.Secret, error) {
	if s.Ask == nil && file == "" {
		return "", session.Usagef("there is no terminal to ask at: give --password-file")
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
		return "", errors.New("the two passwords are not the same: nothing was changed")
	}
	return first, nil
}

// readCurrentPassword is the password that its owner has now, from a file or asked for.
func readCurrentPassword(ctx context.Context, s *session.Session, file string) (account.Secret, error) {
	if s.Ask == nil && file == "" {
		return "", session.Usagef("there is no terminal to ask at: give --current-password-file")
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
