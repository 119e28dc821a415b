package vm

import (
	"context"
	"errors"
	"maps"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/apply"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/instancetype"
	"github.com/trivet-cloud/trivet/cli/network"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/vm/lookup"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Kind describes VMs for `trivet apply`.
func Kind() *apply.Kind {
	return &apply.Kind{
		Names: []string{"vm"},
		File:  &createFile,
		New: func(s *session.Session) (*cobra.Command, apply.PlanFunc) {
			f, c := &createFlags{}, &cobra.Command{Use: "vm"}
			f.register(s, c)
			return c, func(ctx context.Context, conn *dial.Conn, run *apply.Run, name string) (*apply.Plan, error) {
				return f.plan(ctx, s, conn, run, c.Flags().Changed, name)
			}
		},
	}
}

// plan compares the VM that the flags describe with the VM of this name. given reports whether a flag is given.
func (f *createFlags) plan(
	ctx context.Context, s *session.Session, conn *dial.Conn, run *apply.Run, given func(flag string) bool, name string,
) (*apply.Plan, error) {
	matches, err := lookup.Matches(ctx, s, conn, name)
	if err != nil {
		return nil, err
	}
	if len(matches) == 0 {
		return f.planCreate(s, conn, name)
	}
	t := &target{client: vmv1.NewVmServiceClient(conn)}
	t.org, t.project = s.Tenant()
	if t.id, err = session.One("vm", s.Scope(), name, matches); err != nil {
		return nil, err
	}
	vm, err := t.read(ctx)
	if err != nil {
		return nil, err
	}
	x := &comparison{s: s, conn: conn, run: run, f: f, given: given, t: t, vm: vm}
	x.resolver = network.NewResolver(ctx, s, conn)
	return x.compare(ctx)
}

// planCreate returns the plan that creates the VM. It checks the flags, but does not look up the objects that they
// name, because an earlier document of a dry run may be the one that creates them.
func (f *createFlags) planCreate(s *session.Session, conn *dial.Conn, name string) (*apply.Plan, error) {
	if _, err := parseNICs(f.networks); err != nil {
		return nil, err
	}
	if _, _, err := f.request(name); err != nil {
		return nil, err
	}
	return &apply.Plan{Create: true, Do: func(ctx context.Context) error {
		_, err := f.create(ctx, s, conn, name)
		return err
	}}, nil
}

// comparison compares the flags of a file with a VM. The field plan and those after it hold what has to be changed.
type comparison struct {
	s        *session.Session
	conn     *dial.Conn
	run      *apply.Run
	f        *createFlags
	given    func(flag string) bool
	t        *target
	vm       *vmv1.VirtualMachine
	resolver *network.Resolver

	// typeName is the name of the instance type whose size the VM is to have, or empty.
	typeName string

	plan    apply.Plan
	to      change
	volumes []*vmv1.ResizeVolumeRequest // for disks of the VM that are volumes
	disks   []newDisk
	nics    []*vmv1.NetworkSpec
	groups  []portGroups
}

// compare returns the plan for the VM.
func (x *comparison) compare(ctx context.Context) (*apply.Plan, error) {
	for _, step := range []func(context.Context) error{x.instanceType, x.size, x.boot, x.security, x.pairs, x.allDisks, x.allNICs} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	x.plan.Do = x.do
	return &x.plan, nil
}

// do changes the VM. UpdateVm is the first call, because the control plane may refuse it, and then nothing is changed.
func (x *comparison) do(ctx context.Context) error {
	if !x.to.empty() {
		if _, err := x.to.update(ctx, x.t); err != nil {
			return err
		}
	}
	for _, v := range x.volumes {
		if _, err := vmv1.NewVolumeServiceClient(x.conn).ResizeVolume(ctx, v); err != nil {
			return err
		}
	}
	for _, d := range x.disks {
		if err := x.attach(ctx, d); err != nil {
			return err
		}
	}
	for _, n := range x.nics {
		if _, err := x.t.attachNIC(ctx, x.s, x.vm.GetName(), n); err != nil {
			return err
		}
	}
	for _, p := range x.groups {
		if err := x.resolver.SetGroups(ctx, p.port, p.groups); err != nil {
			return err
		}
	}
	return nil
}

// instanceType takes the sizes that the file does not give from the instance type that it names.
func (x *comparison) instanceType(ctx context.Context) error {
	if x.f.instanceType == "" || x.f.instanceType == x.vm.GetMetadata()[cloud.InstanceTypeKey] {
		return nil // the VM has the size of this type, also if the type was deleted or is not available any more
	}
	t, err := instancetype.Find(ctx, x.conn, x.f.instanceType)
	if err != nil {
		return err
	}
	memory, err := x.f.checkSize()
	if err != nil {
		return err
	}
	given := x.given
	if !given("vcpus") {
		x.f.vcpus = 0
	}
	if !given("memory") {
		memory = 0
	}
	x.given = func(flag string) bool { return flag == "vcpus" || flag == "memory" || given(flag) }
	x.f.vcpus, memory, x.typeName = sizeOf(t, x.f.vcpus, memory)
	x.f.memory = strconv.FormatUint(memory, 10)
	return nil
}

// size compares the processors and the memory. A pending resize counts as done, so that it is not requested again.
func (x *comparison) size(context.Context) error {
	memory, err := x.f.checkSize()
	if err != nil {
		return err
	}
	cpu, mib := nextSize(x.vm)
	when := ""
	if x.vm.GetState() != vmv1.VmState_VM_STATE_STOPPED {
		when = " at the next start or reboot"
	}
	want := &vmv1.CpuSpec{Vcpus: cpu.GetVcpus()}
	changed := false
	for _, one := range []struct {
		flag          string
		present, file uint32
		to            *uint32
	}{
		{"vcpus", cpu.GetVcpus(), x.f.vcpus, &want.Vcpus},
		{"sockets", cpu.GetSockets(), x.f.sockets, &want.Sockets},
		{"cores-per-socket", cpu.GetCoresPerSocket(), x.f.cores, &want.CoresPerSocket},
	} {
		if !x.given(one.flag) {
			continue
		}
		if *one.to = one.file; one.file != one.present {
			changed = true
			x.plan.Add("%s %d -> %d%s", one.flag, one.present, one.file, when)
		}
	}
	if changed {
		x.to.vcpus, x.to.sockets, x.to.cores = want.GetVcpus(), want.GetSockets(), want.GetCoresPerSocket()
	}
	if x.given("memory") && memory != mib {
		x.to.memoryMiB = memory
		x.plan.Add("memory %d -> %d MiB%s", mib, memory, when)
	}
	if x.given("cpu-model") && x.f.cpuModel != cpu.GetCpuModel() {
		return apply.Fixed("cpu-model", cpu.GetCpuModel(), x.f.cpuModel)
	}
	return x.fixedBool("hugepages", x.vm.GetSpec().GetMemory().GetHugepages(), x.f.hugepages)
}

// nextSize returns the processors and the memory that a VM has at its next start.
func nextSize(vm *vmv1.VirtualMachine) (cpu *vmv1.CpuSpec, memoryMiB uint64) {
	present := vm.GetSpec().GetCpu()
	cpu = &vmv1.CpuSpec{
		Vcpus: present.GetVcpus(), Sockets: present.GetSockets(), CoresPerSocket: present.GetCoresPerSocket(),
		CpuModel: present.GetCpuModel(),
	}
	memoryMiB = vm.GetSpec().GetMemory().GetSizeMib()
	for pair := range strings.SplitSeq(vm.GetMetadata()[cloud.PendingResize], ",") {
		key, value, _ := strings.Cut(pair, "=")
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil {
			continue // a value that is not a size
		}
		switch key {
		case "vcpus":
			cpu.Vcpus = uint32(n)
		case "sockets":
			cpu.Sockets = uint32(n)
		case "cores_per_socket":
			cpu.CoresPerSocket = uint32(n)
		case "memory_mib":
			memoryMiB = n
		}
	}
	return cpu, memoryMiB
}

// boot compares the kernel that the VM boots directly.
func (x *comparison) boot(ctx context.Context) error {
	have := x.vm.GetSpec().GetBoot()
	if err := x.fixedImage(ctx, "kernel", have.GetKernel(), x.f.kernel); err != nil {
		return err
	}
	if err := x.fixedImage(ctx, "initrd", have.GetInitrd(), x.f.initrd); err != nil {
		return err
	}
	if x.given("cmdline") && x.f.cmdline != have.GetCmdline() {
		return apply.Fixed("cmdline", have.GetCmdline(), x.f.cmdline)
	}
	return nil
}

// security compares secure boot and the TPM.
func (x *comparison) security(context.Context) error {
	have := x.vm.GetSpec().GetSecurity()
	if err := x.fixedBool("secure-boot", have.GetSecureBoot(), x.f.machine.secureBoot); err != nil {
		return err
	}
	return x.fixedBool("tpm", have.GetTpm(), x.f.machine.tpm)
}

// fixedBool returns an error if a flag is given and has another value than the VM.
func (x *comparison) fixedBool(flag string, present, file bool) error {
	if !x.given(flag) || present == file {
		return nil
	}
	return apply.Fixed(flag, strconv.FormatBool(present), strconv.FormatBool(file))
}

// fixedImage returns an error if an image is given, by name or ID, and is not the one with the ID present.
func (x *comparison) fixedImage(ctx context.Context, what, present, file string) error {
	if file == "" {
		return nil
	}
	id, err := x.findImage(ctx, present, file)
	if err != nil || id == present {
		return err
	}
	return apply.Fixed(what, image.NameOf(ctx, x.s, x.conn)(present), file)
}

// findImage returns the ID of the image that a file names. The parameter present is the ID of the VM's image. If
// neither the named image nor the image present exists, findImage returns present, so that the file stays valid when
// the image is deleted: an existing VM does not need its image.
func (x *comparison) findImage(ctx context.Context, present, file string) (string, error) {
	id, err := image.Find(ctx, x.s, x.conn, file)
	var problem *session.Problem
	if present == "" || !errors.As(err, &problem) || problem.Code != codes.NotFound {
		return id, err
	}
	_, readErr := vmv1.NewImageServiceClient(x.conn).GetImage(ctx, &vmv1.GetImageRequest{OrgId: x.t.org, ImageId: present})
	if status.Code(readErr) != codes.NotFound {
		return "", err
	}
	return present, nil
}

// pairs compares the labels and the metadata. The keys and the user data for the guest are not compared, because no
// call returns them.
func (x *comparison) pairs(ctx context.Context) error {
	labels, metadata, err := x.f.pairs()
	if err != nil {
		return err
	}
	maps.DeleteFunc(metadata, func(key, _ string) bool { return key == sshKeysMetadata || key == userDataMetadata })
	if x.f.machine.cdrom != "" {
		if metadata[cloud.CDROMKey], err = x.findImage(ctx, x.vm.GetMetadata()[cloud.CDROMKey], x.f.machine.cdrom); err != nil {
			return err
		}
	}
	if x.typeName != "" {
		metadata[cloud.InstanceTypeKey] = x.typeName
	}
	for _, g := range groupFlags {
		if present := x.vm.GetLabels()[g.label]; labels[g.label] != "" && labels[g.label] != present {
			return apply.Fixed(g.name, present, labels[g.label])
		}
	}
	host, err := x.f.policy.findHost(ctx, x.conn)
	if err != nil {
		return err
	}
	if host != nil {
		selector, err := withHost(x.vm.GetLabels()[cloud.NodeSelectorLabel], host.GetName())
		if err != nil {
			return err
		}
		labels = cloud.Merge(labels, map[string]string{cloud.NodeSelectorLabel: selector})
	}
	x.to.labels = x.plan.Pairs("label", labels, x.vm.GetLabels(), true)
	x.to.metadata = x.plan.Pairs("metadata", metadata, x.vm.GetMetadata(), false)
	return nil
}
