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
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/fault"
)

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }

// Files are a member's image bytes: a directory of files named by their SHA-256. A file with such a name is whole and
// was verified; what is being written has another.
type Files struct{ dir string }

// OpenFiles makes the directory when it is not there and forgets what a crash left half-written.
func OpenFiles(dir string) (*Files, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make image directory: %w", err)
	}
	left, err := filepath.Glob(filepath.Join(dir, partPrefix+"*"))
	if err != nil {
		return nil, err
	}
	for _, path := range left {
		if err := os.Remove(path); err != nil {
			return nil, fmt.Errorf("remove half an image: %w", err)
		}
	}
	return &Files{dir}, nil
}

const partPrefix = "part-"

var sumPattern = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (f *Files) path(sum string) (string, error) {
	if !sumPattern.MatchString(sum) {
		return "", fault.Invalid("sha256", "must be 64 hexadecimal digits")
	}
	return filepath.Join(f.dir, sum), nil
}

// Open opens a verified image; NotFound without one.
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

// Has reports whether the bytes are here.
func (f *Files) Has(sum string) bool {
	path, err := f.path(sum)
	if err != nil {
		return false
	}
	_, err = os.Stat(path)
	return err == nil
}

// part is an image on its way in.
type part struct {
	files *Files
	file  *os.File
	sum   hash.Hash
	size  int64
}

// begin makes room for an image of about size bytes.
func (f *Files) begin(size int64) (*part, error) {
	var room unix.Statfs_t
	if err := unix.Statfs(f.dir, &room); err != nil {
		return nil, fmt.Errorf("look at the disk: %w", err)
	}
	if free := int64(room.Bavail) * room.Bsize; size > free-reserveBytes {
		return nil, errNoRoom
	}
	file, err := os.CreateTemp(f.dir, partPrefix)
	if err != nil {
		return nil, fmt.Errorf("make image file: %w", err)
	}
	return &part{files: f, file: file, sum: sha256.New()}, nil
}

// reserveBytes of the disk are left to the log and the records.
const reserveBytes = 1 << 30

var errNoRoom = errors.New("there is no room for the image")

// copy reads to the end, at most limit bytes, looking at ctx on the way.
func (p *part) copy(ctx context.Context, r io.Reader, limit int64) error {
	buf := make([]byte, 1<<20)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := r.Read(buf)
		if p.size += int64(n); p.size > limit {
			return fmt.Errorf("longer than %d bytes", limit)
		}
		p.sum.Write(buf[:n])
		if _, err := p.file.Write(buf[:n]); err != nil {
			return fmt.Errorf("write image: %w", err)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read image: %w", err)
		}
	}
}

func (p *part) checksum() string { return hex.EncodeToString(p.sum.Sum(nil)) }

// keep makes the bytes durable under their checksum.
func (p *part) keep() error {
	path, err := p.files.path(p.checksum())
	if err != nil {
		return err
	}
	if err := p.file.Chmod(0o400); err != nil {
		return err
	}
	if err := p.file.Sync(); err != nil {
		return fmt.Errorf("sync image: %w", err)
	}
	if err := os.Rename(p.file.Name(), path); err != nil {
		return fmt.Errorf("keep image: %w", err)
	}
	dir, err := os.Open(p.files.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

// drop forgets what was not kept, and closes.
func (p *part) drop() {
	p.file.Close()
	os.Remove(p.file.Name()) // gone already when it was kept
}

// sweep removes the files that no image has and that are older than age.
func (f *Files) sweep(wanted map[string]bool, now time.Time, age time.Duration) error {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return fmt.Errorf("list images: %w", err)
	}
	for _, e := range entries {
		if wanted[e.Name()] || strings.HasPrefix(e.Name(), partPrefix) || !sumPattern.MatchString(e.Name()) {
			continue
		}
		info, err := e.Info()
		if err != nil || now.Sub(info.ModTime()) < age {
			continue
		}
		if err := os.Remove(filepath.Join(f.dir, e.Name())); err != nil {
			return fmt.Errorf("remove image: %w", err)
		}
	}
	return nil
}
