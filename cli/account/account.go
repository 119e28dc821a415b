// Package account keeps what `trivet login` was given: where the cluster is, the token, and the tenant it acts for.
//
// It knows files and forms; not the cluster, nor whether a token is still good. Decisions:
//
//   - Logins are kept as named contexts in one file, as kubectl keeps its own; one of them is the current one. A file of
//     one login, as it was written before there were contexts, is read as the context "default".
//   - A token is sent to the endpoints that it was made with and to no others, so that a mistyped --endpoint gives it to
//     nobody; and over TLS if it came over TLS, with the authority that was trusted then.
//   - The file is written whole, mode 0600, and refused when others may read it, as ssh does with a key. Whoever changes
//     it holds a lock on the file beside it, so that of two logins at once both are kept. A file that cannot be read is
//     left as it is: other logins may be in it.
//   - Tokens and passwords are [Secret]s: formatting one says so instead of showing it, and no error holds a line of a
//     file that may hold one.
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

// Secret is a string that does not show itself.
type Secret string

func (Secret) String() string   { return "[secret]" }
func (Secret) GoString() string { return "[secret]" }

// Login is one context.
type Login struct {
	// Endpoints are host:port.
	Endpoints []string `yaml:"endpoints"`
	User      string   `yaml:"user,omitempty"`
	// Provider is the outside OpenID provider that vouched; empty for a password.
	Provider string `yaml:"provider,omitempty"`
	// Org and Project are the scope that the token was asked for; empty for none.
	Org     string `yaml:"org,omitempty"`
	Project string `yaml:"project,omitempty"`
	// Token is empty after a logout.
	Token     Secret    `yaml:"token,omitempty"`
	ExpiresAt time.Time `yaml:"expires_at,omitempty"`
	// TLS is set when the endpoints speak it. CA holds the certificates of their authority in PEM; empty for the system's.
	TLS bool   `yaml:"tls,omitempty"`
	CA  string `yaml:"tls_ca,omitempty"`
	// Plaintext is set when somebody forced the token's way to be plaintext.
	Plaintext bool `yaml:"insecure_plaintext,omitempty"`
}

const (
	// maxFile bounds what is read of a file with a secret, in bytes.
	maxFile = 64 << 10
	// maxBook bounds the file with the logins, in bytes.
	maxBook = 2 << 20
)

// Path is where the logins are kept: $XDG_CONFIG_HOME/trivet/config.yaml, or the same beneath ~/.config.
func Path(env func(string) string) (string, error) {
	dir := env("XDG_CONFIG_HOME")
	if dir == "" {
		home := env("HOME")
		if home == "" {
			return "", errors.New("neither XDG_CONFIG_HOME nor HOME is set, so there is no place for the login")
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "trivet", "config.yaml"), nil
}

// ReadSecret reads a token or password from a file, without the newline at its end; "-" is in.
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

// SecretFile is a new file that its owner alone may read. It is made before the secret is asked for, so that a secret
// which is shown once is not lost to a directory that cannot be written.
type SecretFile struct{ f *os.File }

// NewSecretFile makes the file, which must not be there yet.
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

// Remove takes the file away again, when no secret came.
func (s *SecretFile) Remove() error { return errors.Join(s.f.Close(), os.Remove(s.f.Name())) }

func limited(r io.Reader, most int64) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, most+1))
	if err == nil && int64(len(text)) > most {
		err = fmt.Errorf("longer than %d bytes", most)
	}
	return text, err
}
