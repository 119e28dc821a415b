package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// TestBadInput sends invalid requests of many kinds over REST and gRPC. It checks that each gets the right status,
// error code and message, and that all of them together change nothing.
func TestBadInput(t *testing.T) {
	w, images, ada := cloud(t)
	w.check = documented(t)
	ada.Check = w.check
	ctx := w.context(3 * time.Minute)
	eve := w.rest(1, w.tenant("eve", "others", "elsewhere", "project:admin"))
	var own lab.VM
	require.NoError(t, ada.Call(ctx, "POST", "/api/v1/vms", body("mine", images.Disk), &own))
	eventually(ctx, t, w.admin, own.ID, "the VM is built", func(vm *vmv1.VirtualMachine) bool { return vm.GetState() == vmv1.VmState_VM_STATE_STOPPED })
	before := w.everything(ctx)

	unproven, err := w.rest(1, "").IssueToken(ctx, "ada", "wrong", nil)
	require.NoError(t, err, "every caller must get a token, because the wire contract requires it")
	unknown, err := w.rest(1, "").IssueToken(ctx, "nobody", "", nil)
	require.NoError(t, err)
	forged := ada.Token[:len(ada.Token)-8] + "AAAAAAAA"
	expired, err := exec.Command(w.trio.Bin.ControlPlane, "admin-token", "--cluster-key", w.trio.KeyFile(), "--ttl", "1ms", "--org", "default", "--project", "default").Output()
	require.NoError(t, err)
	foreignKey := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(foreignKey, []byte(clusterkey.Generate().Encode()), 0o600))
	foreign, err := exec.Command(w.trio.Bin.ControlPlane, "admin-token", "--cluster-key", foreignKey).Output()
	require.NoError(t, err)

	disk := func(more string) string {
		return `{"name":"x","disks":[{"id":"root","source":{"type":"image","image_id":"` + images.Disk + `"}` + more + `}]}`
	}
	nowhere := uuid.Must(uuid.NewV7()).String()
	for _, c := range []struct {
		name, method, path, body, token string
		status                          int
		code, says                      string
	}{
		{"broken JSON", "POST", "/api/v1/vms", `{"name":`, ada.Token, 400, "INVALID_ARGUMENT", "not JSON"},
		{"wrong type", "POST", "/api/v1/vms", `{"name":"x","vcpus":"two"}`, ada.Token, 400, "INVALID_ARGUMENT", "vcpus"},
		{"negative", "POST", "/api/v1/vms", `{"name":"x","vcpus":-1}`, ada.Token, 400, "INVALID_ARGUMENT", "vcpus"},
		{"fraction", "POST", "/api/v1/vms", `{"name":"x","memory_mib":0.5}`, ada.Token, 400, "INVALID_ARGUMENT", "memory_mib"},
		{"no name", "POST", "/api/v1/vms", `{}`, ada.Token, 400, "INVALID_ARGUMENT", "name"},
		{"bad name", "POST", "/api/v1/vms", `{"name":"../../etc"}`, ada.Token, 400, "INVALID_ARGUMENT", "name"},
		{"0 vcpus", "POST", "/api/v1/vms", `{"name":"x","vcpus":0}`, ada.Token, 400, "INVALID_ARGUMENT", "vcpus"},
		{"10^9 vcpus", "POST", "/api/v1/vms", `{"name":"x","vcpus":1000000000}`, ada.Token, 400, "INVALID_ARGUMENT", "vcpus"},
		{"more vcpus than any host", "POST", "/api/v1/vms", `{"name":"x","vcpus":288}`, ada.Token, 429, "RESOURCE_EXHAUSTED", "vCPUs free, 288 needed"},
		{"too much memory", "POST", "/api/v1/vms", `{"name":"x","memory_mib":10000000}`, ada.Token, 429, "RESOURCE_EXHAUSTED", "memory"},
		{"10 MiB", "POST", "/api/v1/vms", `{"name":"` + strings.Repeat("x", 10<<20) + `"}`, ada.Token, 413, "INVALID_ARGUMENT", "1048576"},
		{"another hypervisor", "POST", "/api/v1/vms", `{"name":"x","hypervisor":"microvm"}`, ada.Token, 400, "INVALID_ARGUMENT", "public VM APIs support only the KVM backend"},
		{"another org", "POST", "/api/v1/vms", `{"name":"x","org_id":"others"}`, ada.Token, 403, "FORBIDDEN", "no org others"},
		{"duplicate name", "POST", "/api/v1/vms", disk(``)[:9] + `mine` + disk(``)[10:], ada.Token, 409, "ALREADY_EXISTS", "mine"},
		{"unknown image", "POST", "/api/v1/vms", `{"name":"x","disks":[{"id":"a","source":{"type":"image","image_id":"` + nowhere + `"}}]}`, ada.Token, 404, "NOT_FOUND", nowhere},
		{"an image that is a path", "POST", "/api/v1/vms", `{"name":"x","disks":[{"id":"a","source":{"type":"image","image_id":"/etc/shadow"}}]}`, ada.Token, 400, "INVALID_ARGUMENT", "image_id"},
		{"unknown kind of source", "POST", "/api/v1/vms", `{"name":"x","disks":[{"id":"a","source":{"type":"file"}}]}`, ada.Token, 400, "INVALID_ARGUMENT", "source.type"},
		{"disk of 0 GiB", "POST", "/api/v1/vms", disk(`,"size_gib":0`), ada.Token, 400, "INVALID_ARGUMENT", "size_gib"},
		{"disk of 2^50 GiB", "POST", "/api/v1/vms", disk(`,"size_gib":1125899906842624`), ada.Token, 400, "INVALID_ARGUMENT", "size_gib"},
		{"disk id that is an option", "POST", "/api/v1/vms", strings.Replace(disk(``), `"root"`, `"a,readonly=on"`, 1), ada.Token, 400, "INVALID_ARGUMENT", "id"},
		{"a volume", "POST", "/api/v1/vms", `{"name":"x","disks":[{"id":"a","source":{"type":"volume","volume_id":"v"}}]}`, ada.Token, 400, "INVALID_ARGUMENT", "must be a lower-case UUID"},
		{"a NIC in an unknown subnet", "POST", "/api/v1/vms", `{"name":"x","network":[{"subnet_id":"` + nowhere + `"}]}`, ada.Token, 404, "NOT_FOUND", nowhere},
		{"metadata that is not the name of an instance type", "PATCH", "/api/v1/vms/" + own.ID, `{"metadata":{"trivet/instance-type":"a b"}}`, ada.Token, 400, "INVALID_ARGUMENT", "trivet/instance-type"},
		{"an instance type of a tenant", "POST", "/api/v1/instance-types", `{"name":"small","vcpus":1,"memory_mib":512}`, ada.Token, 403, "FORBIDDEN", "CreateInstanceType"},
		{"an instance type without memory", "POST", "/api/v1/instance-types", `{"name":"small","vcpus":1}`, w.adminToken, 400, "INVALID_ARGUMENT", "memory_mib"},
		{"a guest's password with a line break", "POST", "/api/v1/vms/" + own.ID + "/guest/password", `{"username":"root","password":"a\nroot:b"}`, ada.Token, 400, "INVALID_ARGUMENT", "password"},
		{"a guest's user that is an option", "POST", "/api/v1/vms/" + own.ID + "/guest/password", `{"username":"-x","password":"a"}`, ada.Token, 400, "INVALID_ARGUMENT", "username"},
		{"a guest's password without a guest", "POST", "/api/v1/vms/" + own.ID + "/guest/password", `{"username":"root","password":"a"}`, ada.Token, 422, "FAILED_PRECONDITION", "start VM mine first"},
		{"a guest's key that is none", "POST", "/api/v1/vms/" + own.ID + "/guest/ssh-keys", `{"username":"root","keys":["x"]}`, ada.Token, 400, "INVALID_ARGUMENT", "keys"},
		{"a program that the VM does not allow", "POST", "/api/v1/vms/" + own.ID + "/guest/exec", `{"command":["true"]}`, ada.Token, 422, "FAILED_PRECONDITION", "trivet/guest-exec=allowed"},
		{"input of a program that is not base64", "POST", "/api/v1/vms/" + own.ID + "/guest/exec", `{"command":["true"],"stdin":"*"}`, ada.Token, 400, "INVALID_ARGUMENT", "stdin"},
		{"a program in a guest of another project", "POST", "/api/v1/vms/" + own.ID + "/guest/exec", `{"command":["true"]}`, eve.Token, 404, "NOT_FOUND", own.ID},
		{"a name of a snapshot with spaces", "PATCH", "/api/v1/snapshots/" + nowhere, `{"name":"a b"}`, ada.Token, 400, "INVALID_ARGUMENT", "name"},
		{"the name of no snapshot", "PATCH", "/api/v1/snapshots/" + nowhere, `{"name":"daily"}`, ada.Token, 404, "NOT_FOUND", nowhere},
		{"bad page token", "GET", "/api/v1/vms?page_token=AAAA", "", ada.Token, 400, "INVALID_ARGUMENT", "page_token"},
		{"an ID that is not a UUID", "GET", "/api/v1/vms/1", "", ada.Token, 400, "INVALID_ARGUMENT", "id"},
		{"an id that is a path", "GET", "/api/v1/vms/..%2f..%2fetc", "", ada.Token, 400, "INVALID_ARGUMENT", "id"},
		{"the ID of no VM", "GET", "/api/v1/vms/" + nowhere, "", ada.Token, 404, "NOT_FOUND", nowhere},
		{"the ID of another tenant's VM", "GET", "/api/v1/vms/" + own.ID, "", eve.Token, 404, "NOT_FOUND", own.ID},
		{"start another tenant's VM", "POST", "/api/v1/vms/" + own.ID + "/start", "", eve.Token, 404, "NOT_FOUND", own.ID},
		{"delete another tenant's VM", "DELETE", "/api/v1/vms/" + own.ID, "", eve.Token, 404, "NOT_FOUND", own.ID},
		{"migrate without a destination", "POST", "/api/v1/vms/" + own.ID + "/migrate", `{}`, ada.Token, 400, "INVALID_ARGUMENT", "destination_node_id"},
		{"migrate", "POST", "/api/v1/vms/" + own.ID + "/migrate", `{"destination_node_id":"` + nowhere + `"}`, ada.Token, 422, "FAILED_PRECONDITION", "cannot migrate"},
		{"no token", "GET", "/api/v1/vms", "", "", 401, "UNAUTHENTICATED", "Bearer"},
		{"a forged token", "GET", "/api/v1/vms", "", forged, 401, "UNAUTHENTICATED", "not valid"},
		{"expired", "GET", "/api/v1/vms", "", strings.TrimSpace(string(expired)), 401, "UNAUTHENTICATED", "expired"},
		{"a token of another cluster", "GET", "/api/v1/vms", "", strings.TrimSpace(string(foreign)), 401, "UNAUTHENTICATED", "not valid"},
		{"the token of a login with a wrong password", "GET", "/api/v1/vms", "", unproven, 403, "FORBIDDEN", "is unauthenticated"},
		{"the token of a login with an unknown name", "POST", "/api/v1/vms", `{"name":"x"}`, unknown, 403, "FORBIDDEN", "is unauthenticated"},
		{"admin without a project", "GET", "/api/v1/vms", "", w.adminToken, 403, "FORBIDDEN", "project_id"},
		{"unknown path", "GET", "/api/v2/vms", "", ada.Token, 404, "NOT_FOUND", "/api/v2/vms"},
		{"unknown method", "PATCH", "/api/v1/vms", "", ada.Token, 405, "INVALID_ARGUMENT", "PATCH"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var content any
			if c.body != "" {
				content = c.body
			}
			a, err := (&lab.REST{Host: w.trio.Members[3], Token: c.token, Check: w.check}).Do(ctx, 8084, c.method, c.path, content)
			require.NoError(t, err)
			require.Equal(t, c.status, a.Status, a.Raw)
			require.Equal(t, c.code, a.Error.Code)
			require.Contains(t, a.Error.Message, c.says)
			_, err = uuid.Parse(a.Meta.RequestID)
			require.NoError(t, err)
		})
	}
	t.Run("gRPC", func(t *testing.T) { w.badCalls(ctx, t, images, own.ID) })
	t.Run("images", func(t *testing.T) { w.badImages(ctx, t) })
	require.Equal(t, before, w.everything(ctx), "the invalid requests must change nothing")
}

// everything returns, as text, the state that invalid requests must not change: VMs, allocated resources of hosts, and
// images.
func (w *world) everything(ctx context.Context) string {
	vms, err := w.admin.VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: "default", ProjectId: "default"})
	require.NoError(w.t, err)
	nodes, err := w.admin.Nodes.ListNodes(ctx, &vmv1.ListNodesRequest{})
	require.NoError(w.t, err)
	images, err := w.admin.Images.ListImages(ctx, &vmv1.ListImagesRequest{OrgId: "default", IncludePublic: true})
	require.NoError(w.t, err)
	var out []string
	for _, vm := range vms.GetVms() {
		vm.Status = nil
		out = append(out, prototext.Format(vm))
	}
	for _, n := range nodes.GetNodes() {
		out = append(out, n.GetAllocated().String())
	}
	for _, i := range images.GetImages() {
		if i.GetStatus() != vmv1.ImageStatus_IMAGE_STATUS_ERROR {
			out = append(out, i.GetId())
		}
	}
	return strings.Join(out, "\n")
}

func (w *world) badCalls(ctx context.Context, t *testing.T, images lab.GuestImages, vm string) {
	create := func(change func(*vmv1.CreateVmRequest)) func() error {
		return func() error {
			r := &vmv1.CreateVmRequest{Name: "x", OrgId: "default", ProjectId: "default", Spec: &vmv1.VmSpec{}}
			change(r)
			_, err := w.admin.VMs.CreateVm(ctx, r)
			return err
		}
	}
	list := func(r *vmv1.ListVmsRequest) func() error {
		return func() error {
			r.OrgId, r.ProjectId = "default", "default"
			_, err := w.admin.VMs.ListVms(ctx, r)
			return err
		}
	}
	stop := func(seconds uint32) func() error {
		return func() error {
			_, err := w.admin.VMs.StopVm(ctx, &vmv1.StopVmRequest{OrgId: "default", ProjectId: "default", VmId: vm, TimeoutSeconds: seconds})
			return err
		}
	}
	for _, c := range []struct {
		name string
		call func() error
		code codes.Code
		says string
	}{
		{"a kernel that is a path", create(func(r *vmv1.CreateVmRequest) { r.Spec.Boot = &vmv1.BootSpec{Kernel: "/etc/shadow"} }), codes.InvalidArgument, "must be the id of an image, not a path"},
		{"an initrd that is a path", create(func(r *vmv1.CreateVmRequest) {
			r.Spec.Boot = &vmv1.BootSpec{Kernel: images.Kernel, Initrd: "../../etc/shadow"}
		}), codes.InvalidArgument, "not a path"},
		{"a command line without a kernel", create(func(r *vmv1.CreateVmRequest) { r.Spec.Boot = &vmv1.BootSpec{Cmdline: "x"} }), codes.InvalidArgument, "kernel"},
		{"a command line of two lines", create(func(r *vmv1.CreateVmRequest) {
			r.Spec.Boot = &vmv1.BootSpec{Kernel: images.Kernel, Cmdline: "a\nb"}
		}), codes.InvalidArgument, "cmdline"},
		{"a CPU model with options", create(func(r *vmv1.CreateVmRequest) { r.Spec.Cpu = &vmv1.CpuSpec{CpuModel: "max,+invtsc"} }), codes.InvalidArgument, "cpu_model"},
		{"a CPU model that no host has", create(func(r *vmv1.CreateVmRequest) { r.Spec.Cpu = &vmv1.CpuSpec{CpuModel: "Itanium"} }), codes.ResourceExhausted, "Itanium"},
		{"sockets and cores that do not give the vCPUs", create(func(r *vmv1.CreateVmRequest) {
			r.Spec.Cpu = &vmv1.CpuSpec{Vcpus: 4, Sockets: 3, CoresPerSocket: 1}
		}), codes.InvalidArgument, "sockets"},
		{"an unknown bus", create(func(r *vmv1.CreateVmRequest) {
			r.Spec.Disks = []*vmv1.DiskSpec{{Id: "a", SizeGib: 1, Bus: 99, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}}
		}), codes.InvalidArgument, "bus"},
		{"seventeen disks", create(func(r *vmv1.CreateVmRequest) {
			for i := range 17 {
				r.Spec.Disks = append(r.Spec.Disks, &vmv1.DiskSpec{Id: fmt.Sprint(i), SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}})
			}
		}), codes.InvalidArgument, "disks"},
		{"another hypervisor", create(func(r *vmv1.CreateVmRequest) { r.Hypervisor = vmv1.HypervisorType_HYPERVISOR_TYPE_MICROVM }), codes.InvalidArgument, "KVM"},
		{"secure boot with BIOS", create(func(r *vmv1.CreateVmRequest) {
			r.Metadata = map[string]string{"trivet/firmware": "bios"}
			r.Spec.Security = &vmv1.SecuritySpec{SecureBoot: true}
		}), codes.InvalidArgument, "secure boot needs uefi"},
		{"a path as CD-ROM", create(func(r *vmv1.CreateVmRequest) { r.Metadata = map[string]string{"trivet/cdrom": "/etc/shadow"} }), codes.InvalidArgument, "ID of an image"},
		{"huge pages", create(func(r *vmv1.CreateVmRequest) { r.Spec.Memory = &vmv1.MemorySpec{SizeMib: 512, Hugepages: true} }), codes.ResourceExhausted, "does not serve hugepages"},
		{"65 labels", create(func(r *vmv1.CreateVmRequest) {
			r.Labels = map[string]string{}
			for i := range 65 {
				r.Labels[fmt.Sprint("k", i)] = "v"
			}
		}), codes.InvalidArgument, "labels"},
		{"no project", func() error {
			_, err := w.admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: "default", VmId: vm})
			return err
		}, codes.InvalidArgument, "project_id"},
		{"bad filter", list(&vmv1.ListVmsRequest{Filter: "state = FLYING"}), codes.InvalidArgument, "filter"},
		{"broken filter", list(&vmv1.ListVmsRequest{Filter: "state ="}), codes.InvalidArgument, "filter"},
		{"bad page token", list(&vmv1.ListVmsRequest{PageToken: "x"}), codes.InvalidArgument, "page_token"},
		{"page of 1001", list(&vmv1.ListVmsRequest{PageSize: 1001}), codes.InvalidArgument, "page_size"},
		{"a stop of an hour", stop(3600), codes.InvalidArgument, "timeout_seconds"},
		{"a volume of a driver that no class has", func() error {
			_, err := w.admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{Name: "v", OrgId: "default", ProjectId: "default", SizeGib: 1,
				Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_RBD})
			return err
		}, codes.InvalidArgument, "driver"},
		{"a volume without a size", func() error {
			_, err := w.admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{Name: "v", OrgId: "default", ProjectId: "default"})
			return err
		}, codes.InvalidArgument, "size_gib"},
		{"heartbeat on the tenants' port", func() error {
			_, err := w.admin.Nodes.HeartbeatNode(ctx, &vmv1.HeartbeatNodeRequest{})
			return err
		}, codes.PermissionDenied, "certificate"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := c.call()
			require.Equal(t, c.code, status.Code(err), "%v", err)
			require.ErrorContains(t, err, c.says)
		})
	}
}

// badImages imports images from forbidden or invalid sources, such as files outside of the import directory. It checks
// the errors, and that the members store no data of such an image.
func (w *world) badImages(ctx context.Context, t *testing.T) {
	dir := w.trio.ImportDir()
	write := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, content, 0o644))
		return path
	}
	plain := write("plain.raw", make([]byte, 1<<20))
	require.NoError(t, os.Symlink("/etc/hostname", filepath.Join(dir, "link")))
	require.NoError(t, os.Symlink("/etc", filepath.Join(dir, "etc")))
	require.NoError(t, os.Link(plain, filepath.Join(dir, "hard")))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "folder"), 0o755))
	backed := filepath.Join(dir, "backed.qcow2")
	out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", "/etc/shadow", "-F", "raw", backed, "1G").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Chmod(backed, 0o644))
	vmdk := filepath.Join(dir, "disk.vmdk")
	out, err = exec.Command("qemu-img", "create", "-q", "-f", "vmdk", "-o", "subformat=monolithicFlat", vmdk, "1M").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.NoError(t, os.Chmod(vmdk, 0o644))
	text := write("text.raw", []byte("not an image at all"))

	ada := w.dial(1, w.tenant("bob", "default", "default", "project:member"))
	ask := func(url string, format vmv1.ImageFormat) *vmv1.CreateImageRequest {
		return &vmv1.CreateImageRequest{Name: "bad", OrgId: "default", Format: format, SourceUrl: url}
	}
	const raw, qcow2 = vmv1.ImageFormat_IMAGE_FORMAT_RAW, vmv1.ImageFormat_IMAGE_FORMAT_QCOW2
	for _, c := range []struct {
		name string
		who  *lab.GRPC
		ask  *vmv1.CreateImageRequest
		code codes.Code // OK if CreateImage succeeds and the import then fails
		says string
	}{
		{"/etc/shadow", w.admin, ask("file:///etc/shadow", raw), codes.NotFound, "no such file"},
		{"a file that does not exist", w.admin, ask("file://"+dir+"/none", raw), codes.NotFound, "no such file"},
		{"a path with .. out of the directory", w.admin, ask("file://"+dir+"/../cluster.key", raw), codes.NotFound, "no such file"},
		{"a link to a file outside", w.admin, ask("file://"+dir+"/link", raw), codes.NotFound, "no such file"},
		{"a path through a linked folder", w.admin, ask("file://"+dir+"/etc/hostname", raw), codes.NotFound, "no such file"},
		{"a file with a hard link", w.admin, ask("file://"+dir+"/hard", raw), codes.NotFound, "no such file"},
		{"a folder", w.admin, ask("file://"+dir+"/folder", raw), codes.NotFound, "no such file"},
		{"/proc", w.admin, ask("file:///proc/self/environ", raw), codes.NotFound, "no such file"},
		{"a tenant in the administrator's directory", ada, ask("file://"+text, raw), codes.NotFound, "no such file"},
		{"a tenant who publishes", ada, &vmv1.CreateImageRequest{Name: "bad", Visibility: vmv1.Visibility_VISIBILITY_PUBLIC, SourceUrl: "file:///x"}, codes.PermissionDenied, "publish"},
		{"gopher", w.admin, ask("gopher://x/y", raw), codes.InvalidArgument, "scheme"},
		{"an http URL", w.admin, ask("http://169.254.169.254/", raw), codes.FailedPrecondition, "http is not served"},
		{"no source", w.admin, ask("", raw), codes.InvalidArgument, "source_url"},
		{"a VMDK that names another file", w.admin, ask("file://"+vmdk, vmv1.ImageFormat_IMAGE_FORMAT_VMDK), codes.OK, "data in other files"},
		{"a VMDK declared RAW", w.admin, ask("file://"+vmdk, raw), codes.OK, "vmdk"},
		{"a qcow2 with a backing file", w.admin, ask("file://"+backed, qcow2), codes.OK, "backing file"},
		{"text declared QCOW2", w.admin, ask("file://"+text, qcow2), codes.OK, "declared QCOW2"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := lab.ImportURL(ctx, c.who, c.ask)
			require.ErrorContains(t, err, c.says)
			if c.code != codes.OK {
				require.Equal(t, c.code, status.Code(err), "%v", err)
			}
			require.NotContains(t, err.Error(), "root:")
		})
	}
	for id := range w.trio.Members {
		files, err := os.ReadDir(filepath.Join(w.trio.DataDir(id), "images"))
		require.NoError(t, err)
		require.Len(t, files, 3, "member %d must store the guest's three images and no file of the invalid ones", id)
	}
}
