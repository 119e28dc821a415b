package e2e

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// uploadSize returns the size of the uploaded image in bytes: TRIVET_UPLOAD_MIB, or 120 MiB, which are 15 parts.
func uploadSize(t *testing.T) int64 {
	text := os.Getenv("TRIVET_UPLOAD_MIB")
	if text == "" {
		return 120 << 20
	}
	n, err := strconv.ParseInt(text, 10, 32)
	require.NoError(t, err)
	return n << 20
}

// TestImageUpload uploads an image with the program trivet. The leader is killed twice during the upload, and then
// trivet is interrupted. When the same command runs again, it must send each part that was not acknowledged exactly
// once, and no other part. The image must have the checksum of the file, a VM must boot from it, and a download must
// give the same bytes.
func TestImageUpload(t *testing.T) {
	size := uploadSize(t)
	parts := int(size >> 23)
	w := newWorld(t)
	w.startAgent()
	ctx := w.context(5*time.Minute + time.Duration(size>>20)*time.Second/4)
	w.tenant("ada", "default", "default", "project:member")
	home := t.TempDir()
	password := filepath.Join(home, "password")
	require.NoError(t, os.WriteFile(password, []byte("correct horse\n"), 0o600))
	must := func(args ...string) string {
		t.Helper()
		out, errs, code := w.trivet(ctx, home, args...)
		require.Zero(t, code, "trivet %s: %s%s", strings.Join(args, " "), out, errs)
		return out
	}
	must("login", "--user", "ada", "--password-file", password, "--endpoint", "127.0.0.1,127.0.0.2,127.0.0.3")
	file, sum := bootable(t, size)

	upload := exec.CommandContext(ctx, w.trio.Bin.CLI, "image", "upload", "big", file)
	upload.Env = []string{"HOME=" + home, "XDG_CONFIG_HOME=" + home}
	var output strings.Builder
	upload.Stdout, upload.Stderr = &output, &output
	require.NoError(t, upload.Start())
	watched := w.uploadOf(ctx, "big")
	watched.await(ctx, 2)
	for survivor := 1; t.Context().Err() == nil; {
		leader := w.leader(survivor)
		require.NoError(t, w.dir.Kill(w.trio.Name(leader)))
		first := survivor == 1
		survivor = leader%3 + 1
		watched.g = w.dial(survivor, w.tenantToken)
		watched.await(ctx, len(watched.parts(ctx))+2)
		require.NoError(t, upload.Process.Signal(syscall.SIGSTOP)) // so that parts are left for the next leader
		require.NoError(t, w.trio.Start(leader))
		w.ready()
		require.NoError(t, upload.Process.Signal(syscall.SIGCONT))
		if !first {
			break
		}
	}
	watched.await(ctx, len(watched.parts(ctx))+1)
	require.NoError(t, upload.Process.Signal(syscall.SIGINT))
	require.Error(t, upload.Wait(), "the upload ended before it was interrupted: %s", output.String())
	require.Contains(t, output.String(), "run the same command again")

	acknowledged := len(watched.parts(ctx))
	require.Less(t, acknowledged, parts)
	t.Logf("%d of %d parts were stored when the upload was interrupted", acknowledged, parts)
	before := w.partCalls(ctx)
	out, errs, code := w.trivet(ctx, home, "image", "upload", "big", file, "-o", "json")
	require.Zero(t, code, "%s%s", out, errs)
	require.Contains(t, errs, fmt.Sprintf("parts already stored: %d", acknowledged))
	require.Equal(t, parts-acknowledged, w.partCalls(ctx)-before, "parts that were sent by the second run")
	var image struct{ ID, Checksum, Status string }
	require.NoError(t, json.Unmarshal([]byte(out), &image))
	require.Equal(t, "AVAILABLE", image.Status)
	require.Equal(t, "sha256:"+sum, image.Checksum)

	must("vm", "create", "web", "--image", "big", "--memory", "192", "--disk", strconv.FormatInt(size>>30+1, 10), "--network", "none", "--start")
	require.NoError(t, lab.Until(ctx, "the guest has booted", func(context.Context) error {
		if !strings.Contains(must("vm", "log", "web"), banner) {
			return os.ErrNotExist
		}
		return nil
	}))
	must("vm", "stop", "web", "--force")
	must("vm", "delete", "web")

	copied := filepath.Join(home, "copy.img")
	must("image", "download", "big", copied)
	require.Equal(t, sum, sumOf(t, copied))
	must("image", "delete", "big")
}

// bootable returns a file of size bytes with a bootable disk, and its SHA-256.
func bootable(t *testing.T, size int64) (file, sum string) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "disk.raw")
	out, err := exec.Command("qemu-img", "convert", "-O", "raw", filepath.Join(guest(t), "disk.qcow2"), file).CombinedOutput()
	require.NoError(t, err, "%s", out)
	f, err := os.OpenFile(file, os.O_WRONLY|os.O_APPEND, 0)
	require.NoError(t, err)
	defer f.Close()
	info, err := f.Stat()
	require.NoError(t, err)
	_, err = io.CopyN(f, rand.Reader, size-info.Size()) // so that the parts differ
	require.NoError(t, err)
	return file, sumOf(t, file)
}

func sumOf(t *testing.T, path string) string {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	require.NoError(t, err)
	return fmt.Sprintf("%x", h.Sum(nil))
}

// watchedUpload reads which parts of an upload are stored.
type watchedUpload struct {
	w   *world
	g   *lab.GRPC
	ref *storagev1.ListUploadedPartsRequest
}

// uploadOf waits until the upload of an image has begun. The session is read from the file in which trivet saves it.
func (w *world) uploadOf(ctx context.Context, name string) *watchedUpload {
	u := &watchedUpload{w: w, g: w.dial(1, w.tenantToken)}
	require.NoError(w.t, lab.Until(ctx, "the upload has begun", func(ctx context.Context) error {
		list, err := u.g.Images.ListImages(ctx, &vmv1.ListImagesRequest{OrgId: "default"})
		if err != nil {
			return err
		}
		for _, i := range list.GetImages() {
			if i.GetName() == name {
				u.ref = &storagev1.ListUploadedPartsRequest{OrgId: "default", ImageId: i.GetId()}
				return nil
			}
		}
		return os.ErrNotExist
	}))
	return u
}

// session reads the session's ID with the REST API, which names an upload by its image.
func (u *watchedUpload) session(ctx context.Context) error {
	var out struct {
		Session string `json:"upload_session_id"`
	}
	err := u.w.rest(1, u.w.tenantToken).Call(ctx, http.MethodGet, "/api/v1/images/"+u.ref.GetImageId()+"/parts", nil, &out)
	u.ref.UploadSessionId = out.Session
	return err
}

func (u *watchedUpload) parts(ctx context.Context) (list []*storagev1.UploadedPart) {
	require.NoError(u.w.t, lab.Until(ctx, "the stored parts are listed", func(ctx context.Context) error {
		if u.ref.GetUploadSessionId() == "" {
			if err := u.session(ctx); err != nil {
				return err
			}
		}
		out, err := storagev1.NewImageDataServiceClient(u.g.Conn()).ListUploadedParts(ctx, u.ref)
		list = out.GetParts()
		return err
	}))
	return list
}

// await waits until at least n parts are stored.
func (u *watchedUpload) await(ctx context.Context, n int) {
	for len(u.parts(ctx)) < n {
		require.NoError(u.w.t, ctx.Err(), "%d parts are stored", n)
		time.Sleep(5 * time.Millisecond)
	}
}

var partCalls = regexp.MustCompile(`(?m)^grpc_server_handled_total\{grpc_code="OK",.*grpc_method="UploadImagePart".*\} ([0-9]+)$`)

// partCalls returns how many calls of UploadImagePart have succeeded at the members since these were started.
func (w *world) partCalls(ctx context.Context) (calls int) {
	for _, address := range w.trio.Members {
		r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+":8084/metrics", nil)
		require.NoError(w.t, err)
		resp, err := http.DefaultClient.Do(r)
		require.NoError(w.t, err)
		text, err := io.ReadAll(resp.Body)
		require.NoError(w.t, err)
		require.NoError(w.t, resp.Body.Close())
		for _, m := range partCalls.FindAllStringSubmatch(string(text), -1) {
			n, err := strconv.Atoi(m[1])
			require.NoError(w.t, err)
			calls += n
		}
	}
	return calls
}
