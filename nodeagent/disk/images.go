package disk

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
	"sync"
	"syscall"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// maxFetches is the maximum number of concurrent image fetches.
const maxFetches = 4

// ErrChecksum means that the fetched content has another SHA-256 than the image. The content has been deleted.
var ErrChecksum = errors.New("image has another checksum")

var validSum = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Image identifies the content of an image file.
type Image struct {
	SHA256 string       `json:"sha256"` // 64 digits, lower case
	Size   int64        `json:"size"`   // bytes of the file
	Format qcow2.Format `json:"format"` // Raw or QCOW2
}

func (i Image) validate() error {
	switch {
	case !validSum.MatchString(i.SHA256):
		return fmt.Errorf("%w: %q is not the SHA-256 of an image", ErrRefused, i.SHA256)
	case i.Size <= 0:
		return fmt.Errorf("%w: its image has %d bytes", ErrRefused, i.Size)
	case i.Format != qcow2.Raw && i.Format != qcow2.QCOW2:
		return fmt.Errorf("%w: its image is %q, and only raw and qcow2 can be used", ErrRefused, i.Format)
	}
	return nil
}

// Fetch opens the image with that SHA-256 for reading from an offset in bytes. ctx ends when no caller of
// [Images.Ensure] waits for the image any more.
type Fetch func(ctx context.Context, sha256 string, offset int64) (io.ReadCloser, error)

// Images is the cache of image files on this host. Its methods are safe for concurrent use.
type Images struct {
	dir    string
	fetch  Fetch
	ctx    context.Context
	cancel context.CancelFunc
	slots  chan struct{} // capacity maxFetches

	running sync.WaitGroup
	limit   *Limit // nil if the cache has no limit

	trimming sync.Mutex // held by makeRoom while it removes files

	mu      sync.Mutex         // guards the fields below
	flights map[string]*flight // by SHA-256
	uses    map[string]use     // times of the last uses, by SHA-256
	stats   Stats              // only the counters and Limit are used; see the method Stats
}

const partSuffix = ".part"

// flight is one fetch of an image in progress. All callers that wait for the image share it.
type flight struct {
	cancel  context.CancelFunc
	waiting int           // guarded by Images.mu
	done    chan struct{} // closed when err is set
	err     error
}

// OpenImages opens the cache in dir, creating dir if necessary.
func OpenImages(dir string, fetch Fetch) (*Images, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open images: %w", err)
	}
	life, end := context.WithCancel(context.Background())
	return &Images{
		dir: dir, fetch: fetch, ctx: life, cancel: end, slots: make(chan struct{}, maxFetches),
		flights: map[string]*flight{}, uses: map[string]use{},
	}, nil
}

// Close cancels all fetches and waits for their goroutines. Partial content is kept and used by the next fetch.
func (s *Images) Close() {
	s.cancel()
	s.running.Wait()
}

// Ensure returns once the image is in the cache, complete and verified. Callers that need the same image share one
// fetch, which is canceled when the last of them stops waiting. After an error, the next call fetches only the content
// that is still missing. After [ErrChecksum] it fetches everything again.
func (s *Images) Ensure(ctx context.Context, img Image) error {
	if err := img.validate(); err != nil {
		return err
	}
	for {
		if err := s.useCached(img); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err := s.join(img)
		if err != nil {
			return fmt.Errorf("fetch image %s: %w", img.SHA256, err)
		}
		select {
		case <-f.done:
			err = f.err
		case <-ctx.Done():
			err = ctx.Err()
		}
		s.leave(f)
		if errors.Is(err, context.Canceled) && ctx.Err() == nil && s.ctx.Err() == nil {
			continue // the last other caller canceled the fetch just before this one joined it
		}
		if err != nil {
			return fmt.Errorf("fetch image %s: %w", img.SHA256, err)
		}
	}
}

// useCached calls checkCached, and marks the image as used if checkCached returns nil.
func (s *Images) useCached(img Image) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.checkCached(img)
	if err == nil {
		s.markUsed(img.SHA256)
	}
	return err
}

// checkCached returns nil if the image is in the cache, an error that wraps fs.ErrNotExist if it is not, and another
// error if the file cannot be that image.
func (s *Images) checkCached(img Image) error {
	st, err := os.Lstat(s.path(img.SHA256))
	switch {
	case err != nil:
		return err
	case !st.Mode().IsRegular() || st.Mode().Perm() != 0o444:
		return fmt.Errorf("image %s: its file has mode %v, not 0444", img.SHA256, st.Mode())
	case st.Size() != img.Size:
		return fmt.Errorf("%w: image %s has %d bytes, not %d", ErrRefused, img.SHA256, st.Size(), img.Size)
	}
	return nil
}

// join returns the fetch in progress of an image, or starts one. It increases flight.waiting, and the caller must call
// leave later.
func (s *Images) join(img Image) (*flight, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.ctx.Err(); err != nil {
		return nil, err
	}
	f := s.flights[img.SHA256]
	if f == nil {
		ctx, cancel := context.WithCancel(s.ctx)
		f = &flight{cancel: cancel, done: make(chan struct{})}
		s.flights[img.SHA256] = f
		s.running.Go(func() {
			defer cancel()
			f.err = s.download(ctx, img)
			s.mu.Lock()
			delete(s.flights, img.SHA256)
			s.stats.Fetches++
			if f.err != nil {
				s.stats.FetchFailures++
			} else {
				s.markUsed(img.SHA256)
			}
			s.mu.Unlock()
			close(f.done)
		})
	}
	f.waiting++
	return f, nil
}

func (s *Images) leave(f *flight) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if f.waiting--; f.waiting == 0 {
		f.cancel()
	}
}

// download appends the missing content of an image to its .part file, verifies the SHA-256 and renames the file. It
// does not use package atomicfile, because the next fetch must continue with the content that an interrupted one has
// written.
func (s *Images) download(ctx context.Context, img Image) error {
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return ctx.Err()
	}
	// If makeRoom fails, the image is fetched anyway. The agent calls Trim regularly and logs the errors of Trim.
	_ = s.makeRoom(img.Size)
	part := s.path(img.SHA256) + partSuffix
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	sum := sha256.New()
	at, err := resume(ctx, f, sum, img.Size)
	if err != nil {
		return err
	}
	if at < img.Size {
		if err := s.copy(ctx, f, sum, img, at); err != nil {
			return err
		}
	}
	if hex.EncodeToString(sum.Sum(nil)) != img.SHA256 && !mutant.On(mutant.SkipImageDigest) {
		return errors.Join(ErrChecksum, os.Remove(part))
	}
	if err := f.Chmod(0o444); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := os.Rename(part, s.path(img.SHA256)); err != nil {
		return err
	}
	return atomicfile.SyncDir(s.dir)
}

// resume adds the content of the .part file f to the checksum sum and returns the length of f. If f is longer than size
// bytes, resume empties it.
func resume(ctx context.Context, f *os.File, sum hash.Hash, size int64) (int64, error) {
	st, err := f.Stat()
	if err != nil {
		return 0, err
	}
	if st.Size() > size {
		return 0, f.Truncate(0)
	}
	return io.Copy(sum, reader{ctx, f})
}

// copy fetches the content of an image up to its end. The parameter at is the offset of the first byte. copy appends
// the content to the .part file f and adds it to the checksum sum.
func (s *Images) copy(ctx context.Context, f *os.File, sum hash.Hash, img Image, at int64) error {
	r, err := s.fetch(ctx, img.SHA256, at)
	if err != nil {
		return err
	}
	// When ctx ends, the reader is closed, which unblocks a Read that hangs.
	stop := context.AfterFunc(ctx, func() { _ = r.Close() })
	defer func() {
		if stop() {
			_ = r.Close()
		}
	}()
	if _, err := f.Seek(at, io.SeekStart); err != nil {
		return err
	}
	n, err := io.Copy(io.MultiWriter(f, sum), io.LimitReader(reader{ctx, r}, img.Size-at))
	s.mu.Lock()
	s.stats.FetchedBytes += uint64(n)
	s.mu.Unlock()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return err
	case at+n < img.Size:
		return fmt.Errorf("after %d of %d bytes: %w", at+n, img.Size, io.ErrUnexpectedEOF)
	}
	return nil
}

// reader is an io.Reader whose Read returns the error of ctx after ctx has ended.
type reader struct {
	ctx context.Context
	io.Reader
}

func (r reader) Read(p []byte) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.Reader.Read(p)
}

// Open opens a cached image for reading. The error wraps fs.ErrNotExist if it is not in the cache.
func (s *Images) Open(img Image) (*os.File, error) {
	if err := img.validate(); err != nil {
		return nil, err
	}
	if err := s.useCached(img); err != nil {
		return nil, fmt.Errorf("open image: %w", err)
	}
	f, err := os.OpenFile(s.path(img.SHA256), os.O_RDONLY|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return nil, fmt.Errorf("open image: %w", err)
	}
	return f, nil
}

// VirtualSize returns the size, in bytes, that a guest sees of the disk in a cached image. The error wraps ErrRefused
// for an image that QEMU must not open.
func (s *Images) VirtualSize(ctx context.Context, img Image) (uint64, error) {
	if img.Format == qcow2.Raw {
		return uint64(img.Size), nil
	}
	f, err := s.Open(img)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	info, err := qcow2.Inspect(readerAt{ctx, f}, img.Size)
	if errors.Is(err, qcow2.ErrRefused) {
		return 0, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	return info.VirtualSize, err
}

// readerAt is an io.ReaderAt whose ReadAt returns the error of ctx after ctx has ended.
type readerAt struct {
	ctx context.Context
	io.ReaderAt
}

func (r readerAt) ReadAt(p []byte, at int64) (int, error) {
	if err := r.ctx.Err(); err != nil {
		return 0, err
	}
	return r.ReaderAt.ReadAt(p, at)
}

// List returns the SHA-256 of each cached image, sorted.
func (s *Images) List() ([]string, error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	var sums []string
	for _, e := range entries {
		if validSum.MatchString(e.Name()) {
			sums = append(sums, e.Name())
		}
	}
	return sums, nil
}

func (s *Images) path(sum string) string { return filepath.Join(s.dir, sum) }
