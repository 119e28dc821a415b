package rbd_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

const mib = 1 << 20

// TestCluster manages images, snapshots and clones in a real Ceph cluster. It also checks the results of calls when the
// helper, the agent or the cluster fails.
func TestCluster(t *testing.T) {
	l := newLab(t)
	l.in("images", testImages)
	l.in("bad input", testBadInput)
	l.in("clones", testClones)
	l.in("records", testRecords)
	l.in("import and export", testImportAndExport)
	l.in("export of a large image", testExportOfLargeImage)
	l.in("interrupted import", testInterruptedImport)
	l.in("blocked client", testBlockedClient)
	l.in("full cluster", testFullCluster)
	l.in("helper killed", testHelperKilled)
	l.in("cluster does not answer", testClusterDoesNotAnswer)
	l.in("secrets", testSecrets)
	l.in("other clusters and users", testOtherClusters)
	l.in("end", testEnd)
}

func testImages(l *lab) {
	create := func(size uint64) error {
		_, err := l.client.CreateImage(l.Context(), &rbdv1.CreateImageRequest{Name: name("a"), Size: size})
		return err
	}
	resize := func(size uint64) error {
		_, err := l.client.ResizeImage(l.Context(), &rbdv1.ResizeImageRequest{Name: name("a"), Size: size})
		return err
	}
	remove := func() error {
		_, err := l.client.RemoveImage(l.Context(), &rbdv1.RemoveImageRequest{Name: name("a")})
		return err
	}
	require.NoError(l, create(8*mib))
	require.NoError(l, create(8*mib), "a repeated call")
	requireCode(l.T, codes.AlreadyExists, "8388608 bytes", create(9*mib))
	require.Equal(l, []string{"a"}, l.images())

	require.NoError(l, resize(16*mib))
	require.NoError(l, resize(16*mib), "a repeated call")
	requireCode(l.T, codes.FailedPrecondition, "cannot shrink", resize(8*mib))
	image := l.get("a")
	require.EqualValues(l, 16*mib, image.GetSize())
	require.Zero(l, image.GetUsedBytes())
	require.True(l, image.GetExclusiveLock())
	require.Nil(l, image.GetParent())

	require.NoError(l, remove())
	require.NoError(l, remove(), "a repeated call")
	require.Empty(l, l.images())
	_, err := l.client.GetImage(l.Context(), &rbdv1.GetImageRequest{Name: name("a")})
	requireCode(l.T, codes.NotFound, "open image a", err)
	requireCode(l.T, codes.NotFound, "open image a", resize(16*mib))
}

func testBadInput(l *lab) {
	for _, bad := range []string{"", ".a", "a/b", "a@b", "a b", "ä", strings.Repeat("a", 97)} {
		_, err := l.client.CreateImage(l.Context(), &rbdv1.CreateImageRequest{Name: name(bad), Size: mib})
		requireCode(l.T, codes.InvalidArgument, "must be 1 to 96", err)
		_, err = l.client.RemoveImage(l.Context(), &rbdv1.RemoveImageRequest{Name: name(bad)})
		requireCode(l.T, codes.InvalidArgument, "must be 1 to 96", err)
		_, err = l.client.CreateSnapshot(l.Context(), &rbdv1.CreateSnapshotRequest{Name: snapshot("a", bad)})
		requireCode(l.T, codes.InvalidArgument, "must be 1 to 96", err)
		_, err = l.client.ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: bad})
		requireCode(l.T, codes.InvalidArgument, "must be 1 to 96", err)
	}
	_, err := l.client.ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: "other"})
	requireCode(l.T, codes.NotFound, "open pool other", err)
	for _, client := range []string{"", "192.0.2.1", "192.0.2.1:0", "192.0.2.1:0/x", "a:0/1", `1.2.3.4:0/1","x":"`} {
		_, err = l.client.BlockClients(l.Context(), &rbdv1.BlockClientsRequest{Clients: []string{client}, Seconds: 60})
		requireCode(l.T, codes.InvalidArgument, "is not an address of a client", err)
	}
	_, err = l.client.BlockClients(l.Context(), &rbdv1.BlockClientsRequest{})
	requireCode(l.T, codes.InvalidArgument, "seconds", err)
	require.Empty(l, l.images())
}

// testRecords creates, replaces and deletes the record of an image. The image itself need not exist. A call that names
// another record than the present one as the record before must fail.
func testRecords(l *lab) {
	get := func() string {
		out, err := l.client.GetRecord(l.Context(), &rbdv1.GetRecordRequest{Name: name("r")})
		require.NoError(l, err)
		return string(out.GetData())
	}
	set := func(before, after string) error {
		request := &rbdv1.SetRecordRequest{Name: name("r"), Before: []byte(before), After: []byte(after)}
		_, err := l.client.SetRecord(l.Context(), request)
		return err
	}
	require.Empty(l, get())
	requireCode(l.T, codes.InvalidArgument, "required", set("", ""))
	requireCode(l.T, codes.InvalidArgument, "at most", set("", strings.Repeat("x", 64<<10+1)))
	requireCode(l.T, codes.Aborted, "has changed", set("other\n", "first\n"))
	require.NoError(l, set("", "first\n"))
	require.NoError(l, set("", "first\n"), "a repeated call")
	requireCode(l.T, codes.Aborted, "has changed", set("", "second\n"))
	requireCode(l.T, codes.Aborted, "has changed", set("firstly\n", "second\n"))
	require.Equal(l, "first\n", get())
	require.NoError(l, set("first\n", "the second\n"))
	requireCode(l.T, codes.Aborted, "has changed", set("first\n", "third\n"))
	require.Equal(l, "the second\n", get())
	require.NoError(l, set("the second\n", ""))
	require.NoError(l, set("the second\n", ""), "a repeated call")
	require.Empty(l, get())
}

func testClones(l *lab) {
	data := bytes.Repeat([]byte("trivet! "), mib/8)
	require.NoError(l, l.importBytes("base", 4*mib, data))
	requireCode(l.T, codes.AlreadyExists, "image base exists", l.importBytes("base", 4*mib, data))
	clone := &rbdv1.CloneImageRequest{Parent: snapshot("base", "s"), Name: name("clone")}
	_, err := l.client.CloneImage(l.Context(), clone)
	requireCode(l.T, codes.NotFound, "open snapshot s", err)
	for _, protect := range []bool{false, true, true} {
		_, err = l.client.CreateSnapshot(l.Context(), &rbdv1.CreateSnapshotRequest{Name: snapshot("base", "s"), Protect: protect})
		require.NoError(l, err)
		if !protect {
			_, err := l.client.CloneImage(l.Context(), clone)
			requireCode(l.T, codes.FailedPrecondition, "not protected", err)
		}
	}
	for range 2 {
		_, err = l.client.CloneImage(l.Context(), clone)
		require.NoError(l, err)
	}
	_, err = l.client.CreateImage(l.Context(), &rbdv1.CreateImageRequest{Name: name("other"), Size: mib})
	require.NoError(l, err)
	_, err = l.client.CloneImage(l.Context(), &rbdv1.CloneImageRequest{Parent: snapshot("base", "s"), Name: name("other")})
	requireCode(l.T, codes.AlreadyExists, "no clone of that snapshot", err)

	image := l.get("clone")
	require.True(l, proto.Equal(snapshot("base", "s"), image.GetParent()), "%v", image.GetParent())
	require.Zero(l, image.GetUsedBytes())
	require.Equal(l, data, l.readAll("clone")[:len(data)])

	removeSnapshot := &rbdv1.RemoveSnapshotRequest{Name: snapshot("base", "s")}
	_, err = l.client.RemoveSnapshot(l.Context(), removeSnapshot)
	requireCode(l.T, codes.FailedPrecondition, "may have clones", err)
	_, err = l.client.RemoveImage(l.Context(), &rbdv1.RemoveImageRequest{Name: name("base")})
	requireCode(l.T, codes.FailedPrecondition, "delete image base", err)
	for range 2 {
		_, err = l.client.FlattenImage(l.Context(), &rbdv1.FlattenImageRequest{Name: name("clone")})
		require.NoError(l, err)
		_, err = l.client.RemoveSnapshot(l.Context(), removeSnapshot)
		require.NoError(l, err)
	}
	require.Nil(l, l.get("clone").GetParent())
	require.Empty(l, l.get("base").GetSnapshots())
	l.remove("base", "other")
	require.Equal(l, data, l.readAll("clone")[:len(data)], "after its parent was deleted")
	l.remove("clone")
}

func testBlockedClient(l *lab) {
	require.NoError(l, l.importBytes("z", 8*mib, []byte("before")))
	writer := l.ceph.Command("qemu-io", "-f", "raw", l.qemuName("z"))
	input, err := writer.StdinPipe()
	require.NoError(l, err)
	output, err := writer.StdoutPipe()
	require.NoError(l, err)
	writer.Stderr = writer.Stdout
	require.NoError(l, writer.Start())
	defer func() { _ = writer.Process.Kill(); _ = writer.Wait() }()
	_, err = io.WriteString(input, "write -P 1 0 4k\n")
	require.NoError(l, err)
	readUntil(l.T, output, "ops;")

	clients := l.get("z").GetClients()
	require.Len(l, clients, 1, "qemu-io has the image open, and the helper does not count")
	_, err = l.client.RemoveImage(l.Context(), &rbdv1.RemoveImageRequest{Name: name("z")})
	requireCode(l.T, codes.FailedPrecondition, "delete image z", err)
	for range 2 {
		_, err = l.client.BlockClients(l.Context(), &rbdv1.BlockClientsRequest{Clients: clients, Seconds: 3600})
		require.NoError(l, err)
	}
	_, err = io.WriteString(input, "write -P 2 0 4k\n")
	require.NoError(l, err)
	readUntil(l.T, output, "write failed")
	require.Equal(l, bytes.Repeat([]byte{1}, 4096), l.readAll("z")[:4096])
	require.NoError(l, writer.Process.Kill())
	require.Eventually(l, func() bool { return len(l.get("z").GetClients()) == 0 }, time.Minute, 100*time.Millisecond)
	l.remove("z")
}

func testHelperKilled(l *lab) {
	l.images()
	before := l.helper()
	require.NotEmpty(l, before)
	l.kill()
	require.Eventually(l, func() bool {
		_, err := l.client.ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: "rbd"})
		return err == nil
	}, time.Minute, 10*time.Millisecond)
	require.NotEqual(l, before, l.helper())
}

func testClusterDoesNotAnswer(l *lab) {
	l.images()
	before := l.helper()
	l.ceph.Pause()
	ctx, cancel := context.WithTimeout(l.Context(), 2*time.Second)
	defer cancel()
	_, err := l.client.CreateImage(ctx, &rbdv1.CreateImageRequest{Name: name("late"), Size: mib})
	requireCode(l.T, codes.DeadlineExceeded, "", err)
	require.NotEqual(l, before, l.helper(), "the helper is killed, because librbd does not return")
	_, err = l.client.ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: "rbd"})
	requireCode(l.T, codes.Unavailable, "", err)
	// The present helper was started during the pause, so it has never reached the OSD.
	l.ceph.RestartOSD()
	require.Eventually(l, func() bool {
		_, err = l.client.CreateImage(l.Context(), &rbdv1.CreateImageRequest{Name: name("late"), Size: mib})
		return err == nil
	}, time.Minute, 100*time.Millisecond, "%v", err)
	require.Eventually(l, func() bool {
		_, err = l.client.RemoveImage(l.Context(), &rbdv1.RemoveImageRequest{Name: name("late")})
		return err == nil
	}, 2*time.Minute, time.Second, "%v", err)
}

// testSecrets requires that the key is in no argument, environment variable or file of the helper, and that the helper
// has no privilege.
func testSecrets(l *lab) {
	l.images()
	dir := filepath.Join("/proc", l.helper())
	for _, file := range []string{"cmdline", "environ"} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		require.NoError(l, err)
		require.NotContains(l, string(text), l.ceph.Key)
	}
	text, err := os.ReadFile(filepath.Join(dir, "status"))
	require.NoError(l, err)
	require.Contains(l, string(text), "Uid:\t65534\t65534\t65534\t65534\n")
	require.Contains(l, string(text), "CapEff:\t0000000000000000\n")
	fds, err := filepath.Glob(filepath.Join(dir, "fd", "*"))
	require.NoError(l, err)
	require.NotEmpty(l, fds)
	for _, fd := range fds {
		target, err := os.Readlink(fd)
		require.NoError(l, err)
		file := strings.HasPrefix(target, "/") && !strings.HasPrefix(target, "/dev/")
		require.False(l, file && !strings.HasPrefix(target, "/sys/fs/cgroup/"), target) // Go reads its CPU limit
	}
}

func testOtherClusters(l *lab) {
	for _, test := range []struct {
		name   string
		change func(*rbdv1.ConnectRequest)
		code   codes.Code
		text   string
	}{
		{"another fsid", func(c *rbdv1.ConnectRequest) { c.Fsid = "00000000-0000-4000-8000-000000000000" },
			codes.FailedPrecondition, "has fsid " + l.ceph.FSID},
		{"another key", func(c *rbdv1.ConnectRequest) { c.Key = "AQAAAAAAAAAAABAAAAAAAAAAAAAAAAAAAAAAAA==" },
			codes.PermissionDenied, "connect to the Ceph cluster"},
		{"unknown user", func(c *rbdv1.ConnectRequest) { c.User = "ada" }, codes.PermissionDenied, "connect to the Ceph cluster"},
		{"no monitors", func(c *rbdv1.ConnectRequest) { c.Monitors = nil }, codes.InvalidArgument, "monitors"},
	} {
		connect := l.ceph.Connect()
		test.change(connect)
		other := rbd.New(l.options, connect)
		_, err := rbdv1.NewRbdServiceClient(other).ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: "rbd"})
		other.Close()
		requireCode(l.T, test.code, test.text, err)
	}
	missing := l.options
	missing.Program = "/nonexistent/trivet-rbd"
	other := rbd.New(missing, l.ceph.Connect())
	defer other.Close()
	_, err := rbdv1.NewRbdServiceClient(other).ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: "rbd"})
	requireCode(l.T, codes.Unavailable, "start trivet-rbd", err)
}

// testEnd requires that the helper ends when the Cluster is closed, and also when the agent process ends.
func testEnd(l *lab) {
	l.images()
	pid := l.helper()
	l.cluster.Close()
	require.NoDirExists(l, filepath.Join("/proc", pid))
	_, err := l.client.ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: "rbd"})
	requireCode(l.T, codes.FailedPrecondition, "closed", err)

	cmd := exec.Command(l.options.Program)
	r, w, err := os.Pipe()
	require.NoError(l, err)
	defer r.Close()
	defer w.Close()
	cmd.ExtraFiles = []*os.File{r}
	out, err := cmd.CombinedOutput()
	require.Error(l, err)
	require.Contains(l, string(out), "file descriptor 3 is not a socket")

	// The end of the agent closes its end of the socket pair.
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(l, err)
	ours, theirs := os.NewFile(uintptr(fds[0]), ""), os.NewFile(uintptr(fds[1]), "")
	cmd = exec.Command(l.options.Program)
	cmd.ExtraFiles = []*os.File{theirs}
	require.NoError(l, cmd.Start())
	require.NoError(l, theirs.Close())
	require.NoError(l, ours.Close())
	require.NoError(l, cmd.Wait())
}

// helper returns the process ID of the client's helper, or "" if there is none.
func (l *lab) helper() string {
	l.Helper()
	paths, err := filepath.Glob("/proc/[0-9]*/exe")
	require.NoError(l, err)
	for _, path := range paths {
		if target, err := os.Readlink(path); err == nil && target == l.options.Program {
			return filepath.Base(filepath.Dir(path))
		}
	}
	return ""
}

// kill kills the client's helper.
func (l *lab) kill() {
	l.Helper()
	pid, err := strconv.Atoi(l.helper())
	require.NoError(l, err)
	process, err := os.FindProcess(pid)
	require.NoError(l, err)
	require.NoError(l, process.Kill())
}

// readUntil reads from r until a text was read.
func readUntil(t *testing.T, r io.Reader, text string) {
	t.Helper()
	var read []byte
	buffer := make([]byte, 4096)
	for !bytes.Contains(read, []byte(text)) {
		n, err := r.Read(buffer)
		require.NoError(t, err, "want %q, read %q", text, read)
		read = append(read, buffer[:n]...)
	}
}
