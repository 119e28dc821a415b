// Package account keeps what `trivet login` was given: where the cluster is, the token, and the tenant it acts for.
//
// It knows files and forms; not the cluster, nor whether a token is still good. Decisions:
//
//   - One login is kept. Its token is sent to the endpoints that it was made with and to no others, so that a mistyped
//     --endpoint gives it to nobody; and over TLS if it came over TLS, with the authority that was trusted then.
//   - The file is written whole, mode 0600, and refused when others may read it, as ssh does with a key.
//   - Tokens and passwords are [Secret]s: formatting one says so instead of showing it, and no error holds a line of a
//     file that may hold one.
package account

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// Secret is a string that does not show itself.
type Secret string

func (Secret) String() string   { return "[secret]" }
func (Secret) GoString() string { return "[secret]" }

// Login is the file's content.
type Login struct {
	// Endpoints are host:port.
	Endpoints []string `yaml:"endpoints"`
	User      string   `yaml:"user"`
	// Org and Project are the scope that the token was asked for; empty for none.
	Org       string    `yaml:"org,omitempty"`
	Project   string    `yaml:"project,omitempty"`
	Token     Secret    `yaml:"token"`
	ExpiresAt time.Time `yaml:"expires_at"`
	// TLS is set when the endpoints speak it. CA holds the certificates of their authority in PEM; empty for the system's.
	TLS bool   `yaml:"tls,omitempty"`
	CA  string `yaml:"tls_ca,omitempty"`
	// Plaintext is set when somebody forced the token's way to be plaintext.
	Plaintext bool `yaml:"insecure_plaintext,omitempty"`
}

// maxFile bounds what is read of any file, in bytes.
const maxFile = 64 << 10

// ErrNone says that nobody has logged in.
var ErrNone = errors.New("no login is saved")

// Path is where the login is kept: $XDG_CONFIG_HOME/trivet/config.yaml, or the same beneath ~/.config.
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

// Load reads the login, or says ErrNone.
func Load(path string) (*Login, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNone
	}
	if err != nil {
		return nil, fmt.Errorf("open the login: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("open the login: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%s holds a token and others may read it (mode %04o): run chmod 600 on it, or log in again", path, info.Mode().Perm())
	}
	text, err := limited(f)
	if err != nil {
		return nil, fmt.Errorf("read the login %s: %w", path, err)
	}
	var l Login
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	// The decoder's error quotes what it could not read, which may be the token.
	if d.Decode(&l) != nil || l.Token == "" || len(l.Endpoints) == 0 {
		return nil, fmt.Errorf("%s is not as `trivet login` writes it: log in again, or remove it", path)
	}
	return &l, nil
}

// Save writes the login so that it is there whole or not at all, readable by its owner alone.
func (l *Login) Save(path string) (err error) {
	text, err := yaml.Marshal(l)
	if err != nil {
		return fmt.Errorf("write the login: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write the login: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".config-*") // mode 0600
	if err != nil {
		return fmt.Errorf("write the login: %w", err)
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("write the login: %w", err)
			_ = os.Remove(f.Name())
		}
	}()
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
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
	text, err := limited(in)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	s := strings.TrimSuffix(strings.TrimSuffix(string(text), "\n"), "\r")
	if s == "" {
		return "", fmt.Errorf("%s is empty", path)
	}
	return Secret(s), nil
}

func limited(r io.Reader) ([]byte, error) {
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err == nil && len(text) > maxFile {
		err = fmt.Errorf("longer than %d bytes", maxFile)
	}
	return text, err
}
