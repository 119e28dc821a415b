package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/fault"
)

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }

// Files is a member's directory of image files. A file that is named by its SHA-256 is complete and verified. A file
// that is being written has the prefix part-.
type Files struct {
	dir string
	// mu prevents sweep from removing a file that commit is storing again at the same time.
	mu sync.Mutex
}

// OpenFiles creates the directory dir if needed, and removes incomplete files that a crash left in it.
func OpenFiles(dir string) (*Files, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make image directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), partPrefix) {
			continue
		}
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil {
			return nil, fmt.Errorf("remove incomplete image: %w", err)
		}
	}
	return &Files{dir: dir}, nil
}

const partPrefix = "part-"

var sumPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (f *Files) path(sum string) (string, error) {
	if !sumPattern.MatchString(sum) {
		return "", fault.Invalid("sha256", "must be 64 hexadecimal digits")
	}
	return filepath.Join(f.dir, sum), nil
}

// Open opens the image with the SHA-256 sum. It returns NotFound if this member does not have it.
func (f *Files) Open(sum string) (io.ReadSeekCloser, error) {
	path, err := f.path(sum)
	if err != nil {
		return nil, err
	}
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fault.New(fault.NotFound, "this member does not hold the image")
	}
	return file, err
}

// has reports whether this member has the image with the SHA-256 sum. An error means that the file system could not be
// read.
func (f *Files) has(sum string) (bool, error) {
	path, err := f.path(sum)
	if err != nil {
		return false, err
	}
	switch _, err = os.Stat(path); {
	case err == nil:
		return true, nil
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	}
	return false, fmt.Errorf("find image: %w", err)
}

// keep is like has. If this member has the image, keep also sets the access time of its file, so that sweep does not
// remove the file within the next sweepAge. Without keep, a concurrent sweep could remove the file if it has read the
// records before the image's record was written.
func (f *Files) keep(sum string) (bool, error) {
	path, err := f.path(sum)
	if err != nil {
		return false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err == nil {
		// The modification time of the file is the time of its last verification. Therefore only the access time
		// changes.
		err = os.Chtimes(path, time.Now(), info.ModTime())
	}
	if err != nil {
		return false, fmt.Errorf("keep image: %w", err)
	}
	return true, nil
}

// part is an image file that is being written. commit completes it, and discard removes it.
type part struct {
	files     *Files
	file      *os.File
	sum       hash.Hash
	size      int64
	committed bool
}

// begin creates a part, an image file that is being written, for an image of size bytes. It reserves the disk space, so
// that later writes do not run out of space. It returns errNoSpace if less than reserveBytes would stay free.
func (f *Files) begin(size int64) (*part, error) {
	file, err := os.CreateTemp(f.dir, partPrefix)
	if err != nil {
		return nil, fmt.Errorf("make image file: %w", err)
	}
	p := &part{files: f, file: file, sum: sha256.New()}
	if err := p.reserve(0, max(size, 1)); err != nil {
		p.discard()
		return nil, err
	}
	return p, nil
}

// checkSpace returns errNoSpace if less than reserveBytes would stay free after size more bytes.
func (f *Files) checkSpace(size int64) error {
	var stat unix.Statfs_t
	if err := unix.Statfs(f.dir, &stat); err != nil {
		return fmt.Errorf("read free disk space: %w", err)
	}
	if free := int64(stat.Bavail) * stat.Bsize; size > free-reserveBytes {
		return errNoSpace
	}
	return nil
}

// reserve reserves disk space for size bytes at an offset of the file. It returns errNoSpace if less than reserveBytes
// would stay free.
func (p *part) reserve(at, size int64) error {
	if err := p.files.checkSpace(size); err != nil {
		return err
	}
	err := unix.Fallocate(int(p.file.Fd()), unix.FALLOC_FL_KEEP_SIZE, at, size)
	switch {
	case errors.Is(err, unix.ENOSPC):
		return errNoSpace
	case err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("reserve disk space for image: %w", err)
	}
	return nil
}

// reserveBytes is the disk space, in bytes, that begin leaves free for the log and the records.
const reserveBytes = 1 << 30

var (
	errNoSpace = errors.New("not enough disk space for the image")
	// errSource wraps errors that occur while reading an image from its source or from another member. Errors of
	// writing the image's file are not wrapped in it.
	errSource  = errors.New("read image")
	errTooLong = errors.New("it is longer than expected")
)

// copy appends all bytes of r to the file of p. It checks ctx before each read. If the file would become longer than
// limit bytes, it returns errTooLong. Errors of r are wrapped in errSource.
func (p *part) copy(ctx context.Context, r io.Reader, limit int64) error {
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := r.Read(buf)
		if int64(n) > limit-p.size {
			return errTooLong
		}
		p.sum.Write(buf[:n])
		p.size += int64(n)
		if _, err := p.file.Write(buf[:n]); err != nil {
			return fmt.Errorf("write image: %w", err)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%w: %w", errSource, err)
		}
	}
}

// StorePart stores the bytes of r, a part of an image upload, as a file, and syncs it to disk. It returns
// InvalidArgument if r has more than maxPartBytes or another SHA-256 than sum.
func (f *Files) StorePart(ctx context.Context, sum string, r io.Reader) error {
	if _, err := f.path(sum); err != nil {
		return err
	}
	p, err := f.begin(maxPartBytes)
	if errors.Is(err, errNoSpace) {
		return fault.New(fault.ResourceExhausted, "the member has not enough disk space for the part")
	}
	if err != nil {
		return err
	}
	defer p.discard()
	switch err := p.copy(ctx, r, maxPartBytes); {
	case errors.Is(err, errTooLong):
		return fault.Invalid("body", "a part has at most %d bytes", maxPartBytes)
	case err != nil:
		return err
	case p.checksum() != sum:
		return fault.Invalid("sha256", "is not the SHA-256 of the part")
	}
	// commit renames the new file even if this member already has a file with the part. The renaming gives the part's
	// file a new modification time, so that sweep does not remove the file before the record of the part is written.
	return p.commit()
}

// reset removes the bytes written so far, so that the part is empty.
func (p *part) reset() error {
	if err := p.file.Truncate(0); err != nil {
		return fmt.Errorf("empty image file: %w", err)
	}
	if _, err := p.file.Seek(0, io.SeekStart); err != nil {
		return fmt.Errorf("empty image file: %w", err)
	}
	p.sum.Reset()
	p.size = 0
	return nil
}

// checksum returns the SHA-256 of b as 64 hexadecimal digits.
func checksum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

func (p *part) checksum() string { return hex.EncodeToString(p.sum.Sum(nil)) }

// commit syncs the part to disk and renames its file to the SHA-256 of the content. It does not use package atomicfile,
// which needs the file's final name before the content is written. Also, commit must hold the lock mu during the
// rename, so that sweep does not run.
func (p *part) commit() error {
	path, err := p.files.path(p.checksum())
	if err != nil {
		return err
	}
	if err := p.file.Truncate(p.size); err != nil { // releases reserved space that was not needed
		return fmt.Errorf("end image file: %w", err)
	}
	if err := p.file.Chmod(0o400); err != nil {
		return fmt.Errorf("protect image file: %w", err)
	}
	if err := p.file.Sync(); err != nil {
		return fmt.Errorf("sync image: %w", err)
	}
	if err := p.files.rename(p.file.Name(), path); err != nil {
		return fmt.Errorf("store image: %w", err)
	}
	p.committed = true
	if err := atomicfile.SyncDir(p.files.dir); err != nil {
		return fmt.Errorf("sync image directory: %w", err)
	}
	return nil
}

func (f *Files) rename(from, to string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return os.Rename(from, to)
}

// discard closes the part, and removes its file unless commit renamed it.
func (p *part) discard() {
	p.file.Close()
	if !p.committed {
		os.Remove(p.file.Name())
	}
}

// sweep removes the image files whose SHA-256 is not in wanted, and that were neither modified nor read within age
// before now.
func (f *Files) sweep(wanted map[string]bool, now time.Time, age time.Duration) error {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for _, e := range entries {
		if wanted[e.Name()] || !sumPattern.MatchString(e.Name()) {
			continue
		}
		if err := f.removeIfOld(e, now, age); err != nil {
			return err
		}
	}
	return nil
}

// removeIfOld removes the file e if it was neither modified nor read within age before now.
func (f *Files) removeIfOld(e fs.DirEntry, now time.Time, age time.Duration) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	info, err := e.Info()
	if err != nil || now.Sub(info.ModTime()) < age || now.Sub(readTime(info)) < age {
		return nil // the file was removed meanwhile, or is too young
	}
	if err := os.Remove(filepath.Join(f.dir, e.Name())); err != nil {
		return fmt.Errorf("remove image: %w", err)
	}
	return nil
}

// readTime returns the access time of a file: the time of the last read or of the last call of keep.
func readTime(info fs.FileInfo) time.Time {
	at := info.Sys().(*syscall.Stat_t).Atim
	return time.Unix(at.Unix())
}
