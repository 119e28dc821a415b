package vm

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/image"
	"github.com/trivet-cloud/trivet/cli/instancetype"
	"github.com/trivet-cloud/trivet/cli/network"
	"github.com/trivet-cloud/trivet/cli/node"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/volume"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

type createFlags struct {
	file                    string
	instanceType            string
	image                   string
	vcpus, sockets, cores   uint32
	cpuModel                string
	hugepages               bool
	memory                  string
	disks, volumes          []string
	networks                []string
	sshKeys                 []string
	userData                string
	kernel, initrd, cmdline string
	start                   bool
	wait                    session.Waiting
	machine                 machineFlags
	policy                  policyFlags

	// rootDiskGiB is the size of the disk that the VM gets with --image and without --disk. It is 0 unless the instance
	// type has such a size.
	rootDiskGiB uint64
}

func createCommand(s *session.Session) *cobra.Command {
	var f createFlags
	c := &cobra.Command{
		Use:   "create NAME | -f FILE [NAME]",
		Short: "Create a VM",
		Long: `Create a VM. Its first disk is a copy of --image; disks without an image are blank. With --image and without --disk,
the VM gets one disk of 10 GiB, or more if the image requires it. The command waits until the disks are complete and,
with --start, until the VM runs; if it is interrupted, the VM is created all the same. With --start and --no-wait, the VM
starts when its disks are complete.

With --type, the VM gets the processors and the memory of an instance type ("trivet instance-type list"), unless --vcpus
and --memory are given. If the type has a size for the disk, the disk that the VM gets without --disk has this size in
place of 10 GiB. The VM keeps its size when the type is updated or deleted.

A --disk is
  ` + diskForm + `,
with the size in GiB. The disk is deleted with the VM. With a class, the disk is a new volume of this storage class. The
volume gets the name VM-DISK, made of the name of the VM and the ID of the disk, and is not deleted with the VM.

A --volume is an existing volume:
  ` + volumeForm + `.
With boot, the VM boots from this volume before all other disks with the same boot index.

A --network is a network interface (NIC):
  ` + nicForm + `
or, instead of SUBNET:
  default    the project's default VPC, which is created if the project has none
  vpc:NAME   a VPC with one subnet
  port:NAME  an existing port, which has its own address, MAC and groups
Without --network, the VM has a NIC in the default VPC. With --network none it has no NIC, and so can be placed on a
host without networks.

With --restart-policy on-failure, the VM is started again if its process dies. With --ha restart, the VM is also started
on another host if its host is lost, provided that all its disks are volumes that several hosts can use, and that it has
neither UEFI firmware nor a TPM.

With --host, the VM is placed on this host only, and so cannot be moved to another one. --affinity, --anti-affinity, their
-soft forms and --spread-group take the name of a group of VMs of the project. You choose the name. The same name for two
flags means two groups. If no host satisfies --host, --affinity and --anti-affinity, the VM is not created. These flags write metadata and labels whose names
begin with "trivet/"; "trivet vm update" changes them, except the groups.

With --file, the flags are read from a YAML file, whose keys are the names of the flags and "name". Flags on the command
line override it; a repeatable flag overrides all its values in the file. Values of --disk, --volume and --network can be
mappings, and labels and metadata are mappings:
  name: web
  image: debian
  memory: 2G
  disks: [20, {size: 100, class: fast, cache: none}]
  networks: [{subnet: back, ip: 10.0.2.10, group: [db, ssh]}, default]
  labels: {env: prod}`,
		Example: `  trivet vm create web --image debian --vcpus 2 --memory 2048 --disk 20 --disk 100,cache=none --label env=prod --start
  trivet vm create small --image debian --type small --start
  trivet vm create shell --image debian --ssh-key ~/.ssh/id_ed25519.pub --user-data setup.sh --start
  trivet vm create db --image debian --network back,ip=10.0.2.10,group=db --network default
  trivet vm create pet --volume root,boot --volume data --start
  trivet vm create store --image debian --disk 20 --disk size=500,class=fast
  trivet vm create -f vm.yaml --memory 4G --start
  trivet vm create db --volume db-root,boot --ha restart --ha-priority 80 --anti-affinity db
  trivet vm create cache --image debian --host host-2 --restart-policy on-failure --start
  trivet vm create installer --disk 40 --cdrom debian-iso --firmware uefi --start
  trivet vm create pc --disk 60 --cdrom windows-iso --os-type windows --secure-boot --tpm --memory 4G
  trivet vm create tiny --kernel guest-kernel --initrd guest-initrd --cmdline "console=ttyS0" --memory 192`,
		Args: session.AtMost("NAME"),
	}
	f.register(s, c)
	run := s.Run(createLimit, func(ctx context.Context, conn *dial.Conn, args []string) error {
		vm, err := f.create(ctx, s, conn, args[0])
		if err != nil {
			return err
		}
		return printVM(ctx, s, conn, vm)
	})
	c.RunE = func(c *cobra.Command, args []string) error {
		if f.file != "" {
			name, err := applyFile(s, c, f.file)
			if err != nil {
				return err
			}
			if len(args) == 0 && name != "" {
				args = []string{name}
			}
		}
		if err := session.Exactly("NAME")(c, args); err != nil {
			return session.Usagef("%v", err)
		}
		return run(c, args)
	}
	return c
}

// register adds the flags to c.
func (f *createFlags) register(s *session.Session, c *cobra.Command) {
	p := c.Flags()
	p.StringVarP(&f.file, "file", "f", "", "read the flags from this YAML file; - for standard input")
	p.StringVar(&f.image, "image", "", "image of the first disk, by name or ID")
	p.StringVar(&f.instanceType, "type", "", "instance type, for the sizes that are not given: see above")
	p.Uint32Var(&f.vcpus, "vcpus", 1, "virtual CPUs")
	p.Uint32Var(&f.sockets, "sockets", 0, "processor sockets that the guest sees (default 1)")
	p.Uint32Var(&f.cores, "cores-per-socket", 0, "cores of each socket (default all)")
	p.StringVar(&f.cpuModel, "cpu-model", "", "processor model that the guest sees, one that hosts offer")
	p.BoolVar(&f.hugepages, "hugepages", false, "use huge pages of the host for the memory")
	p.StringVar(&f.memory, "memory", fmt.Sprint(cloud.DefaultMemory), "memory in MiB, or with a unit: 2G")
	p.StringArrayVar(&f.disks, "disk", nil, "disk, repeatable: see above")
	p.StringArrayVar(&f.volumes, "volume", nil, "existing volume, repeatable: see above")
	p.StringArrayVar(&f.networks, "network", nil, "network interface, repeatable: see above")
	p.StringArrayVar(&f.policy.labels, "label", nil, "KEY=VALUE, repeatable")
	p.StringArrayVar(&f.policy.metadata, "metadata", nil, "KEY=VALUE, repeatable")
	p.StringArrayVar(&f.sshKeys, "ssh-key", nil, "file with public keys for the guest's default user, repeatable")
	p.StringVar(&f.userData, "user-data", "", "file with a script or cloud-config for cloud-init in the guest, at most 64 KiB")
	p.StringVar(&f.kernel, "kernel", "", "boot this kernel directly: an image, by name or ID")
	p.StringVar(&f.initrd, "initrd", "", "initial RAM disk for --kernel: an image, by name or ID")
	p.StringVar(&f.cmdline, "cmdline", "", "kernel command line for --kernel")
	f.machine.register(p)
	f.policy.register(p)
	f.policy.registerGroups(p)
	p.BoolVar(&f.start, "start", false, "start the VM")
	f.wait.Add(c, true)
	for _, flag := range []string{"image", "kernel", "initrd", "cdrom"} {
		_ = c.RegisterFlagCompletionFunc(flag, image.Names(s)) // its only error is for an unknown flag
	}
	_ = c.RegisterFlagCompletionFunc("type", instancetype.Names(s)) // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("host", node.Names(s))         // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("volume", volume.Names(s))     // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("network", networkValues(s))   // its only error is for an unknown flag
}

// create creates the VM that the flags describe, and waits for it as settle does.
func (f *createFlags) create(ctx context.Context, s *session.Session, conn *dial.Conn, name string) (*vmv1.VirtualMachine, error) {
	nics, err := parseNICs(f.networks)
	if err != nil {
		return nil, err
	}
	req, disks, err := f.request(name)
	if err != nil {
		return nil, err
	}
	if err := f.applyType(ctx, conn, f.policy.changed, req); err != nil {
		return nil, err
	}
	req.OrgId, req.ProjectId = s.Tenant()
	if err := f.policy.addHost(ctx, s, conn, req); err != nil {
		return nil, err
	}
	made, created := &newVolumes{s: s}, false
	defer func() {
		if !created {
			made.deleteAll(ctx)
		}
	}()
	if err := f.findImages(ctx, s, conn, req, disks, made); err != nil {
		return nil, err
	}
	resolver := network.NewResolver(ctx, s, conn)
	for _, n := range nics {
		spec, err := n.spec(ctx, resolver)
		if err != nil {
			return nil, err
		}
		req.Spec.Network = append(req.Spec.Network, spec)
	}
	if f.start && !bootable(req) {
		s.Note("no disk has an image: the VM has nothing to boot")
	}
	client := vmv1.NewVmServiceClient(conn)
	var vm *vmv1.VirtualMachine
	goesOn := session.Ongoing{What: req.GetName() + " may still be created", Look: "trivet vm show " + req.GetName()}
	if err := s.WaitOngoing("creating "+req.GetName(), goesOn, func(func(string)) error {
		vm, err = client.CreateVm(ctx, req)
		return err
	}); err != nil {
		if len(f.networks) == 0 && hasReason(err, "NO_HOST_FITS") {
			s.Note("without --network, the VM has a NIC in the default VPC; with --network none it has none")
		}
		return nil, err
	}
	created = true
	t := &target{client: client, org: req.GetOrgId(), project: req.GetProjectId(), id: vm.GetId()}
	return f.settle(ctx, s, conn, t, vm)
}

// bootable reports whether a new VM has something to boot: a disk with an image, a volume, a CD-ROM, a rescue image or a
// kernel.
func bootable(req *vmv1.CreateVmRequest) bool {
	metadata := req.GetMetadata()
	return req.GetSpec().GetBoot().GetKernel() != "" || metadata[cloud.CDROMKey] != "" || metadata[cloud.RescueKey] != "" ||
		slices.ContainsFunc(req.GetSpec().GetDisks(), func(d *vmv1.DiskSpec) bool {
			return d.GetSource().GetImageId() != "" || d.GetSource().GetVolumeId() != ""
		})
}

// hasReason reports whether err is an error of the API whose ErrorInfo has the given reason.
func hasReason(err error, reason string) bool {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() == reason {
			return true
		}
	}
	return false
}

// networkValues returns a shell completion for --network: the names of subnets, and the words default and none.
func networkValues(s *session.Session) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, prefix string) ([]string, cobra.ShellCompDirective) {
		values, _ := network.SubnetNames(s)(cmd, args, prefix)
		for _, word := range []string{defaultVPC, noNetwork} {
			if strings.HasPrefix(word, prefix) && !slices.Contains(values, word) {
				values = append(values, word)
			}
		}
		return values, cobra.ShellCompDirectiveNoFileComp
	}
}

// request returns a request with the values of all flags except the disks, NICs and boot images. It returns the disks
// separately, as they were parsed. findImages adds the disks and boot images to the request, because it makes calls to
// find out the IDs of their images.
func (f *createFlags) request(name string) (*vmv1.CreateVmRequest, []disk, error) {
	if err := cloud.CheckName("NAME", name); err != nil {
		return nil, nil, session.Usagef("%v", err)
	}
	memory, err := f.checkSize()
	if err != nil {
		return nil, nil, err
	}
	disks, err := f.parseDisks()
	if err != nil {
		return nil, nil, err
	}
	if len(disks) == 0 && f.kernel == "" && f.machine.cdrom == "" {
		return nil, nil, session.Usagef("the VM has nothing to boot: give --image, --disk, --volume, --cdrom or --kernel")
	}
	if f.kernel == "" && (f.initrd != "" || f.cmdline != "") {
		return nil, nil, session.Usagef("--initrd and --cmdline need a --kernel")
	}
	labels, metadata, err := f.pairs()
	if err != nil {
		return nil, nil, err
	}
	if err := f.addSeed(metadata); err != nil {
		return nil, nil, err
	}
	return &vmv1.CreateVmRequest{
		Name: name, Hypervisor: vmv1.HypervisorType_HYPERVISOR_TYPE_KVM, Labels: labels, Metadata: metadata,
		Spec: &vmv1.VmSpec{
			Cpu:      &vmv1.CpuSpec{Vcpus: f.vcpus, Sockets: f.sockets, CoresPerSocket: f.cores, CpuModel: f.cpuModel},
			Memory:   &vmv1.MemorySpec{SizeMib: memory, Hugepages: f.hugepages},
			Security: f.machine.security(),
		},
	}, disks, nil
}

// checkSize returns the size of the memory in MiB. It returns a *session.Usage error if the number of processors or the
// memory is invalid.
func (f *createFlags) checkSize() (memoryMiB uint64, err error) {
	memoryMiB, ok := session.Amount(f.memory, session.MiB)
	switch {
	case !ok:
		return 0, session.Usagef("--memory %q: want a number of MiB, or one with a unit: 2G", f.memory)
	case f.vcpus == 0:
		return 0, session.Usagef("--vcpus: want 1 or more")
	case memoryMiB == 0:
		return 0, session.Usagef("--memory: want more than 0")
	}
	return memoryMiB, nil
}

// pairs returns the labels and the metadata of the flags, without the keys and the user data for the guest.
func (f *createFlags) pairs() (labels, metadata map[string]string, err error) {
	if labels, err = f.policy.labelPairs(); err != nil {
		return nil, nil, err
	}
	if metadata, err = f.policy.metadataPairs(); err != nil {
		return nil, nil, err
	}
	metadata, err = f.machine.addTo(metadata)
	return labels, metadata, err
}

// applyType sets the sizes of the VM that the flags do not give to those of the instance type. given reports whether a
// flag is given. If the VM then has the processors and the memory of the type, applyType adds the metadata that names
// the type.
func (f *createFlags) applyType(ctx context.Context, conn *dial.Conn, given func(flag string) bool, req *vmv1.CreateVmRequest) error {
	switch {
	case f.instanceType == "" && given("type"):
		return errNoTypeName()
	case f.instanceType == "":
		return nil
	}
	t, err := instancetype.Find(ctx, conn, f.instanceType)
	if err != nil {
		return err
	}
	cpu, memory := req.GetSpec().GetCpu(), req.GetSpec().GetMemory()
	if !given("vcpus") {
		cpu.Vcpus = 0
	}
	if !given("memory") {
		memory.SizeMib = 0
	}
	f.rootDiskGiB = t.GetRootDiskGib()
	var typeName string
	if cpu.Vcpus, memory.SizeMib, typeName = sizeOf(t, cpu.GetVcpus(), memory.GetSizeMib()); typeName != "" {
		req.Metadata[cloud.InstanceTypeKey] = typeName
	}
	return nil
}

// sizeOf returns the size of a VM with an instance type and the sizes that the user gives; 0 means that a size is not
// given. typeName is the name of the type if the VM has the processors and the memory of the type, and empty otherwise.
func sizeOf(t *operatorv1.InstanceType, givenVCPUs uint32, givenMiB uint64) (vcpus uint32, memoryMiB uint64, typeName string) {
	vcpus, memoryMiB = cmp.Or(givenVCPUs, t.GetVcpus()), cmp.Or(givenMiB, t.GetMemoryMib())
	if vcpus == t.GetVcpus() && memoryMiB == t.GetMemoryMib() {
		typeName = t.GetName()
	}
	return vcpus, memoryMiB, typeName
}

// findImages looks up the images and volumes that the flags name. It creates a volume for each disk with a storage
// class, and records these volumes in made. It adds the disks and the boot images to the request.
func (f *createFlags) findImages(ctx context.Context, s *session.Session, conn *dial.Conn, req *vmv1.CreateVmRequest, disks []disk, made *newVolumes) error {
	found := map[string]string{}
	find := func(nameOrID string) (string, error) {
		if id, ok := found[nameOrID]; ok || nameOrID == "" {
			return id, nil
		}
		id, err := image.Find(ctx, s, conn, nameOrID)
		found[nameOrID] = id
		return id, err
	}
	for _, d := range disks {
		id, err := find(d.image)
		if err != nil {
			return err
		}
		if len(f.disks) == 0 && d.volume == "" {
			if d.sizeGiB, err = defaultSize(ctx, conn, req.GetOrgId(), id, f.rootDiskGiB); err != nil {
				return err
			}
		}
		volumeID, err := made.volumeOf(ctx, conn, req.GetName(), d, id)
		if err != nil {
			return err
		}
		req.Spec.Disks = append(req.Spec.Disks, d.spec(id, volumeID))
	}
	if f.machine.cdrom != "" {
		id, err := find(f.machine.cdrom)
		if err != nil {
			return err
		}
		req.Metadata[cloud.CDROMKey] = id
	}
	if f.kernel == "" {
		return nil
	}
	kernel, err := find(f.kernel)
	if err != nil {
		return err
	}
	initrd, err := find(f.initrd)
	if err != nil {
		return err
	}
	req.Spec.Boot = &vmv1.BootSpec{Kernel: kernel, Initrd: initrd, Cmdline: f.cmdline}
	return nil
}

// defaultSize returns the size in GiB of a disk that is a copy of an image, unless the user gives one. typeGiB is the size
// of the instance type, or 0.
func defaultSize(ctx context.Context, conn *dial.Conn, org, image string, typeGiB uint64) (uint64, error) {
	i, err := vmv1.NewImageServiceClient(conn).GetImage(ctx, &vmv1.GetImageRequest{OrgId: org, ImageId: image})
	return max(cmp.Or(typeGiB, cloud.DefaultDiskGiB), uint64(i.GetMinDiskGib())), err
}
