package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// scrubInterval is the time after which a file is read and verified again.
	scrubInterval = 7 * 24 * time.Hour
	// scrubRate is the maximum rate at which files are read for verification, in bytes per second.
	scrubRate = 64 << 20
)

// startScrub starts to verify the file with the oldest verification, if this verification is older than scrubInterval.
func (s *Service) startScrub() error {
	sum, err := s.opts.Files.due(time.Now().Add(-scrubInterval))
	if sum == "" || err != nil {
		return err
	}
	s.jobs.start("scrub "+sum, s.scrubs, func(ctx context.Context) error {
		damaged, err := s.opts.Files.scrub(ctx, sum)
		if damaged {
			s.opts.Log.Error("an image file is damaged; it was removed and is pulled again", "sha256", sum)
		}
		return err
	})
	return nil
}

// due returns the SHA-256 of the file with the oldest verification, or "" if all files were verified after the given
// time. The modification time of a file is the time at which the file was stored or last verified.
func (f *Files) due(before time.Time) (sum string, err error) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return "", fmt.Errorf("list images: %w", err)
	}
	for _, e := range entries {
		if !sumPattern.MatchString(e.Name()) {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("read the time of an image: %w", err)
		}
		if info.ModTime().Before(before) {
			sum, before = e.Name(), info.ModTime()
		}
	}
	return sum, nil
}

// scrub reads the file with the SHA-256 sum and verifies it. If the file is good, scrub sets its modification time. If
// the bytes are wrong or cannot be read, scrub reads the file again and then removes it, so that reconcile pulls a good
// copy from another member.
func (f *Files) scrub(ctx context.Context, sum string) (damaged bool, err error) {
	path := filepath.Join(f.dir, sum)
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("verify image: %w", err)
	}
	defer file.Close()
	for range 2 {
		good, err := verify(ctx, file, sum)
		if ctx.Err() != nil {
			return false, ctx.Err()
		}
		if good {
			now := time.Now()
			return false, os.Chtimes(path, now, now)
		}
		if err != nil && !errors.Is(err, unix.EIO) {
			return false, err
		}
	}
	return true, f.removeSame(file, path)
}

// removeSame removes the file at path if it is still the file that is open, and not one that has replaced that file.
func (f *Files) removeSame(open *os.File, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	old, err := open.Stat()
	if err != nil {
		return fmt.Errorf("remove a damaged image: %w", err)
	}
	now, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(old, now) {
		return nil
	}
	if err := errors.Join(err, os.Remove(path)); err != nil {
		return fmt.Errorf("remove a damaged image: %w", err)
	}
	return nil
}

// verify reads a file from the disk, not from the page cache, at scrubRate at most. It reports whether the content has
// the SHA-256 sum.
func verify(ctx context.Context, file *os.File, sum string) (bool, error) {
	// If the kernel keeps its cached pages, verify reads the file from memory. This is not treated as an error.
	_ = unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return false, fmt.Errorf("verify image: %w", err)
	}
	h := sha256.New()
	buf := make([]byte, 1<<20)
	pause := time.NewTimer(0)
	defer pause.Stop()
	for {
		select {
		case <-pause.C:
		case <-ctx.Done():
			return false, ctx.Err()
		}
		n, err := file.Read(buf)
		h.Write(buf[:n])
		if err == io.EOF {
			_ = unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
			return hex.EncodeToString(h.Sum(nil)) == sum, nil
		}
		if err != nil {
			return false, fmt.Errorf("verify image: %w", err)
		}
		pause.Reset(time.Duration(n) * time.Second / scrubRate)
	}
}
