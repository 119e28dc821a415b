package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// measureBoot measures how long it takes until many new VMs run, each with a new volume from one image. A guest runs
// when its CPUs do: measureBoot does not wait until it has booted. A first VM, which does not count, makes the host
// fetch the image, and has the arguments for the QEMUs that are started by hand.
func measureBoot(ctx context.Context, s *site) (err error) {
	first := &booted{}
	defer func() { err = errors.Join(err, s.endBooted(ctx, first)) }()
	if err := s.bootOne(ctx, first, "boot-first"); err != nil {
		return err
	}
	record, err := s.cloud.Record(first.vm)
	if err != nil {
		return err
	}
	argv := onehost.Arguments(record.Argv, s.guest, "")
	s.results.Note("boot", "until the CPUs of all guests run")
	return s.InTurn(ctx, s.fewer(),
		func(round int) error { return s.bootOurs(ctx, round) },
		func(round int) error { return s.bootByHand(ctx, round, argv) },
	)
}

// booted is a VM of Trivet with its volume. A field is "" if it was not made.
type booted struct{ vm, volume string }

// bootOne creates a volume and a VM, and starts the VM.
func (s *site) bootOne(ctx context.Context, b *booted, name string) (err error) {
	if b.volume, err = s.createVolume(ctx, s.images.Disk); err != nil {
		return err
	}
	vm, err := s.cloud.Admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{
		Name: name, OrgId: onehost.Org, ProjectId: project,
		Spec: &vmv1.VmSpec{Memory: &vmv1.MemorySpec{SizeMib: memoryMiB}, Disks: []*vmv1.DiskSpec{diskOf("root", b.volume)}},
	})
	if err != nil {
		return err
	}
	b.vm = vm.GetId()
	started, err := s.cloud.Admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: onehost.Org, ProjectId: project, VmId: b.vm})
	if err == nil && started.GetState() != vmv1.VmState_VM_STATE_RUNNING {
		err = fmt.Errorf("VM %s is %s: %s", name, started.GetState(), started.GetStatus().GetLastError())
	}
	return err
}

// endBooted deletes a VM and its volume.
func (s *site) endBooted(ctx context.Context, b *booted) (err error) {
	if b.vm != "" {
		_, err = s.cloud.Admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: onehost.Org, ProjectId: project, VmId: b.vm, Force: true})
	}
	if b.volume != "" && err == nil {
		err = s.deleteVolume(ctx, b.volume)
	}
	return err
}

func (s *site) bootOurs(ctx context.Context, round int) (err error) {
	all := make([]booted, s.size.booted)
	defer func() {
		for i := range all {
			err = errors.Join(err, s.endBooted(ctx, &all[i]))
		}
	}()
	began := time.Now()
	group, limited := errgroup.WithContext(ctx)
	for i := range all {
		group.Go(func() error { return s.bootOne(limited, &all[i], fmt.Sprintf("boot-%d-%d", round, i)) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	s.results.Ours("boot", milliseconds(time.Since(began)))
	return nil
}

func (s *site) bootByHand(ctx context.Context, round int, argv []string) (err error) {
	dir := filepath.Join(s.dir, fmt.Sprintf("boot-%d", round))
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	all := make([]machine, s.size.booted)
	defer func() {
		for i := range all {
			all[i].close()
		}
	}()
	began := time.Now()
	group, limited := errgroup.WithContext(ctx)
	for i := range all {
		group.Go(func() error { return s.bootOneByHand(limited, &all[i], filepath.Join(dir, fmt.Sprint(i)), argv) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	s.results.Peer("boot", milliseconds(time.Since(began)))
	return nil
}

// bootOneByHand makes an overlay of the image in dir, starts QEMU, and waits until the guest's CPUs run.
func (s *site) bootOneByHand(ctx context.Context, m *machine, dir string, argv []string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	overlay, base := filepath.Join(dir, "root.qcow2"), filepath.Join(s.guest, "disk.qcow2")
	if _, _, err := run(ctx, nil, "qemu-img", "create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", base, overlay, "1G"); err != nil {
		return err
	}
	h := &onehost.ByHand{Argv: argv, Dir: dir, Disks: []onehost.DiskFile{{Path: overlay}, {Path: base, ReadOnly: true}}}
	var err error
	if m.cmd, err = h.Start(context.WithoutCancel(ctx)); err != nil {
		return err
	}
	monitor, err := onehost.Dial(ctx, h.QMP())
	if err != nil {
		return err
	}
	if m.qmp, err = qmp.New(ctx, monitor); err != nil {
		return err
	}
	for {
		var status struct{ Running bool }
		if err := m.qmp.Do(ctx, "query-status", nil, &status); err != nil || status.Running {
			return err
		}
	}
}
