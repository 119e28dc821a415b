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
)

// Before is the context that a file of one login is read as.
const Before = "default"

// Book is the file's content: every context by its name.
type Book struct {
	// Current is the context for calls that name none; empty, or the name of one that is gone, for none.
	Current  string            `yaml:"current,omitempty"`
	Contexts map[string]*Login `yaml:"contexts"`
}

// MaxContexts bounds the file: so many fit maxBook.
const MaxContexts = 32

// Names lists the contexts in order.
func (b *Book) Names() []string { return slices.Sorted(maps.Keys(b.Contexts)) }

// CheckContext refuses what cannot be a context's name: it stands in a shell's words, and in messages.
func CheckContext(name string) error {
	if name == "" || len(name) > 200 || name[0] == '-' || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return fmt.Errorf("%q cannot be a context's name: want 1 to 200 printable characters without blanks, the first no dash", name)
	}
	return nil
}

// Load reads the logins; none when there is no file.
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
		return nil, fmt.Errorf("%s holds a token and others may read it (mode %04o): run chmod 600 on it, and log in again",
			path, info.Mode().Perm())
	}
	text, err := limited(f, maxBook)
	if err != nil {
		return nil, fmt.Errorf("read the login %s: %w", path, err)
	}
	b, ok := parse(text)
	if !ok {
		return nil, fmt.Errorf("%s is not as `trivet login` writes it: mend or remove it, and log in again", path)
	}
	return b, nil
}

// parse reads either form. The decoder's error quotes what it could not read, which may be a token: so there is none.
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

// Update changes the logins, alone: it waits for whoever else does. Nothing is written when change fails.
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
		return fmt.Errorf("at most %d contexts are kept: `trivet context delete` makes room", MaxContexts)
	}
	if err := b.save(path); err != nil {
		return fmt.Errorf("write the login: %w", err)
	}
	return nil
}

// save writes the file so that it is there whole or not at all, readable by its owner alone.
func (b *Book) save(path string) (err error) {
	text, err := yaml.Marshal(b)
	if err != nil {
		return err
	}
	if len(text) > maxBook {
		return fmt.Errorf("longer than %d bytes", maxBook)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".config-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
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

// look is how often a lock that somebody else holds is tried.
const look = 20 * time.Millisecond

// lock waits for the lock file, which stays: to remove it would let two hold it. The file beside it cannot be locked
// itself, since writing puts another in its place.
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
			return nil, fmt.Errorf("somebody else holds %s: %w", path, ctx.Err())
		}
	}
}
