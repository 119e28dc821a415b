package account

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

// Before is the name that Load gives to the context of a file in the old format, which has a single login and no
// contexts.
const Before = "default"

// Book is the content of the file of saved logins: all contexts by name.
type Book struct {
	// Current is the name of the context that commands use by default. If it is empty, or no context has that name,
	// commands use no saved login by default.
	Current  string            `yaml:"current,omitempty"`
	Contexts map[string]*Login `yaml:"contexts"`
}

// MaxContexts is the maximum number of contexts in a file. maxBook leaves 64 KiB for each of them, which is twice the
// maximum size of a certificate authority.
const MaxContexts = 32

// Names returns the sorted names of the contexts.
func (b *Book) Names() []string { return slices.Sorted(maps.Keys(b.Contexts)) }

// CheckContext returns an error unless name is valid for a context: 1 to 200 printable ASCII characters without spaces
// that do not start with a dash. Such a name can be an argument on a command line.
func CheckContext(name string) error {
	if name == "" || len(name) > 200 || name[0] == '-' || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fmt.Errorf("%q is not a valid context name: want 1 to 200 printable ASCII characters without spaces, not starting with a dash", name)
	}
	return nil
}

// Load reads the file of saved logins. It returns an empty Book if the file does not exist, and an error if the file is
// invalid or other users can read it.
func Load(path string) (*Book, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &Book{}, nil
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
		return nil, fmt.Errorf("%s contains tokens and other users can read it (mode %04o): run chmod 600 on it, and log in again",
			path, info.Mode().Perm())
	}
	text, err := limited(f, maxBook)
	if err != nil {
		return nil, fmt.Errorf("read the login %s: %w", path, err)
	}
	b, ok := parse(text)
	if !ok {
		return nil, fmt.Errorf("%s is not a valid file of logins: repair or remove it, and log in again", path)
	}
	return b, nil
}

// parse decodes the content of the file, with contexts or in the old format. For an invalid file it returns false. It
// returns no error, because the decoder's error may quote a token.
func parse(text []byte) (*Book, bool) {
	var file struct {
		Book  `yaml:",inline"`
		Login `yaml:",inline"`
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if d.Decode(&file) != nil {
		return nil, false
	}
	b := file.Book
	if b.Contexts == nil && b.Current == "" {
		if file.Token == "" || len(file.Endpoints) == 0 {
			return nil, false
		}
		return &Book{Current: Before, Contexts: map[string]*Login{Before: &file.Login}}, true
	}
	if file.Token != "" || len(file.Endpoints) > 0 {
		return nil, false
	}
	for name, l := range b.Contexts {
		if CheckContext(name) != nil || l == nil || len(l.Endpoints) == 0 {
			return nil, false
		}
	}
	return &b, true
}

// Update locks the file of saved logins, loads it, calls change, and saves the result. If another process has the lock,
// Update waits for it until ctx ends. It writes nothing if change returns an error.
func Update(ctx context.Context, path string, change func(*Book) error) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("write the login: %w", err)
	}
	unlock, err := lock(ctx, path+".lock")
	if err != nil {
		return fmt.Errorf("lock the login: %w", err)
	}
	defer unlock()
	b, err := Load(path)
	if err != nil {
		return err
	}
	if b.Contexts == nil {
		b.Contexts = map[string]*Login{}
	}
	if err := change(b); err != nil {
		return err
	}
	if len(b.Contexts) > MaxContexts {
		return fmt.Errorf("at most %d contexts can be saved: delete one with `trivet context delete`", MaxContexts)
	}
	if err := b.save(path); err != nil {
		return fmt.Errorf("write the login: %w", err)
	}
	return nil
}

// save writes b to the file at path, which it replaces atomically, with mode 0600.
func (b *Book) save(path string) error {
	text, err := yaml.Marshal(b)
	if err != nil {
		return err
	}
	if len(text) > maxBook {
		return fmt.Errorf("longer than %d bytes", maxBook)
	}
	return atomicfile.WriteFile(path, text, 0o600)
}

// look is the interval between attempts to lock the lock file.
const look = 20 * time.Millisecond

// lock waits until it has an exclusive flock on the lock file at path. The function unlock releases the lock by closing
// the file. The file is never removed: otherwise a process with the removed file open and a process that creates a new
// file could have the lock at the same time. The file of saved logins itself cannot be locked, because save replaces
// it.
func lock(ctx context.Context, path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	ticker := time.NewTicker(look)
	defer ticker.Stop()
	for {
		switch err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
		case err == nil:
			return func() { _ = f.Close() }, nil
		case !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR):
			_ = f.Close()
			return nil, err
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("another process holds the lock %s: %w", path, ctx.Err())
		}
	}
}
