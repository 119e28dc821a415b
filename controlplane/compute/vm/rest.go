package vm

import (
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"

	"github.com/gorilla/mux"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Routes registers the VM endpoints of the REST API (docs/api.md).
func (s *Service) Routes(r *rest.Server) {
	const all, one = "/api/v1/vms", "/api/v1/vms/{id}"
	var (
		vm      = rest.Returns(http.StatusOK, vmResponse{})
		created = rest.Returns(http.StatusCreated, vmResponse{})
		action  = rest.Returns(http.StatusOK, actionResponse{})
		deleted = rest.Returns(http.StatusOK, rest.Deleted{})
	)
	r.Handle(http.MethodGet, all, service+"ListVms", s.getVMs, rest.Returns(http.StatusOK, listResponse{}), rest.Query("page_token"),
		rest.QueryOf("filter", nil, "Only VMs that match this filter, as in ListVms."))
	r.Handle(http.MethodPost, all, service+"CreateVm", s.postVM, rest.Takes(createBody{}), created)
	r.Handle(http.MethodGet, one, service+"GetVm", s.getVM, vm)
	r.Handle(http.MethodPatch, one, service+"UpdateVm", s.patchVM, rest.Takes(updateBody{}), vm)
	r.Handle(http.MethodDelete, one, service+"DeleteVm", s.deleteVM, deleted)
	r.Handle(http.MethodPost, one+"/start", service+"StartVm", s.startVM, action)
	r.Handle(http.MethodPost, one+"/stop", service+"StopVm", s.stopVM, action)
	r.Handle(http.MethodPost, one+"/reboot", service+"RebootVm", s.rebootVM, action)
	r.Handle(http.MethodPost, one+"/reset", service+"ResetVm", s.resetVM, action)
	r.HandleEvents(one+"/events", service+"WatchVm", s.watchVM, rest.Returns(http.StatusOK, eventResponse{}))
	r.Handle(http.MethodPost, one+"/migrate", service+"MigrateVm", s.migrateVM, rest.Takes(migrateBody{}), vm)
	r.Handle(http.MethodPost, one+"/disks", service+"AttachDisk", s.postDisk, rest.Takes(diskBody{}), created)
	r.Handle(http.MethodDelete, one+"/disks/{disk}", service+"DetachDisk", s.deleteDisk, deleted)
	r.Handle(http.MethodPost, one+"/nics", service+"AttachNic", s.postNIC, rest.Takes(nicBody{}), created)
	r.Handle(http.MethodDelete, one+"/nics/{nic}", service+"DetachNic", s.deleteNIC, deleted)
	s.guestRoutes(r)
	s.viewRoutes(r)
	r.ResolveNames("vms", auth.Named(service+"GetVm", s.named))
}

// vmResponse is the JSON object VmResponse of the wire contract (docs/api.md).
type vmResponse struct {
	// A lower-case UUID.
	ID string `json:"id"`
	// Unique in the project.
	Name string `json:"name"`
	// The org of the VM.
	OrgID string `json:"org_id"`
	// The project of the VM.
	ProjectID string `json:"project_id"`
	// The host of the VM. Absent while the VM has none.
	NodeID string `json:"node_id,omitempty"`
	// Such as Creating, Stopped, Starting, Running, Stopping, Error or Failed.
	State string `json:"state"`
	// kvm.
	Hypervisor string `json:"hypervisor"`
	// The number of virtual CPUs.
	CPUs uint32 `json:"cpus"`
	// The memory in MiB.
	MemoryMB uint64 `json:"memory_mb"`
	// The NICs.
	Network []nicResponse `json:"network"`
}

type nicResponse struct {
	// Unique in the VM.
	ID string `json:"id"`
	// The VPC.
	NetworkID string `json:"network_id"`
	// The subnet of the port.
	SubnetID string `json:"subnet_id,omitempty"`
	// The port of the NIC.
	PortID string `json:"port_id,omitempty"`
	// Unique in the VPC.
	MACAddress string `json:"mac_address,omitempty"`
	// The IPv4 address.
	IPAddress string `json:"ip_address,omitempty"`
	// The prefix of the subnet.
	CIDRBlock string `json:"cidr_block,omitempty"`
	// The gateway of the subnet.
	GatewayIP string `json:"gateway_ip,omitempty"`
	// True if the subnet has DHCP.
	DHCPEnabled bool `json:"dhcp_enabled"`
	// virtio-net, e1000 or unspecified.
	Model string `json:"model"`
	// The IDs of the groups of the port.
	SecurityGroups []string `json:"security_groups"`
}

// listResponse is the response to a list of VMs.
type listResponse struct {
	// At most 100, in the order of their creation.
	VMs []vmResponse `json:"vms"`
	// Absent on the last page.
	Next string `json:"next_page_token,omitempty"`
}

// actionResponse is the response to an action on a VM: started, stopped, rebooted or reset.
type actionResponse struct {
	// The ID of the VM.
	ID cloud.VMID `json:"id"`
	// started, stopped, rebooted or reset.
	Action string `json:"action"`
}

var (
	hypervisorNames = map[cloud.Hypervisor]string{
		cloud.HypervisorUnspecified: "kvm", cloud.KVM: "kvm",
		cloud.MicroVM: "legacy-unsupported-microvm", cloud.AltVMM: "legacy-unsupported-altvmm",
	}
	modelNames = map[cloud.NICModel]string{
		cloud.ModelUnspecified: "unspecified", cloud.ModelVirtio: "virtio-net", cloud.ModelE1000: "e1000",
	}
)

func toREST(vm *cloud.VM) vmResponse {
	out := vmResponse{
		ID: string(vm.ID), Name: vm.Name, OrgID: string(vm.Org), ProjectID: string(vm.Project), NodeID: string(vm.Node),
		State: vm.State.Variant(), Hypervisor: hypervisorNames[vm.Hypervisor], CPUs: 1, MemoryMB: cloud.DefaultMemory,
		Network: []nicResponse{},
	}
	if vm.Spec.CPU != nil {
		out.CPUs = vm.Spec.CPU.VCPUs
	}
	if vm.Spec.Memory != nil {
		out.MemoryMB = vm.Spec.Memory.SizeMiB
	}
	for _, n := range vm.Spec.Network {
		out.Network = append(out.Network, nicResponse{
			ID: n.ID, NetworkID: n.NetworkID, SubnetID: n.SubnetID, PortID: n.PortID, MACAddress: n.MAC, IPAddress: n.IP,
			CIDRBlock: n.CIDR, GatewayIP: n.Gateway, DHCPEnabled: n.DHCP, Model: modelNames[n.Model],
			SecurityGroups: append([]string{}, n.SecurityGroups...),
		})
	}
	return out
}

// admitVM authorizes a call and returns the caller's tenant and the VM ID in the request path.
func admitVM(r *http.Request, method auth.Method) (cloud.Tenant, cloud.VMID, error) {
	t, err := auth.Admit(r.Context(), service+method, "", "")
	return t, cloud.VMID(mux.Vars(r)["id"]), err
}

func (s *Service) getVMs(_ *rest.Response, r *http.Request) (any, error) {
	t, err := auth.Admit(r.Context(), service+"ListVms", "", "")
	if err != nil {
		return nil, err
	}
	query := r.URL.Query()
	list, next, err := s.List(r.Context(), t, cloud.DefaultPage, query.Get("page_token"), query.Get("filter"))
	if err != nil {
		return nil, err
	}
	out := listResponse{VMs: []vmResponse{}, Next: next}
	for _, vm := range list {
		out.VMs = append(out.VMs, toREST(vm))
	}
	return out, nil
}

func (s *Service) getVM(_ *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "GetVm")
	if err != nil {
		return nil, err
	}
	vm, err := s.Get(r.Context(), t, id)
	if err != nil {
		return nil, err
	}
	return toREST(vm), nil
}

// createBody is the JSON object CreateVmRequestRest of the wire contract (docs/api.md).
type createBody struct {
	// Unique in the project: 1 to 63 of a-z 0-9 -, starting with a letter.
	Name *string `json:"name" api:"required"`
	// The org of the VM. Empty: that of the call.
	OrgID string `json:"org_id"`
	// The project of the VM. Empty: that of the call.
	ProjectID string `json:"project_id"`
	// 1 to 288. Absent: 1.
	VCPUs *uint32 `json:"vcpus"`
	// In MiB, 64 to 12582912. Absent: 512.
	MemoryMiB *uint64 `json:"memory_mib"`
	// kvm. Empty: kvm.
	Hypervisor string `json:"hypervisor"`
	// Absent: the VM has no disk.
	Disks []diskBody `json:"disks"`
	// Absent: the VM has no NIC.
	Network []nicBody `json:"network"`
}

type diskBody struct {
	// Chosen by the caller, unique in the VM: 1 to 32 of a-z 0-9 -, starting with a letter or digit.
	ID *string `json:"id" api:"required"`
	// What the disk begins with.
	Source *struct {
		// image, volume or blank.
		Type string `json:"type" api:"required"`
		// The image, for the type image.
		ImageID string `json:"image_id"`
		// The volume, for the type volume.
		VolumeID string `json:"volume_id"`
	} `json:"source" api:"required"`
	// In GiB, 1 to 65536, and not less than the size of the image. Absent: 10. Ignored for a volume.
	SizeGiB *uint64 `json:"size_gib"`
	// virtio, scsi, ide or sata. Any other value: virtio.
	Bus string `json:"bus"`
	// writeback or writethrough. Any other value: writeback.
	Cache string `json:"cache"`
	// Lower boots first; equal ones boot in the order of the list.
	BootIndex uint32 `json:"boot_index"`
}

type nicBody struct {
	// Unique in the VM: 1 to 32 of a-z 0-9 -, starting with a letter or digit. Empty: nic and the index in the list.
	ID string `json:"id"`
	// The VPC. Empty: that of subnet_id or port_id, else the project's default VPC.
	NetworkID string `json:"network_id"`
	// The subnet of a new port. Empty: the only subnet of the VPC.
	SubnetID string `json:"subnet_id"`
	// An existing port, which nothing uses. Empty: a new port, which is deleted with the NIC.
	PortID string `json:"port_id"`
	// Unique in the VPC. Empty: chosen by the service.
	MACAddress string `json:"mac_address"`
	// An IPv4 address of the subnet. Empty: the lowest free one.
	IPAddress string `json:"ip_address"`
	// Empty, or the prefix of the subnet.
	CIDRBlock string `json:"cidr_block"`
	// Empty, or the gateway of the subnet.
	GatewayIP string `json:"gateway_ip"`
	// True is refused if the subnet has no DHCP.
	DHCPEnabled bool `json:"dhcp_enabled"`
	// virtio-net or e1000. Any other value: virtio-net.
	Model string `json:"model"`
	// IDs of at most 16 groups of the project. Empty: the group default. Must be empty with port_id.
	SecurityGroups []string `json:"security_groups"`
}

// request converts the body to a CreateRequest. Absent fields get the defaults of the wire contract.
func (b *createBody) request() (w CreateRequest, err error) {
	if b.Name == nil {
		return w, fault.Invalid("name", "is required")
	}
	if b.Hypervisor != "" && b.Hypervisor != "kvm" {
		return w, fault.Invalid("hypervisor", "public VM APIs support only the KVM backend, not %q", truncate(b.Hypervisor, 64))
	}
	w = CreateRequest{Name: *b.Name, Hypervisor: cloud.KVM}
	cpu := cloud.CPU{VCPUs: 1, CoresPerSocket: 1, Sockets: 1}
	if b.VCPUs != nil {
		cpu.VCPUs = *b.VCPUs
	}
	memory := cloud.Memory{SizeMiB: cloud.DefaultMemory}
	if b.MemoryMiB != nil {
		memory.SizeMiB = *b.MemoryMiB
	}
	// In gRPC, 0 means that the field is absent. In JSON, a 0 was sent by the caller, and is invalid.
	if cpu.VCPUs == 0 {
		return w, fault.Invalid("vcpus", "must be 1 to %d, got 0", cloud.MaxVCPUs)
	}
	if memory.SizeMiB == 0 {
		return w, fault.Invalid("memory_mib", "must be %d to %d, got 0", cloud.MinMemoryMiB, cloud.MaxMemoryMiB)
	}
	w.Spec = cloud.Spec{CPU: &cpu, Memory: &memory}
	for i := range b.Disks {
		d, err := b.Disks[i].disk(fmt.Sprintf("disks[%d].", i))
		if err != nil {
			return w, err
		}
		w.Spec.Disks = append(w.Spec.Disks, d)
	}
	for i, n := range b.Network {
		w.Spec.Network = append(w.Spec.Network, n.nic(i))
	}
	return w, nil
}

func (b *diskBody) disk(at string) (d cloud.Disk, err error) {
	if b.ID == nil {
		return d, fault.Invalid(at+"id", "is required")
	}
	if b.Source == nil {
		return d, fault.Invalid(at+"source", "is required")
	}
	d = cloud.Disk{ID: *b.ID, SizeGiB: cloud.DefaultDiskGiB, BootIndex: b.BootIndex}
	switch b.Source.Type {
	case "image":
		if d.Image = cloud.ImageID(b.Source.ImageID); d.Image == "" {
			return d, fault.Invalid(at+"source.image_id", "is required")
		}
	case "volume":
		if d.Volume = cloud.VolumeID(b.Source.VolumeID); d.Volume == "" {
			return d, fault.Invalid(at+"source.volume_id", "is required")
		}
	case "blank":
		d.Blank = true
	default:
		return d, fault.Invalid(at+"source.type", "must be image, volume or blank, got %q", truncate(b.Source.Type, 64))
	}
	if b.SizeGiB != nil {
		d.SizeGiB = *b.SizeGiB
	}
	d.Bus = map[string]cloud.DiskBus{"scsi": cloud.BusSCSI, "ide": cloud.BusIDE, "sata": cloud.BusSATA}[b.Bus]
	if d.Bus == cloud.BusUnspecified {
		d.Bus = cloud.BusVirtio
	}
	d.Cache = cloud.CacheWriteback
	switch b.Cache {
	case "writethrough":
		d.Cache = cloud.CacheWritethrough
	}
	return d, nil
}

func (b *nicBody) nic(i int) cloud.NIC {
	n := cloud.NIC{
		ID: b.ID, NetworkID: b.NetworkID, SubnetID: b.SubnetID, PortID: b.PortID, MAC: b.MACAddress, IP: b.IPAddress, CIDR: b.CIDRBlock,
		Gateway: b.GatewayIP, DHCP: b.DHCPEnabled, Model: cloud.ModelVirtio, SecurityGroups: b.SecurityGroups,
	}
	if n.ID == "" {
		n.ID = fmt.Sprintf("nic%d", i)
	}
	if n.NetworkID == "" {
		n.NetworkID = "default"
	}
	if b.Model == "e1000" {
		n.Model = cloud.ModelE1000
	}
	return n
}

func (s *Service) postVM(w *rest.Response, r *http.Request) (any, error) {
	// Authenticate the caller before reading the body. The tenant is in the body, so authorize the caller afterwards.
	if _, err := auth.Admit(r.Context(), service+"CreateVm", "", ""); err != nil && !auth.Undecided(err) {
		return nil, err
	}
	var in createBody
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return nil, err
	}
	t, err := auth.Admit(r.Context(), service+"CreateVm", in.OrgID, in.ProjectID)
	if err != nil {
		return nil, err
	}
	wanted, err := in.request()
	if err != nil {
		return nil, err
	}
	out, err := s.Create(r.Context(), t, wanted, sha256.Sum256(raw))
	if err != nil {
		return nil, withBodyField(err)
	}
	replayed(w, out.Replayed)
	w.Status = http.StatusCreated
	return toREST(&out.VM), nil
}

// bodyFieldNames maps prefixes of field names in a VM's spec to the names that these fields have in createBody.
var bodyFieldNames = []struct{ spec, body string }{
	{"spec.cpu.vcpus", "vcpus"}, {"spec.memory.size_mib", "memory_mib"}, {"spec.disks", "disks"}, {"spec.network", "network"},
	{"disk.", ""}, {"nic.", ""},
}

// withBodyField returns a copy of err that names the invalid field as in the request body, not as in the VM's spec.
func withBodyField(err error) error {
	f, ok := fault.From(err)
	if !ok || f.Field == "" {
		return err
	}
	for _, name := range bodyFieldNames {
		if rest, ok := strings.CutPrefix(f.Field, name.spec); ok {
			out := *f
			out.Field = name.body + rest
			out.Message = strings.Replace(f.Message, f.Field, out.Field, 1)
			return &out
		}
	}
	return err
}

// replayed sets the header Idempotency-Replayed if its second parameter is true. The response is then the stored one of
// an earlier call with the same idempotency key.
func replayed(w *rest.Response, is bool) {
	if is {
		w.Header().Set("Idempotency-Replayed", "true")
	}
}

func (s *Service) deleteVM(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "DeleteVm")
	if err != nil {
		return nil, err
	}
	again, err := s.Delete(r.Context(), t, id, false, pathHash(r))
	if err != nil {
		return nil, err
	}
	replayed(w, again)
	return rest.Deleted{ID: string(id), Deleted: true}, nil
}

// restHash returns the SHA-256 of the method, the path and the body of a call. It is stored with the idempotency key as
// the hash of the request.
func restHash(r *http.Request, body []byte) [32]byte {
	return sha256.Sum256(append([]byte(r.Method+" "+r.URL.Path+"\n"), body...))
}

// pathHash returns the SHA-256 of the method and the path. For a call without a body, it is stored with the idempotency
// key as the hash of the request.
func pathHash(r *http.Request) [32]byte { return sha256.Sum256([]byte(r.Method + " " + r.URL.Path)) }

type migrateBody struct {
	// The host to which the VM is moved.
	Destination *string `json:"destination_node_id" api:"required"`
	// The migration is undone if it has not reached its switchover after so many seconds. 0 means 150 s per GiB of memory
	// and disk, at least 300 s; at most 86400.
	TimeoutSeconds uint32 `json:"timeout_seconds"`
	// True: respond when the migration has ended.
	Wait bool `json:"wait"`
}

func (s *Service) migrateVM(w *rest.Response, r *http.Request) (any, error) {
	t, id, err := admitVM(r, "MigrateVm")
	if err != nil {
		return nil, err
	}
	var in migrateBody
	raw, err := rest.Decode(r, &in)
	if err != nil {
		return nil, err
	}
	if in.Destination == nil || strings.TrimSpace(*in.Destination) == "" {
		return nil, fault.Invalid("destination_node_id", "is required")
	}
	out, err := s.Migrate(r.Context(), t, id, cloud.NodeID(*in.Destination), in.TimeoutSeconds, in.Wait, restHash(r, raw))
	if err != nil {
		return nil, err
	}
	replayed(w, out.Replayed)
	return toREST(out.VM), nil
}
