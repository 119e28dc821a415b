// Package account reads and writes the file of saved logins: endpoints, token and tenant of each. It also reads and
// writes files that contain a secret. It makes no calls to the control plane. Decisions:
//
//   - Logins are saved as named contexts in one file, as in kubectl; one of them is the current context. A file with a
//     single login, the format before contexts existed, is read as the context "default".
//   - A token is sent only to the endpoints that issued it, so that a mistyped --endpoint does not receive it. It is
//     sent over TLS, with the same certificate authority, if the login used TLS.
//   - The file is replaced atomically, has mode 0600, and is refused if other users can read it, as ssh does with keys.
//     Writers hold a lock on a second file, so that two logins at the same time are both saved. An invalid file is
//     never overwritten, because it may contain other logins.
//   - Tokens and passwords have the type [Secret], which does not print its value. No error quotes a file that may
//     contain a secret.
package account

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Secret is a string whose value is not printed by package fmt.
type Secret string

func (Secret) String() string   { return "[secret]" }
func (Secret) GoString() string { return "[secret]" }

// Login is a saved login, the content of one context.
type Login struct {
	// Endpoints lists host:port.
	Endpoints []string `yaml:"endpoints"`
	User      string   `yaml:"user,omitempty"`
	// Provider is the OpenID provider of the login; empty for a login with a password.
	Provider string `yaml:"provider,omitempty"`
	// Org and Project are the scope of the token; empty for none.
	Org     string `yaml:"org,omitempty"`
	Project string `yaml:"project,omitempty"`
	// Token is empty after a logout.
	Token     Secret    `yaml:"token,omitempty"`
	ExpiresAt time.Time `yaml:"expires_at,omitempty"`
	// TLS is set if the endpoints use TLS. CA is their certificate authority in PEM; empty for those of the system.
	TLS bool   `yaml:"tls,omitempty"`
	CA  string `yaml:"tls_ca,omitempty"`
	// Plaintext is set if the login was made with --insecure-plaintext.
	Plaintext bool `yaml:"insecure_plaintext,omitempty"`
}

const (
	// maxFile is the maximum size of a file with a secret in bytes.
	maxFile = 64 << 10
	// maxBook is the maximum size of the file of logins in bytes.
	maxBook = 2 << 20
)

// Path returns the path of the file of logins: $XDG_CONFIG_HOME/trivet/config.yaml, or ~/.config/trivet/config.yaml.
func Path(env func(string) string) (string, error) {
	dir := env("XDG_CONFIG_HOME")
	if dir == "" {
		home := env("HOME")
		if home == "" {
			return "", errors.New("cannot save the login: set HOME or XDG_CONFIG_HOME")
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "trivet", "config.yaml"), nil
}

// ReadSecret reads a token or password from a file, without the newline at the end. The path "-" reads from in.
func ReadSecret(path string, in io.Reader) (Secret, error) {
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return "", err
		}
		defer f.Close()
		in = f
	}
	text, err := limited(in, maxFile)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	s := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
	if s == "" {
		return "", fmt.Errorf("%s is empty", path)
	}
	return Secret(s), nil
}

// SecretFile is a new file with mode 0600. Create it before requesting a secret that is returned only once, so that the
// secret is not lost if the file cannot be created.
type SecretFile struct{ f *os.File }

// NewSecretFile creates the file. It fails if the file exists.
func NewSecretFile(path string) (*SecretFile, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return &SecretFile{f}, nil
}

// Write writes the secret and a newline, and closes the file.
func (s *SecretFile) Write(secret Secret) error {
	_, err := io.WriteString(s.f, string(secret)+"\n")
	if err == nil {
		err = s.f.Sync()
	}
	return errors.Join(err, s.f.Close())
}

// Remove closes and deletes the file. Call it if there is no secret to write.
func (s *SecretFile) Remove() error { return errors.Join(s.f.Close(), os.Remove(s.f.Name())) }

func limited(r io.Reader, most int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(text)) > most {
		err = fmt.Errorf("longer than %d bytes", most)
	}
	return text, err
}
