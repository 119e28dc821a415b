package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

// cmdline returns the kernel command line of the small guest, from its file manifest.json.
func (b *bench) cmdline() (string, error) {
	text, err := os.ReadFile(filepath.Join(b.guest, "manifest.json"))
	if err != nil {
		return "", err
	}
	var m struct{ Cmdline string }
	if err := json.Unmarshal(text, &m); err != nil {
		return "", fmt.Errorf("read the guest's manifest: %w", err)
	}
	if m.Cmdline == "" {
		return "", errors.New("the guest's manifest has no command line")
	}
	return m.Cmdline, nil
}

// memoryMiB is the memory of each guest of this benchmark.
const memoryMiB = 192

// start measures how long one guest takes to start: through the API, as a QEMU process started by hand, and with
// libvirt, each with a direct kernel boot and with a BIOS boot.
func start(ctx context.Context, b *bench) (err error) {
	c, err := newCloud(ctx, b, "start")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	if err := c.startAgent(ctx); err != nil {
		return err
	}
	images, err := lab.ImportGuest(ctx, c.trio, c.admin, b.guest)
	if err != nil {
		return err
	}
	cmdline, err := b.cmdline()
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
	rest, err := c.tenant(ctx, 1, "default")
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
	argv   []string
	direct bool
	domain libvirt.Domain
	xml    string
}

// record holds the fields that the benchmark reads of record.json, the file in which an agent describes the last start
// of a VM.
type record struct {
	Spec struct{ Machine string }
	Argv []string
	PID  int
}

func (c *trivet) record(id string) (r record, err error) {
	text, err := os.ReadFile(filepath.Join(c.vmDir(id), "record.json"))
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(text, &r)
}

// prepare creates the VM, copies its disk for the two other ways of starting it before the guest writes to that disk,
// and reads the arguments with which the agent starts QEMU.
func (s *starter) prepare(ctx context.Context, spec *vmv1.VmSpec) error {
	s.direct = spec.GetBoot() != nil
	vm, err := s.c.admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{Name: fmt.Sprintf("start-%t", s.direct), OrgId: org, ProjectId: "default", Spec: spec})
	if err != nil {
		return err
	}
	s.vm = vm.GetId()
	if err := s.c.awaitState(ctx, s.vm, vmv1.VmState_VM_STATE_STOPPED); err != nil {
		return err
	}
	for _, name := range []string{"hand", "libvirt"} {
		if err := exec.CommandContext(ctx, "cp", "--sparse=always", filepath.Join(s.c.vmDir(s.vm), "disks", "root.qcow2"), s.disk(name)).Run(); err != nil {
			return fmt.Errorf("copy disk: %w", err)
		}
	}
	if _, err := s.ours(ctx); err != nil {
		return err
	}
	r, err := s.c.record(s.vm)
	if err != nil {
		return err
	}
	s.argv = s.byHand(r.Argv, spec.GetBoot().GetCmdline())
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

// byHand returns the agent's QEMU arguments for use outside of the agent's sandbox: with the host's paths of kernel and
// initrd, and without -S and -preconfig, so that QEMU starts the guest without waiting for a monitor command. It adds
// the kernel command line, which the agent passes by QMP, as an argument.
func (s *starter) byHand(argv []string, cmdline string) []string {
	out := slices.DeleteFunc(slices.Clone(argv), func(a string) bool { return a == "-S" || a == "-preconfig" })
	if cmdline != "" {
		out = append(out, "-append", cmdline)
	}
	for i, a := range out {
		switch a {
		case "/boot/kernel":
			out[i] = s.file("vmlinuz")
		case "/boot/initrd":
			out[i] = s.file("initrd.lz4")
		}
	}
	return out
}

// took holds the measurements of one start: the time from the request to its response (0 for QEMU started by hand), the
// time from the request to the guest's banner, and the CPU time that QEMU had used when the banner was seen.
type took struct{ answer, banner, cpu time.Duration }

// cpuTime returns the CPU time that a process has used, or 0 if there is no such process.
func cpuTime(pid int) time.Duration { return time.Duration(cpuOf(pid) * float64(time.Second)) }

// ours starts the VM through the API, measures the start, and forces the VM off after its banner was read.
func (s *starter) ours(ctx context.Context) (took, error) {
	ctx, cancel := context.WithTimeout(ctx, bootWithin)
	defer cancel()
	log := s.c.serial(s.vm)
	offset := size(log)
	answered := make(chan error, 1)
	var answer time.Time
	began := time.Now()
	go func() {
		err := s.rest.Call(ctx, "POST", "/api/v1/vms/"+s.vm+"/start", nil, nil)
		answer = time.Now()
		answered <- err
	}()
	at, err := awaitBanner(ctx, log, offset)
	if err = errors.Join(err, <-answered); err != nil {
		return took{}, err
	}
	r, err := s.c.record(s.vm)
	if err != nil {
		return took{}, err
	}
	t := took{answer.Sub(began), at.Sub(began), cpuTime(r.PID)}
	_, err = s.c.admin.VMs.StopVm(ctx, &vmv1.StopVmRequest{OrgId: org, ProjectId: "default", VmId: s.vm, Force: true})
	return t, err
}

// hand starts QEMU directly, with the arguments that byHand returned and the same file descriptors as the agent. It
// measures the start and kills QEMU.
func (s *starter) hand(ctx context.Context) (t took, err error) {
	ctx, cancel := context.WithTimeout(ctx, bootWithin)
	defer cancel()
	log := filepath.Join(s.dir, "hand.serial")
	var files []*os.File
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	for _, name := range []string{"work", "inspect", "console"} {
		f, err := listen(filepath.Join(s.dir, name))
		if err != nil {
			return t, err
		}
		files = append(files, f)
	}
	for _, f := range []struct {
		path  string
		flags int
	}{{log, os.O_CREATE | os.O_TRUNC | os.O_WRONLY | os.O_APPEND}, {s.disk("hand"), os.O_RDWR}, {s.file("disk.qcow2"), os.O_RDONLY}} {
		opened, err := os.OpenFile(f.path, f.flags, 0o600)
		if err != nil {
			return t, err
		}
		files = append(files, opened)
	}
	cmd := exec.CommandContext(ctx, s.argv[0], s.argv[1:]...)
	cmd.ExtraFiles = files
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return t, err
	}
	at, err := awaitBanner(ctx, log, 0)
	t.cpu = cpuTime(cmd.Process.Pid)
	end(cmd)
	t.banner = at.Sub(began)
	return t, err
}

func listen(path string) (*os.File, error) {
	_ = os.Remove(path) // the previous round left a socket there
	// A unix socket address holds at most 108 bytes, and path may be longer: bind through /proc/self/fd instead.
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Net: "unix", Name: fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(path))})
	if err != nil {
		return nil, err
	}
	defer l.Close()
	l.SetUnlinkOnClose(false)
	return l.File()
}

// virsh starts the guest with `virsh create`, measures the start, and destroys the domain.
func (s *starter) virsh(ctx context.Context) (t took, err error) {
	ctx, cancel := context.WithTimeout(ctx, bootWithin)
	defer cancel()
	if err := os.Remove(s.domain.Serial); err != nil && !errors.Is(err, os.ErrNotExist) {
		return t, err
	}
	began := time.Now()
	if err := s.libvirt.Create(ctx, s.xml); err != nil {
		return t, err
	}
	t.answer = time.Since(began)
	at, err := awaitBanner(ctx, s.domain.Serial, 0)
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
		What: what, Ours: ms(median(ours)), Peer: ms(median(peer)), Value: median(ours).Seconds() / median(peer).Seconds(),
		AtMost: atMost, Unit: "×",
		Note: fmt.Sprintf("%d rounds; fastest %s and %s, slowest %s and %s", len(ours), ms(slices.Min(ours)), ms(slices.Min(peer)),
			ms(slices.Max(ours)), ms(slices.Max(peer))),
	})
}

func ms(d time.Duration) string { return fmt.Sprintf("%.1f ms", float64(d.Microseconds())/1000) }

// awaitState waits until a VM of the project default is in the given state, for at most bootWithin.
func (c *trivet) awaitState(ctx context.Context, id string, state vmv1.VmState) error {
	ctx, cancel := context.WithTimeout(ctx, bootWithin)
	defer cancel()
	return lab.Until(ctx, fmt.Sprintf("VM %s is %s", id, state), func(ctx context.Context) error {
		vm, err := c.admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: org, ProjectId: "default", VmId: id})
		if err == nil && vm.GetState() != state {
			err = fmt.Errorf("it is %s: %s", vm.GetState(), vm.GetStatus().GetLastError())
		}
		return err
	})
}
