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

// What may be imported, by whom, and that every refusal reads the same, so that none maps the host.
func TestSource(t *testing.T) {
	ours, theirs, own, outside := t.TempDir(), t.TempDir(), t.TempDir(), t.TempDir()
	write := func(path string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, []byte(path), 0o600))
	}
	for _, path := range []string{
		ours + "/disk", ours + "/deep/er/disk", ours + "/a b", ours + "/twice", theirs + "/disk", own + "/disk", outside + "/secret", ours + "-not/disk",
	} {
		write(path)
	}
	t.Cleanup(func() { os.RemoveAll(ours + "-not") })
	require.NoError(t, os.Symlink(outside+"/secret", ours+"/link"))
	require.NoError(t, os.Symlink("disk", ours+"/near"))
	require.NoError(t, os.Symlink(outside, ours+"/linkdir"))
	require.NoError(t, os.Symlink("deep", ours+"/neardir"))
	require.NoError(t, os.Symlink("/proc/self/root", ours+"/root"))
	require.NoError(t, os.Link(ours+"/twice", ours+"/hard"))
	require.NoError(t, unix.Mkfifo(ours+"/fifo", 0o600))
	socket, err := net.Listen("unix", ours+"/socket")
	require.NoError(t, err)
	t.Cleanup(func() { socket.Close() })
	chdirTo := t.TempDir()
	t.Chdir(chdirTo)
	write(filepath.Join(chdirTo, "relative/disk"))

	s := New(Options{
		Store: storetest.Memory(t, nil), Commands: leadertest.Single(), Self: 1, Members: func() int { return 1 }, Log: slog.New(slog.DiscardHandler),
		ImportDirs: []ImportDir{
			{Path: own}, {Path: "relative", Orgs: []cloud.OrgID{"acme"}}, {Path: ours + "/", Orgs: []cloud.OrgID{"acme", "friend"}},
			{Path: theirs, Orgs: []cloud.OrgID{"other"}}, {Path: ours + "/missing", Orgs: []cloud.OrgID{"acme"}},
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
		says string // empty: it opens
	}{
		{"a file", ada, "acme", "file://" + ours + "/disk", 0, ""},
		{"deeper", ada, "acme", "file://" + ours + "/deep/er/disk", 0, ""},
		{"on localhost", ada, "acme", "file://localhost" + ours + "/disk", 0, ""},
		{"escaped", ada, "acme", "file://" + ours + "/a%20b", 0, ""},
		{"a relative directory's", ada, "acme", "file://" + chdirTo + "/relative/disk", 0, ""},
		{"an administrator's directory", root, "acme", "file://" + own + "/disk", 0, ""},
		{"an administrator in an org's", root, "acme", "file://" + theirs + "/disk", 0, ""},
		{"a directory of two orgs", friend, "friend", "file://" + ours + "/disk", 0, ""},

		{"missing", ada, "acme", "file://" + ours + "/nothing", fault.NotFound, one},
		{"not an administrator", ada, "acme", "file://" + own + "/disk", fault.NotFound, one},
		{"another org's directory", ada, "acme", "file://" + theirs + "/disk", fault.NotFound, one},
		{"outside", ada, "acme", "file://" + outside + "/secret", fault.NotFound, one},
		{"outside, an administrator", root, "acme", "file://" + outside + "/secret", fault.NotFound, one},
		{"/etc/shadow", root, "acme", "file:///etc/shadow", fault.NotFound, one},
		{"a directory whose name begins the same", ada, "acme", "file://" + ours + "-not/disk", fault.NotFound, one},
		{"dots", ada, "acme", "file://" + ours + "/../" + filepath.Base(outside) + "/secret", fault.NotFound, one},
		{"dots within", ada, "acme", "file://" + ours + "/deep/../disk", fault.NotFound, one},
		{"dots, escaped", ada, "acme", "file://" + ours + "/%2e%2e/" + filepath.Base(outside) + "/secret", fault.NotFound, one},
		{"dots, administrator", root, "acme", "file://" + own + "/../" + filepath.Base(outside) + "/secret", fault.NotFound, one},
		{"slashes, twice", ada, "acme", "file://" + ours + "//disk", fault.NotFound, one},
		{"a link to a file outside", ada, "acme", "file://" + ours + "/link", fault.NotFound, one},
		{"a link to a file inside", ada, "acme", "file://" + ours + "/near", fault.NotFound, one},
		{"through a link to a directory", ada, "acme", "file://" + ours + "/linkdir/secret", fault.NotFound, one},
		{"through a link inside", ada, "acme", "file://" + ours + "/neardir/er/disk", fault.NotFound, one},
		{"through a link to the root", ada, "acme", "file://" + ours + "/root/etc/shadow", fault.NotFound, one},
		{"one of two names", ada, "acme", "file://" + ours + "/hard", fault.NotFound, one},
		{"the other of two names", ada, "acme", "file://" + ours + "/twice", fault.NotFound, one},
		{"a fifo", ada, "acme", "file://" + ours + "/fifo", fault.NotFound, one},
		{"a socket", ada, "acme", "file://" + ours + "/socket", fault.NotFound, one},
		{"a directory", ada, "acme", "file://" + ours + "/deep", fault.NotFound, one},
		{"the directory itself", ada, "acme", "file://" + ours, fault.NotFound, one},
		{"the directory itself, with a slash", ada, "acme", "file://" + ours + "/", fault.NotFound, one},
		{"a device", ada, "acme", "file:///dev/null", fault.NotFound, one},
		{"a magic link to a file", ada, "acme", "file:///proc/self/exe", fault.NotFound, one},
		{"a magic link to the root", ada, "acme", "file:///proc/self/root/etc/shadow", fault.NotFound, one},
		{"a magic link to a directory", ada, "acme", "file:///proc/self/cwd/relative/disk", fault.NotFound, one},
		{"a zero byte", ada, "acme", "file://" + ours + "/disk%00.raw", fault.NotFound, one},

		{"nothing", ada, "acme", "", fault.InvalidArgument, "is required"},
		{"no URL", ada, "acme", "file://%zz", fault.InvalidArgument, "not a URL"},
		{"a path", ada, "acme", ours + "/disk", fault.InvalidArgument, `the scheme must be file, got ""`},
		{"relative", ada, "acme", "file:disk", fault.InvalidArgument, "an/absolute/path"},
		{"relative, with slashes", ada, "acme", "file://relative/disk", fault.InvalidArgument, "an/absolute/path"},
		{"a host", ada, "acme", "file://example.com" + ours + "/disk", fault.InvalidArgument, "an/absolute/path"},
		{"a user", ada, "acme", "file://root@localhost" + ours + "/disk", fault.InvalidArgument, "an/absolute/path"},
		{"a query", ada, "acme", "file://" + ours + "/disk?x", fault.InvalidArgument, "an/absolute/path"},
		{"an empty query", ada, "acme", "file://" + ours + "/disk?", fault.InvalidArgument, "an/absolute/path"},
		{"a fragment", ada, "acme", "file://" + ours + "/disk#x", fault.InvalidArgument, "an/absolute/path"},
		{"http", ada, "acme", "http://169.254.169.254/latest", fault.FailedPrecondition, "not served yet"},
		{"ftp", ada, "acme", "ftp://example.com/x", fault.InvalidArgument, "the scheme must be file"},
		{"long", ada, "acme", "file:///" + strings.Repeat("x", 4096), fault.InvalidArgument, "4096"},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := openFiles(t)
			f, err := s.open(c.ctx, c.org, c.url)
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
			require.Equal(t, before, openFiles(t), "a refusal leaves no file open")
		})
	}
}

func openFiles(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	n := 0
	for _, e := range entries {
		// Other sorts come and go with the runtime's poller.
		if target, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && strings.HasPrefix(target, "/") {
			n++
		}
	}
	return n
}

// A file that grows or shrinks while it is read is no image.
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
