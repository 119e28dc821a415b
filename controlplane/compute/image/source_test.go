package image

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestSource checks which files callers of each org may import. All NotFound errors must have the same text, so that
// callers cannot explore the host.
func TestSource(t *testing.T) {
	acmeDir, otherDir, own, outside := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	write := func(path string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(path), 0o600))
	}
	for _, path := range []string{
		acmeDir + "/disk", acmeDir + "/deep/er/disk", acmeDir + "/a b", acmeDir + "/twice", otherDir + "/disk", own + "/disk", outside + "/secret", acmeDir + "-not/disk",
	} {
		write(path)
	}
	t.Cleanup(func() { os.RemoveAll(acmeDir + "-not") })
	require.NoError(t, os.Symlink(outside+"/secret", acmeDir+"/link"))
	require.NoError(t, os.Symlink("disk", acmeDir+"/near"))
	require.NoError(t, os.Symlink(outside, acmeDir+"/linkdir"))
	require.NoError(t, os.Symlink("deep", acmeDir+"/neardir"))
	require.NoError(t, os.Symlink("/proc/self/root", acmeDir+"/root"))
	require.NoError(t, os.Link(acmeDir+"/twice", acmeDir+"/hard"))
	require.NoError(t, unix.Mkfifo(acmeDir+"/fifo", 0o600))
	socket, err := net.Listen("unix", acmeDir+"/socket")
	require.NoError(t, err)
	t.Cleanup(func() { socket.Close() })
	chdirTo := t.TempDir()
	t.Chdir(chdirTo)
	write(filepath.Join(chdirTo, "relative/disk"))

	s := New(Options{
		Store: storetest.Memory(t, nil), Commands: leadertest.Single(), Self: 1, Members: func() []uint64 { return []uint64{1} }, Log: slog.New(slog.DiscardHandler),
		ImportDirs: []ImportDir{
			{Path: own}, {Path: "relative", Orgs: []cloud.OrgID{"acme"}}, {Path: acmeDir + "/", Orgs: []cloud.OrgID{"acme", "friend"}},
			{Path: otherDir, Orgs: []cloud.OrgID{"other"}}, {Path: acmeDir + "/missing", Orgs: []cloud.OrgID{"acme"}},
			{Path: "/proc", Orgs: []cloud.OrgID{"acme"}}, {Path: "/dev", Orgs: []cloud.OrgID{"acme"}},
		},
	})
	ada, friend, root := member(t), as(t, "friend", "", cloud.ProjectMember), admin(t)
	one := errNoSource().Error()
	for _, c := range []struct {
		name string
		ctx  context.Context
		org  cloud.OrgID
		url  string
		kind fault.Kind
		says string // text of the expected error; empty: the file opens
	}{
		{"a file", ada, "acme", "file://" + acmeDir + "/disk", 0, ""},
		{"deeper", ada, "acme", "file://" + acmeDir + "/deep/er/disk", 0, ""},
		{"a file URL with the host localhost", ada, "acme", "file://localhost" + acmeDir + "/disk", 0, ""},
		{"escaped", ada, "acme", "file://" + acmeDir + "/a%20b", 0, ""},
		{"a file in an import directory with a relative path", ada, "acme", "file://" + chdirTo + "/relative/disk", 0, ""},
		{"a directory for administrators only", root, "acme", "file://" + own + "/disk", 0, ""},
		{"an administrator in an org's directory", root, "acme", "file://" + otherDir + "/disk", 0, ""},
		{"a directory of two orgs", friend, "friend", "file://" + acmeDir + "/disk", 0, ""},

		{"missing", ada, "acme", "file://" + acmeDir + "/nothing", fault.NotFound, one},
		{"a directory for administrators only, without that role", ada, "acme", "file://" + own + "/disk", fault.NotFound, one},
		{"another org's directory", ada, "acme", "file://" + otherDir + "/disk", fault.NotFound, one},
		{"outside", ada, "acme", "file://" + outside + "/secret", fault.NotFound, one},
		{"a file outside all import directories, as an administrator", root, "acme", "file://" + outside + "/secret", fault.NotFound, one},
		{"/etc/shadow", root, "acme", "file:///etc/shadow", fault.NotFound, one},
		{"a directory whose name begins the same", ada, "acme", "file://" + acmeDir + "-not/disk", fault.NotFound, one},
		{"dots", ada, "acme", "file://" + acmeDir + "/../" + filepath.Base(outside) + "/secret", fault.NotFound, one},
		{"dots that stay within the directory", ada, "acme", "file://" + acmeDir + "/deep/../disk", fault.NotFound, one},
		{"percent-encoded dots", ada, "acme", "file://" + acmeDir + "/%2e%2e/" + filepath.Base(outside) + "/secret", fault.NotFound, one},
		{"dots, as an administrator", root, "acme", "file://" + own + "/../" + filepath.Base(outside) + "/secret", fault.NotFound, one},
		{"a double slash", ada, "acme", "file://" + acmeDir + "//disk", fault.NotFound, one},
		{"a link to a file outside", ada, "acme", "file://" + acmeDir + "/link", fault.NotFound, one},
		{"a link to a file inside", ada, "acme", "file://" + acmeDir + "/near", fault.NotFound, one},
		{"through a link to a directory", ada, "acme", "file://" + acmeDir + "/linkdir/secret", fault.NotFound, one},
		{"through a link inside", ada, "acme", "file://" + acmeDir + "/neardir/er/disk", fault.NotFound, one},
		{"through a link to the root", ada, "acme", "file://" + acmeDir + "/root/etc/shadow", fault.NotFound, one},
		{"a file with a hard link", ada, "acme", "file://" + acmeDir + "/hard", fault.NotFound, one},
		{"the hard link to that file", ada, "acme", "file://" + acmeDir + "/twice", fault.NotFound, one},
		{"a fifo", ada, "acme", "file://" + acmeDir + "/fifo", fault.NotFound, one},
		{"a socket", ada, "acme", "file://" + acmeDir + "/socket", fault.NotFound, one},
		{"a directory", ada, "acme", "file://" + acmeDir + "/deep", fault.NotFound, one},
		{"the directory itself", ada, "acme", "file://" + acmeDir, fault.NotFound, one},
		{"the directory itself, with a slash", ada, "acme", "file://" + acmeDir + "/", fault.NotFound, one},
		{"a device", ada, "acme", "file:///dev/null", fault.NotFound, one},
		{"a magic link to a file", ada, "acme", "file:///proc/self/exe", fault.NotFound, one},
		{"a magic link to the root", ada, "acme", "file:///proc/self/root/etc/shadow", fault.NotFound, one},
		{"a magic link to a directory", ada, "acme", "file:///proc/self/cwd/relative/disk", fault.NotFound, one},
		{"a zero byte", ada, "acme", "file://" + acmeDir + "/disk%00.raw", fault.NotFound, one},

		{"an empty source", ada, "acme", "", fault.InvalidArgument, "is required"},
		{"a malformed URL", ada, "acme", "file://%zz", fault.InvalidArgument, "not a URL"},
		{"a path instead of a URL", ada, "acme", acmeDir + "/disk", fault.InvalidArgument, `the scheme must be https, file or snapshot, got ""`},
		{"relative", ada, "acme", "file:disk", fault.InvalidArgument, "an/absolute/path"},
		{"a relative path after two slashes", ada, "acme", "file://relative/disk", fault.InvalidArgument, "an/absolute/path"},
		{"a URL with a host", ada, "acme", "file://example.com" + acmeDir + "/disk", fault.InvalidArgument, "an/absolute/path"},
		{"a URL with a user", ada, "acme", "file://root@localhost" + acmeDir + "/disk", fault.InvalidArgument, "an/absolute/path"},
		{"a URL with a query", ada, "acme", "file://" + acmeDir + "/disk?x", fault.InvalidArgument, "an/absolute/path"},
		{"a URL with an empty query", ada, "acme", "file://" + acmeDir + "/disk?", fault.InvalidArgument, "an/absolute/path"},
		{"a URL with a fragment", ada, "acme", "file://" + acmeDir + "/disk#x", fault.InvalidArgument, "an/absolute/path"},
		{"http", ada, "acme", "http://169.254.169.254/latest", fault.FailedPrecondition, "use https"},
		{"https, which is disabled", ada, "acme", "https://example.org/disk.img", fault.FailedPrecondition, "does not fetch"},
		{"ftp", ada, "acme", "ftp://example.com/x", fault.InvalidArgument, "the scheme must be https, file or snapshot"},
		{"long", ada, "acme", "file:///" + strings.Repeat("x", 4096), fault.InvalidArgument, "4096"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := openFiles(t)
			f, err := s.open(c.ctx, &cloud.Image{Org: c.org, Source: c.url})
			if c.says == "" {
				require.NoError(t, err)
				got, err := io.ReadAll(f)
				require.NoError(t, err)
				require.EqualValues(t, f.size, len(got))
				require.NoError(t, f.Close())
				return
			}
			require.True(t, fault.Is(err, c.kind), "%v", err)
			require.ErrorContains(t, err, c.says)
			require.Equal(t, before, openFiles(t), "a refused import left a file open")
		})
	}
}

func openFiles(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	n := 0
	for _, e := range entries {
		// Descriptors of sockets, pipes and epoll may belong to the Go runtime, so count only those of paths.
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(target, "/") {
			n++
		}
	}
	return n
}

// TestSourceChangesDuringImport checks that a file is refused if its size differs from the size when it was opened, or
// is 0 or more than maxBytes.
func TestSourceChangesDuringImport(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	for size, says := range map[int64]string{999: "changed", 1001: "changed", 0: "empty", maxBytes + 1: "larger"} {
		path := strings.TrimPrefix(w.write(fmt.Sprint(size), noise(1000)), "file://")
		f, err := os.Open(path)
		require.NoError(t, err)
		_, err = s.copySource(t.Context(), &cloud.Image{}, &source{f, size})
		var bad *userError
		require.ErrorAs(t, err, &bad)
		require.Contains(t, bad.text, says)
		require.NoError(t, f.Close())
		require.Empty(t, w.kept(1))
	}
}
