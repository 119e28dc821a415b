// Package account reads and writes the file in which `trivet login` saves logins, with the endpoints, token and tenant
// of each. It also reads and writes files that contain one secret. It makes no calls to the control plane. Decisions:
//
//   - Logins are saved as named contexts in one file, as in kubectl; one of them is the current context. A file with a
//     single login, the format before contexts existed, is read as the context "default".
//   - A token is sent only to the endpoints that issued it, so that a mistyped --endpoint does not receive it. It is
//     sent over TLS, with the same certificate authority, if the login used TLS.
//   - The file is replaced atomically and has mode 0600. Load returns an error if other users can read the file, as ssh
//     does with keys. Writers lock a second file, so that two logins at the same time are both saved. An invalid file
//     is never overwritten, because it may contain other logins.
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

// Secret is a token or password. Package fmt prints it as "[secret]".
type Secret string

func (Secret) String() string   { return "[secret]" }
func (Secret) GoString() string { return "[secret]" }

// Login is a saved login, which is the content of one context.
type Login struct {
	// Endpoints lists the host:port of each member that the token may be sent to.
	Endpoints []string `yaml:"endpoints"`
	User      string   `yaml:"user,omitempty"`
	// Provider is the name of the OpenID provider that the login used; empty for a login with a password.
	Provider string `yaml:"provider,omitempty"`
	// Org and Project are the tenant to which the token is limited; empty for no limit.
	Org     string `yaml:"org,omitempty"`
	Project string `yaml:"project,omitempty"`
	// Token is the saved token; empty after a logout.
	Token     Secret    `yaml:"token,omitempty"`
	ExpiresAt time.Time `yaml:"expires_at,omitempty"`
	// TLS is set if the endpoints use TLS. CA is the certificate authority that signed their certificates, in PEM;
	// empty for the system's authorities.
	TLS bool   `yaml:"tls,omitempty"`
	CA  string `yaml:"tls_ca,omitempty"`
	// Plaintext is set if the login used --insecure-plaintext, which allows sending the token without TLS.
	Plaintext bool `yaml:"insecure_plaintext,omitempty"`
}

const (
	// maxFile is the maximum size in bytes of a file that contains one secret.
	maxFile = 64 << 10
	// maxBook is the maximum size in bytes of the file of saved logins.
	maxBook = 2 << 20
)

// Path returns the path of the file of saved logins: $XDG_CONFIG_HOME/trivet/config.yaml, or
// ~/.config/trivet/config.yaml. env returns the value of an environment variable.
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

// ReadSecret reads a token or password from a file, or from in if path is "-". It removes one newline at the end, and
// returns an error if there is no secret.
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

// SecretFile is a new file for one secret, with mode 0600. It is created before the command requests a secret that is
// returned only once, so that the secret is not lost if the file cannot be created.
type SecretFile struct{ f *os.File }

// NewSecretFile creates an empty file with mode 0600. It returns an error if the file exists.
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

// Remove closes and deletes the file. It is called instead of Write if there is no secret.
func (s *SecretFile) Remove() error { return errors.Join(s.f.Close(), os.Remove(s.f.Name())) }

func limited(r io.Reader, most int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(text)) > most {
		err = fmt.Errorf("longer than %d bytes", most)
	}
	return text, err
}
