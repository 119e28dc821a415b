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
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/volume"
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
	labels, metadata        []string
	sshKeys                 []string
	userData                string
	kernel, initrd, cmdline string
	start, noWait           bool
	machine                 machineFlags

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
with --start, until the VM runs; if it is interrupted, the VM is created all the same.

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
  trivet vm create installer --disk 40 --cdrom debian-iso --firmware uefi --start
  trivet vm create pc --disk 60 --cdrom windows-iso --os-type windows --secure-boot --tpm --memory 4G
  trivet vm create tiny --kernel guest-kernel --initrd guest-initrd --cmdline "console=ttyS0" --memory 192`,
		Args: session.AtMost("NAME"),
	}
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
	p.StringArrayVar(&f.labels, "label", nil, "KEY=VALUE, repeatable")
	p.StringArrayVar(&f.metadata, "metadata", nil, "KEY=VALUE, repeatable")
	p.StringArrayVar(&f.sshKeys, "ssh-key", nil, "file with public keys for the guest's default user, repeatable")
	p.StringVar(&f.userData, "user-data", "", "file with a script or cloud-config for cloud-init in the guest, at most 64 KiB")
	p.StringVar(&f.kernel, "kernel", "", "boot this kernel directly: an image, by name or ID")
	p.StringVar(&f.initrd, "initrd", "", "initial RAM disk for --kernel: an image, by name or ID")
	p.StringVar(&f.cmdline, "cmdline", "", "kernel command line for --kernel")
	f.machine.register(p)
	p.BoolVar(&f.start, "start", false, "start the VM, and wait until it runs")
	p.BoolVar(&f.noWait, "no-wait", false, "return when the VM is recorded, before its disks are complete")
	session.Exclusive(c, "start", "no-wait")
	for _, flag := range []string{"image", "kernel", "initrd", "cdrom"} {
		_ = c.RegisterFlagCompletionFunc(flag, image.Names(s)) // its only error is for an unknown flag
	}
	_ = c.RegisterFlagCompletionFunc("type", instancetype.Names(s)) // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("volume", volume.Names(s))     // its only error is for an unknown flag
	_ = c.RegisterFlagCompletionFunc("network", networkValues(s))   // its only error is for an unknown flag
	run := s.Run(createLimit, func(ctx context.Context, conn *dial.Conn, args []string) (err error) {
		nics, err := parseNICs(f.networks)
		if err != nil {
			return err
		}
		req, disks, err := f.request(args[0])
		if err != nil {
			return err
		}
		if err := f.applyType(ctx, conn, p.Changed, req); err != nil {
			return err
		}
		req.OrgId, req.ProjectId = s.Tenant()
		made, created := &newVolumes{s: s}, false
		defer func() {
			if !created {
				made.deleteAll(ctx)
			}
		}()
		if err := f.findImages(ctx, s, conn, req, disks, made); err != nil {
			return err
		}
		resolver := network.NewResolver(ctx, s, conn)
		for _, n := range nics {
			spec, err := n.spec(ctx, resolver)
			if err != nil {
				return err
			}
			req.Spec.Network = append(req.Spec.Network, spec)
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
			return err
		}
		created = true
		t := &target{client: client, org: req.GetOrgId(), project: req.GetProjectId(), id: vm.GetId()}
		if vm, err = f.settle(ctx, s, conn, t, vm); err != nil {
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
	memory, ok := session.Amount(f.memory, session.MiB)
	if !ok {
		return nil, nil, session.Usagef("--memory %q: want a number of MiB, or one with a unit: 2G", f.memory)
	}
	disks := make([]disk, len(f.disks))
	for n, text := range f.disks {
		d, err := parseDisk(n, text)
		if err != nil {
			return nil, nil, err
		}
		disks[n] = d
	}
	switch {
	case f.image != "" && len(disks) == 0:
		disks = []disk{{id: "disk0", image: f.image}} // findImages sets its size, which depends on the image
	case f.image != "" && disks[0].image != "":
		return nil, nil, session.Usagef("the first disk has two images: %s and %s", f.image, disks[0].image)
	case f.image != "":
		disks[0].image = f.image
	case len(disks) == 0 && len(f.volumes) == 0 && f.kernel == "" && f.machine.cdrom == "":
		return nil, nil, session.Usagef("the VM has nothing to boot: give --image, --disk, --volume, --cdrom or --kernel")
	}
	for _, text := range f.volumes {
		d, err := parseVolume(len(disks), text)
		if err != nil {
			return nil, nil, err
		}
		disks = append(disks, d)
	}
	slices.SortStableFunc(disks, func(a, b disk) int {
		switch {
		case a.first == b.first:
			return 0
		case a.first:
			return -1
		}
		return 1
	})
	if f.kernel == "" && (f.initrd != "" || f.cmdline != "") {
		return nil, nil, session.Usagef("--initrd and --cmdline need a --kernel")
	}
	labels, err := session.Pairs("label", f.labels)
	if err != nil {
		return nil, nil, err
	}
	metadata, err := session.Pairs("metadata", f.metadata)
	if err != nil {
		return nil, nil, err
	}
	if len(f.sshKeys) > 0 || f.userData != "" {
		if metadata == nil {
			metadata = map[string]string{}
		}
		if err := f.addSeed(metadata); err != nil {
			return nil, nil, err
		}
	}
	if metadata, err = f.machine.addTo(metadata); err != nil {
		return nil, nil, err
	}
	if f.vcpus == 0 {
		return nil, nil, session.Usagef("--vcpus: want 1 or more")
	}
	if memory == 0 {
		return nil, nil, session.Usagef("--memory: want more than 0")
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
		cpu.Vcpus = t.GetVcpus()
	}
	if !given("memory") {
		memory.SizeMib = t.GetMemoryMib()
	}
	f.rootDiskGiB = t.GetRootDiskGib()
	if cpu.GetVcpus() == t.GetVcpus() && memory.GetSizeMib() == t.GetMemoryMib() {
		req.Metadata[cloud.InstanceTypeKey] = t.GetName()
	}
	return nil
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
			i, err := vmv1.NewImageServiceClient(conn).GetImage(ctx, &vmv1.GetImageRequest{OrgId: req.GetOrgId(), ImageId: id})
			if err != nil {
				return err
			}
			d.sizeGiB = max(cmp.Or(f.rootDiskGiB, cloud.DefaultDiskGiB), uint64(i.GetMinDiskGib()))
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
