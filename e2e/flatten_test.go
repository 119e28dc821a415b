package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestImageIsReleased creates 20 VMs of an image at once, and a VM that boots from a volume that was made from the
// image. The host must fetch the image once. The volume is flattened while its VM runs. When it is flattened and the 20
// VMs are deleted, the image can be deleted. The VM must then boot without the image.
func TestImageIsReleased(t *testing.T) {
	w, images, _ := cloud(t)
	ctx := w.context(9 * time.Minute)
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
	vms := w.createAtOnce(ctx, 20, images.Disk)
	require.Equal(t, 1, w.count(ctx, "127.0.0.1:7444", `trivet_agent_image_fetches_total\{result="ok"\}`), "fetches of the host")
	require.Equal(t, 0, w.count(ctx, "127.0.0.1:7444", `trivet_agent_image_fetches_total\{result="failed"\}`))
	reads := 0
	for _, member := range w.trio.Members {
		reads += w.count(ctx, member+":8084", `grpc_server_started_total\{grpc_method="ReadImage",grpc_service="agent.v1.AgentService".*\}`)
	}
	require.Equal(t, 1, reads, "reads of images at the members")
	for _, id := range vms {
		_, err := w.admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: "default", ProjectId: "default", VmId: id, Force: true})
		require.NoError(t, err)
	}

	must("volume", "create", "root", "--size", "1", "--image", images.Disk)
	must("vm", "create", "pet", "--volume", "root,boot", "--memory", "192", "--network", "none", "--start")
	boots := func(times int) {
		t.Helper()
		require.NoError(t, lab.Until(ctx, "the guest has booted", func(context.Context) error {
			if n := strings.Count(must("vm", "log", "pet"), banner); n < times {
				return fmt.Errorf("it has booted %d times", n)
			}
			return nil
		}))
	}
	boots(1)
	remove := func(ctx context.Context) error {
		_, err := w.admin.Images.DeleteImage(ctx, &vmv1.DeleteImageRequest{OrgId: "default", ImageId: images.Disk})
		return err
	}
	require.ErrorContains(t, remove(ctx), "is used by volume")
	must("volume", "flatten", "root", "--wait")
	require.NoError(t, lab.Until(ctx, "the image is deleted", remove))

	must("vm", "stop", "pet", "--force")
	cached, err := filepath.Glob(filepath.Join(w.agent.DataDir(), "images", "*"))
	require.NoError(t, err)
	for _, path := range cached {
		require.NoError(t, os.Remove(path))
	}
	must("vm", "start", "pet")
	boots(2)
	must("vm", "delete", "pet", "--force")
}

// createAtOnce creates VMs of an image concurrently, and waits until their disks are built.
func (w *world) createAtOnce(ctx context.Context, count int, image string) []string {
	ids := make([]string, count)
	group, bounded := errgroup.WithContext(ctx)
	for n := range count {
		group.Go(func() error {
			vm, err := w.admin.VMs.CreateVm(bounded, &vmv1.CreateVmRequest{
				Name: fmt.Sprint("vm-", n), OrgId: "default", ProjectId: "default",
				Metadata: map[string]string{}, Spec: &vmv1.VmSpec{
					Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 64},
					Disks: []*vmv1.DiskSpec{{Id: "root", Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_ImageId{ImageId: image}}, SizeGib: 1}},
				},
			})
			ids[n] = vm.GetId()
			return err
		})
	}
	require.NoError(w.t, group.Wait())
	for _, id := range ids {
		eventually(ctx, w.t, w.admin, id, "the disks are built", func(vm *vmv1.VirtualMachine) bool {
			return vm.GetState() == vmv1.VmState_VM_STATE_STOPPED
		})
	}
	return ids
}

// count returns the sum of the metrics of an address whose name and labels match a pattern.
func (w *world) count(ctx context.Context, address, pattern string) (sum int) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/metrics", nil)
	require.NoError(w.t, err)
	resp, err := http.DefaultClient.Do(r)
	require.NoError(w.t, err)
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	require.NoError(w.t, err)
	for _, m := range regexp.MustCompile(`(?m)^`+pattern+` ([0-9]+)$`).FindAllStringSubmatch(string(text), -1) {
		n, err := strconv.Atoi(m[1])
		require.NoError(w.t, err)
		sum += n
	}
	return sum
}
