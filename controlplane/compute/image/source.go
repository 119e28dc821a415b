package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/controlplane/compute/image/websource"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ImportDir is a directory on a member's host. Callers with system:admin and callers of the orgs in Orgs may import the
// files in it. A relative Path is opened relative to the working directory, which works even if the member may not
// search the parent directories. Source URLs always contain the absolute path of a file.
type ImportDir struct {
	Path string        `yaml:"path"`
	Orgs []cloud.OrgID `yaml:"orgs"`
}

// source is an open file, or another stream, from which an image is made. size is the length of the stream in bytes at
// the time when it was opened.
type source struct {
	io.ReadCloser
	size int64
}

// errNoSource returns the error for a source that cannot be imported. The text is the same for every cause, so that
// callers cannot explore the host's file system.
func errNoSource() error {
	return fault.New(fault.NotFound,
		"source_url: no such file beneath an import directory that you may use (a regular file, without links, on the member that got this call)")
}

// open opens the file to which the source URL of the image points. The context contains the caller. open returns
// errNoSource if the caller may not import the file. For an https URL and for a snapshot, open only checks that the
// source can be used, and returns nil without an error: the background job of the import reads the source.
func (s *Service) open(ctx context.Context, i *cloud.Image) (*source, error) {
	org, text := i.Org, i.Source
	if text == "" {
		return nil, fault.Invalid("source_url", "is required: use BeginImageUpload to send the bytes")
	}
	if len(text) > 4096 {
		return nil, fault.Invalid("source_url", "at most 4096 bytes")
	}
	u, err := url.Parse(text)
	if err != nil {
		return nil, fault.Invalid("source_url", "is not a URL")
	}
	switch u.Scheme {
	case "file":
	case "snapshot":
		return nil, s.checkSnapshot(ctx, i)
	case "https":
		return nil, s.checkWeb(u)
	case "http":
		return nil, fault.New(fault.FailedPrecondition, "source_url: http is not served, because the bytes could be replaced on the way: use https")
	default:
		return nil, fault.Invalid("source_url", "the scheme must be https, file or snapshot, got %q", u.Scheme)
	}
	if u.User != nil || u.Host != "" && u.Host != "localhost" || !filepath.IsAbs(u.Path) || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return nil, fault.Invalid("source_url", "must be file:///an/absolute/path")
	}
	return s.openFile(org, auth.CallerOf(ctx).IsCloudAdmin(), u.Path)
}

// maxWebBytes is the maximum length of an https source, in bytes.
const maxWebBytes = 64 << 30

// NewWeb returns the client for https sources. The parameter allow lists prefixes of private and other special-purpose
// addresses to which it may connect.
func NewWeb(allow []netip.Prefix) *websource.Client {
	return websource.New(websource.Options{Allow: allow, MaxBytes: maxWebBytes})
}

// checkWeb returns an error if an https source cannot be imported.
func (s *Service) checkWeb(u *url.URL) error {
	if s.opts.Web == nil {
		return fault.New(fault.FailedPrecondition, "source_url: this cloud does not fetch images from https sources")
	}
	if err := websource.CheckURL(u); err != nil {
		return fault.Invalid("source_url", "%v", err)
	}
	return nil
}

// openFile opens the file at path in one of the import directories that org may use. If admin is true, it tries all
// import directories. It refuses a path with "." or ".." elements, because the file to which such a path leads depends
// on the directory in which the path is resolved.
func (s *Service) openFile(org cloud.OrgID, admin bool, path string) (*source, error) {
	if filepath.Clean(path) != path {
		return nil, errNoSource()
	}
	dirs := s.opts.ImportDirs
	if mutant.On(mutant.ImportAnywhere) {
		dirs = []ImportDir{{Path: "/", Orgs: []cloud.OrgID{org}}}
	}
	for _, dir := range dirs {
		if !admin && !slices.Contains(dir.Orgs, org) && !mutant.On(mutant.ImportForeignDir) {
			continue
		}
		above, err := filepath.Abs(dir.Path)
		if err != nil {
			continue
		}
		rel, ok := strings.CutPrefix(path, strings.TrimSuffix(above, "/")+"/")
		if !ok {
			continue
		}
		if f, err := openBeneath(dir.Path, rel); err == nil {
			return f, nil
		}
	}
	return nil, errNoSource()
}

// openBeneath opens the file with the relative path rel in the directory dir. It follows no symbolic link. It returns
// an error if the file is not a regular file or does not have exactly one hard link.
func openBeneath(dir, rel string) (*source, error) {
	at, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open import directory: %w", err)
	}
	defer unix.Close(at)
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_NONBLOCK | unix.O_NOFOLLOW | unix.O_CLOEXEC | unix.O_NOCTTY,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	if mutant.On(mutant.FollowImportLinks) {
		how.Flags, how.Resolve = how.Flags&^unix.O_NOFOLLOW, 0
	}
	fd, err := unix.Openat2(at, rel, &how)
	if err != nil {
		return nil, fmt.Errorf("open source: %w", err)
	}
	f := os.NewFile(uintptr(fd), "source")
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 1 {
		f.Close()
		return nil, errors.New("not a regular file with one link")
	}
	return &source{f, st.Size}, nil
}
