package disk

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Limit bounds the size of the cache. Both functions are required, and must be safe for concurrent use.
type Limit struct {
	// Bytes returns the maximum number of bytes that the files of the cache may occupy. The parameter size is the
	// number of bytes that the files occupy now.
	Bytes func(size int64) (int64, error)
	// Used returns the SHA-256 of each image that must be kept: the images in the newest assignment, and the base
	// images of all disks and volumes, even if no process has the disk or volume open.
	Used func() (map[string]bool, error)
}

// Stats describes the cache, and counts events since the agent started.
type Stats struct {
	Images int   // number of complete images
	Bytes  int64 // size of all files, including partial content
	Limit  int64 // the last result of Limit.Bytes; 0 before the first check
	// Fetches counts the fetches of images that have ended, and FetchFailures those of them that failed. FetchedBytes
	// is the number of bytes received by all fetches.
	Fetches, FetchFailures, FetchedBytes uint64
	// Evictions counts the images that Trim removed.
	Evictions uint64
}

// SetLimit sets the limit of the cache. If SetLimit is not called, the cache has no limit. SetLimit must be called
// before Ensure.
func (s *Images) SetLimit(l Limit) { s.limit = &l }

// cachedFile is a file of the cache: an image, or the partial content of one.
type cachedFile struct {
	name, sum string
	size      int64 // bytes that the file occupies
	used      time.Time
}

// files returns the files of the cache. The modification time of an image's file stores the time of the image's last
// use, so that the agent knows this time after a restart.
func (s *Images) files() (all []cachedFile, err error) {
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		sum := strings.TrimSuffix(e.Name(), partSuffix)
		if !validSum.MatchString(sum) {
			continue
		}
		var st unix.Stat_t
		err := unix.Lstat(filepath.Join(s.dir, e.Name()), &st)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, &fs.PathError{Op: "stat", Path: e.Name(), Err: err}
		}
		all = append(all, cachedFile{e.Name(), sum, st.Blocks * 512, time.Unix(st.Mtim.Unix())})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, f := range all {
		if last := s.uses[f.sum].last; last.After(f.used) {
			all[i].used = last
		}
	}
	return all, nil
}

// Trim removes unused files until the cache is not larger than its limit. The least recently used file is removed
// first. Partial content counts as unused if no fetch is writing it. If the used images alone exceed the limit, the
// cache stays above the limit. If a process has an unused image open, the kernel frees the image's space only when the
// process closes the file.
func (s *Images) Trim() error {
	if err := s.makeRoom(0); err != nil {
		return fmt.Errorf("trim the image cache: %w", err)
	}
	return nil
}

// makeRoom removes unused files until size more bytes fit into the cache within its limit.
func (s *Images) makeRoom(size int64) error {
	if s.limit == nil {
		return nil
	}
	s.trimming.Lock()
	defer s.trimming.Unlock()
	all, err := s.files()
	if err != nil {
		return err
	}
	var total int64
	for _, f := range all {
		total += f.size
	}
	most, err := s.limit.Bytes(total)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.stats.Limit = most
	s.mu.Unlock()
	excess := total + size - most
	if excess <= 0 {
		return nil
	}
	// The result of Used may lack an image that is first used after this call began. evict keeps such an image.
	began := time.Now()
	used, err := s.limit.Used()
	if err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b cachedFile) int { return a.used.Compare(b.used) })
	for _, f := range all {
		if excess <= 0 {
			return nil
		}
		if used[f.sum] && !mutant.On(mutant.EvictUsedImage) {
			continue
		}
		removed, err := s.evict(f, began)
		if err != nil {
			return err
		}
		if removed {
			excess -= f.size
		}
	}
	return nil
}

// evict removes a file, unless a fetch of the image is in progress or the image was used after the time began.
func (s *Images) evict(f cachedFile, began time.Time) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.flights[f.sum] != nil || !s.uses[f.sum].last.Before(began) {
		return false, nil
	}
	if err := os.Remove(filepath.Join(s.dir, f.name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, err
	}
	delete(s.uses, f.sum)
	if f.name == f.sum {
		s.stats.Evictions++
	}
	return true, nil
}

// touchEvery is the minimum time between two writes of the last use of an image to its file.
const touchEvery = time.Minute

// use is the time of the last use of an image, and the time of the last use that was written to its file.
type use struct{ last, written time.Time }

// markUsed records that an image is used now. The caller must hold mu. After locking mu, the caller must have checked
// that the image is in the cache.
func (s *Images) markUsed(sum string) {
	u := use{time.Now(), s.uses[sum].written}
	if u.last.Sub(u.written) >= touchEvery {
		u.written = u.last
		// An error is ignored: the time in the file affects only the order in which Trim removes images.
		_ = os.Chtimes(s.path(sum), u.last, u.last)
	}
	s.uses[sum] = u
}

// Stats returns the size of the cache, and its counters.
func (s *Images) Stats() (Stats, error) {
	all, err := s.files()
	if err != nil {
		return Stats{}, fmt.Errorf("list images: %w", err)
	}
	s.mu.Lock()
	out := s.stats
	s.mu.Unlock()
	for _, f := range all {
		out.Bytes += f.size
		if f.name == f.sum {
			out.Images++
		}
	}
	return out, nil
}
