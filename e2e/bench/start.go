package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// memoryMiB is the memory of each guest of this benchmark.
const memoryMiB = 192

// start measures how long one guest takes to start: through the API, as a QEMU process started by hand, and with
// libvirt, each with a direct kernel boot and with a BIOS boot.
func start(ctx context.Context, b *bench) (err error) {
	c, err := newCloud(ctx, b, "start")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.StartAgent(ctx); err != nil {
		return err
	}
	images, err := lab.ImportGuest(ctx, c.Trio, c.Admin, b.guest)
	if err != nil {
		return err
	}
	cmdline, err := onehost.Cmdline(b.guest)
	if err != nil {
		return err
	}
	dir := filepath.Join(b.dir, "libvirt-start")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	l, err := libvirt.Start(ctx, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	rest, err := c.Tenant(ctx, 1, "default")
	if err != nil {
		return err
	}
	root := &vmv1.DiskSpec{Id: "root", SizeGib: 1, Bus: vmv1.DiskBus_DISK_BUS_VIRTIO, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_ImageId{ImageId: images.Disk}}}
	memory := &vmv1.MemorySpec{SizeMib: memoryMiB}
	for _, k := range []struct {
		name   string
		spec   *vmv1.VmSpec
		rounds int
	}{
		{"direct kernel boot", &vmv1.VmSpec{Memory: memory, Disks: []*vmv1.DiskSpec{root},
			Boot: &vmv1.BootSpec{Kernel: images.Kernel, Initrd: images.Initrd, Cmdline: cmdline}}, b.rounds},
		{"BIOS, from disk", &vmv1.VmSpec{Memory: memory, Disks: []*vmv1.DiskSpec{root}}, (b.rounds + 1) / 2},
	} {
		s := &starter{c: c, rest: rest, libvirt: l, guest: b.guest, dir: dir}
		if err := s.prepare(ctx, k.spec); err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
		if err := s.measure(ctx, b, k.name, k.rounds); err != nil {
			return fmt.Errorf("%s: %w", k.name, err)
		}
	}
	return nil
}

// starter starts the same guest in three ways: through the API, as a QEMU process, and with libvirt.
type starter struct {
	c       *trivet
	libvirt *libvirt.Daemon
	guest   string
	dir     string

	vm     string
	rest   *lab.REST
	byHand onehost.ByHand
	direct bool
	domain libvirt.Domain
	xml    string
}

// prepare creates the VM, copies its disk for the two other ways of starting it before the guest writes to that disk,
// and reads the arguments with which the agent starts QEMU.
func (s *starter) prepare(ctx context.Context, spec *vmv1.VmSpec) error {
	s.direct = spec.GetBoot() != nil
	vm, err := s.c.Admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{Name: fmt.Sprintf("start-%t", s.direct), OrgId: onehost.Org, ProjectId: "default", Spec: spec})
	if err != nil {
		return err
	}
	s.vm = vm.GetId()
	if err := s.c.AwaitState(ctx, s.vm, vmv1.VmState_VM_STATE_STOPPED); err != nil {
		return err
	}
	for _, name := range []string{"hand", "libvirt"} {
		if err := exec.CommandContext(ctx, "cp", "--sparse=always", filepath.Join(s.c.VMDir(s.vm), "disks", "root.qcow2"), s.disk(name)).Run(); err != nil {
			return fmt.Errorf("copy disk: %w", err)
		}
	}
	if _, err := s.ours(ctx); err != nil {
		return err
	}
	r, err := s.c.Record(s.vm)
	if err != nil {
		return err
	}
	s.byHand = onehost.ByHand{
		Argv: onehost.Arguments(r.Argv, s.guest, spec.GetBoot().GetCmdline()), Dir: s.dir,
		Disks: []onehost.DiskFile{{Path: s.disk("hand")}, {Path: s.file("disk.qcow2"), ReadOnly: true}},
	}
	s.domain = libvirt.Domain{
		Name: fmt.Sprintf("trivet-bench-%t", s.direct), UUID: s.vm, Machine: r.Spec.Machine, CPUMaximum: true, VCPUs: 1, MemoryMiB: memoryMiB,
		Disk: s.disk("libvirt"), Base: s.file("disk.qcow2"), Serial: filepath.Join(s.dir, "libvirt.serial"), Ports: 5, TBSizeMiB: 256,
	}
	if s.direct {
		s.domain.Kernel, s.domain.Initrd, s.domain.Cmdline = s.file("vmlinuz"), s.file("initrd.lz4"), spec.GetBoot().GetCmdline()
	}
	s.xml, err = s.domain.Write(s.dir)
	return err
}

func (s *starter) disk(name string) string {
	return filepath.Join(s.dir, fmt.Sprintf("%s-%t.qcow2", name, s.direct))
}

func (s *starter) file(name string) string { return filepath.Join(s.guest, name) }

// took holds the measurements of one start: the time from the request to its response (0 for QEMU started by hand), the
// time from the request to the guest's banner, and the CPU time that QEMU had used when the banner was seen.
type took struct{ answer, banner, cpu time.Duration }

// cpuTime returns the CPU time that a process has used, or 0 if there is no such process.
func cpuTime(pid int) time.Duration { return time.Duration(cpuOf(pid) * float64(time.Second)) }

// ours starts the VM through the API, measures the start, and forces the VM off after its banner was read.
func (s *starter) ours(ctx context.Context) (took, error) {
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	log := s.c.Serial(s.vm)
	offset := onehost.Size(log)
	answered := make(chan error, 1)
	var answer time.Time
	began := time.Now()
	go func() {
		err := s.rest.Call(ctx, "POST", "/api/v1/vms/"+s.vm+"/start", nil, nil)
		answer = time.Now()
		answered <- err
	}()
	at, err := onehost.AwaitBanner(ctx, log, offset)
	if err = errors.Join(err, <-answered); err != nil {
		return took{}, err
	}
	r, err := s.c.Record(s.vm)
	if err != nil {
		return took{}, err
	}
	t := took{answer.Sub(began), at.Sub(began), cpuTime(r.PID)}
	_, err = s.c.Admin.VMs.StopVm(ctx, &vmv1.StopVmRequest{OrgId: onehost.Org, ProjectId: "default", VmId: s.vm, Force: true})
	return t, err
}

// hand starts QEMU directly, with the agent's arguments and descriptors. It measures the start and kills QEMU.
func (s *starter) hand(ctx context.Context) (t took, err error) {
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	began := time.Now()
	cmd, err := s.byHand.Start(ctx)
	if err != nil {
		return t, err
	}
	at, err := onehost.AwaitBanner(ctx, s.byHand.Log(), 0)
	t.cpu = cpuTime(cmd.Process.Pid)
	end(cmd)
	t.banner = at.Sub(began)
	return t, err
}

// virsh starts the guest with `virsh create`, measures the start, and destroys the domain.
func (s *starter) virsh(ctx context.Context) (t took, err error) {
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	if err := os.Remove(s.domain.Serial); err != nil && !errors.Is(err, os.ErrNotExist) {
		return t, err
	}
	began := time.Now()
	if err := s.libvirt.Create(ctx, s.xml); err != nil {
		return t, err
	}
	t.answer = time.Since(began)
	at, err := onehost.AwaitBanner(ctx, s.domain.Serial, 0)
	t.banner, t.cpu = at.Sub(began), cpuTime(s.libvirt.PID(s.domain.Name))
	return t, errors.Join(err, s.libvirt.Destroy(context.WithoutCancel(ctx), s.domain.Name))
}

// measure starts the guest in all three ways in each round, in rotating order, and adds rows with the results. A first
// round, for warm-up, is not counted.
func (s *starter) measure(ctx context.Context, b *bench, name string, rounds int) error {
	ways := []func(context.Context) (took, error){s.ours, s.hand, s.virsh}
	var banners, answers, cpu [3][]time.Duration
	for round := -1; round < rounds; round++ {
		for i := range ways {
			way := (i + round + len(ways)) % len(ways)
			if err := b.Calm.Await(ctx); err != nil {
				return err
			}
			t, err := ways[way](ctx)
			if err != nil {
				return err
			}
			if round >= 0 {
				banners[way] = append(banners[way], t.banner)
				answers[way] = append(answers[way], t.answer)
				cpu[way] = append(cpu[way], t.cpu)
			}
		}
	}
	const ours, hand, virsh = 0, 1, 2
	b.compare("start to banner, "+name+", against the same arguments by hand", banners[ours], banners[hand], 1.15)
	b.compare("start to banner, "+name+", against `virsh create`", banners[ours], banners[virsh], 1.10)
	b.compare("start to RUNNING answered, "+name+", against `virsh create`", answers[ours], answers[virsh], 0)
	b.compare("QEMU's CPU to the banner, "+name+", against the same arguments by hand", cpu[ours], cpu[hand], 0)
	b.compare("QEMU's CPU to the banner, "+name+", against `virsh create`", cpu[ours], cpu[virsh], 0)
	return nil
}

// compare adds a row with the medians of two series of equal length and the ratio ours/peer. atMost is the target for
// that ratio; 0 means no target.
func (b *bench) compare(what string, ours, peer []time.Duration, atMost float64) {
	b.row(figure.Row{
		What: what, Ours: ms(figure.Median(ours)), Peer: ms(figure.Median(peer)), Value: figure.Median(ours).Seconds() / figure.Median(peer).Seconds(),
		AtMost: atMost, Unit: "×",
		Note: fmt.Sprintf("%d rounds; fastest %s and %s, slowest %s and %s", len(ours), ms(slices.Min(ours)), ms(slices.Min(peer)),
			ms(slices.Max(ours)), ms(slices.Max(peer))),
	})
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }
