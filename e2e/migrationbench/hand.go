package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// qmpPoll is the interval at which QEMU is polled for the state of a migration.
const qmpPoll = 5 * time.Millisecond

// qemu describes a QEMU that is started by hand.
type qemu struct {
	number    int // of the guest
	memoryMiB int
	// disk is the path of a raw file, or "".
	disk string
	// incoming is the path of a socket at which QEMU waits for a guest, or "".
	incoming string
	// paused means that the guest does not run before the command cont.
	paused bool
}

// process is a QEMU with a connection to its monitor.
type process struct {
	cmd *exec.Cmd
	qmp *qmp.Conn
}

var processes int

// start starts a QEMU whose network interface is attached to the bridge.
func (p *peers) start(ctx context.Context, q qemu) (*process, error) {
	processes++
	tap, monitor := fmt.Sprintf("tap%d", processes), filepath.Join(p.b.dir, fmt.Sprintf("qmp-%d", processes))
	if err := commands(ctx, "ip tuntap add "+tap+" mode tap vnet_hdr", "ip link set "+tap+" mtu 1450 master "+bridge+" up"); err != nil {
		return nil, err
	}
	args := []string{"-nodefaults", "-no-user-config", "-machine", "q35", "-accel", "tcg,tb-size=256", "-cpu", "max", "-smp", "1",
		"-m", fmt.Sprint(q.memoryMiB), "-display", "none", "-qmp", "unix:" + monitor + ",server=on,wait=off", "-serial", "file:" + monitor + ".serial",
		"-kernel", filepath.Join(p.b.guest, "vmlinuz"), "-initrd", filepath.Join(p.b.guest, "initrd.lz4"), "-append", p.cmdline,
		"-netdev", "tap,id=net0,ifname=" + tap + ",script=no,downscript=no,vhost=off",
		"-device", "virtio-net-pci,netdev=net0,mac=" + macOf(q.number).String(),
	}
	if q.disk != "" {
		args = append(args, "-blockdev", "driver=raw,node-name=disk0,discard=unmap,file.driver=file,file.locking=off,file.cache.direct=on,file.filename="+q.disk,
			"-device", "virtio-blk-pci,drive=disk0")
	}
	if q.incoming != "" {
		args = append(args, "-incoming", "unix:"+q.incoming)
	}
	if q.paused {
		args = append(args, "-S")
	}
	cmd := exec.Command("qemu-system-x86_64", args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	out := &process{cmd: cmd}
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	for {
		conn, err := onehost.Dial(ctx, monitor)
		if err == nil {
			if out.qmp, err = qmp.New(ctx, conn); err == nil {
				return out, nil
			}
		}
		select {
		case <-time.After(qmpPoll):
		case <-ctx.Done():
			out.kill()
			return nil, fmt.Errorf("connect to QEMU: %w", err)
		}
	}
}

func (p *process) kill() {
	if p.qmp != nil {
		_ = p.qmp.Close()
	}
	_ = p.cmd.Process.Kill()
	_ = p.cmd.Wait() // its error only reports the SIGKILL
}

type object map[string]any

// hand is a guest of QEMU by hand that is moved.
type hand struct {
	p    *peers
	kind string
	size int
	// live means that the guest runs while its memory is sent.
	live   bool
	number int
	disk   string
	now    *process
	moves  int
}

func (p *peers) bootStopped(ctx context.Context, kind string, size int) (mover, error) {
	return p.bootHand(ctx, kind, size, false)
}

func (p *peers) bootLive(ctx context.Context, kind string, size int) (mover, error) {
	return p.bootHand(ctx, kind, size, true)
}

func (p *peers) bootHand(ctx context.Context, kind string, size int, live bool) (_ mover, err error) {
	h := &hand{p: p, kind: kind, size: size, live: live, number: p.next()}
	if h.disk, err = h.newDisk(); err != nil {
		return nil, err
	}
	if h.now, err = p.start(ctx, qemu{number: h.number, memoryMiB: size, disk: h.disk}); err != nil {
		return nil, err
	}
	guest := neighbour{p.neighbour.namespace, h.address()}
	return h, errors.Join(guest.await(ctx), guest.fill(ctx))
}

func (h *hand) newDisk() (string, error) {
	path := filepath.Join(h.p.b.dir, fmt.Sprintf("hand-%d-%d.raw", h.number, h.moves))
	return path, makeRaw(path)
}

// makeRaw makes a sparse file of 1 GiB.
func makeRaw(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(1<<30), f.Close())
}

func (h *hand) address() string { return addressOf(h.number).String() }

func (h *hand) close(context.Context) error {
	h.now.kill()
	return os.Remove(h.disk)
}

func (h *hand) migrate(ctx context.Context) (m move, err error) {
	h.moves++
	began := time.Now()
	disk, socket := h.disk, filepath.Join(h.p.b.dir, fmt.Sprintf("in-%d", processes))
	if h.kind == "local" {
		if disk, err = h.newDisk(); err != nil {
			return m, err
		}
	}
	target, err := h.p.start(ctx, qemu{number: h.number, memoryMiB: h.size, disk: disk, incoming: socket, paused: !h.live})
	if err != nil {
		return m, err
	}
	if m.paused, err = h.move(ctx, target, socket); err != nil {
		target.kill()
		return m, err
	}
	m.total = time.Since(began)
	h.now.kill()
	if disk != h.disk {
		err = os.Remove(h.disk)
	}
	h.now, h.disk = target, disk
	return m, err
}

// move moves the guest to the target, and returns the time for which the guest was stopped.
func (h *hand) move(ctx context.Context, target *process, socket string) (paused time.Duration, err error) {
	source := h.now.qmp
	if h.kind == "local" {
		if err := h.mirror(ctx, target.qmp, socket+"-nbd"); err != nil {
			return 0, err
		}
	}
	capability := object{"capability": "pause-before-switchover", "state": true}
	if err := errors.Join(
		source.Do(ctx, "migrate-set-capabilities", object{"capabilities": []object{capability}}, nil),
		source.Do(ctx, "migrate-set-parameters", object{"max-bandwidth": 1 << 34}, nil),
	); err != nil {
		return 0, err
	}
	stopped := time.Now()
	if !h.live {
		if err := source.Do(ctx, "stop", nil, nil); err != nil {
			return 0, err
		}
	}
	if err := source.Do(ctx, "migrate", object{"uri": "unix:" + socket}, nil); err != nil {
		return 0, err
	}
	if _, err := awaitMigration(ctx, source, "pre-switchover"); err != nil {
		return 0, err
	}
	if h.kind == "local" {
		// While the NBD server can write to the disk, QEMU refuses to activate the disk for the guest.
		if err := errors.Join(endMirror(ctx, source), target.qmp.Do(ctx, "nbd-server-stop", nil, nil)); err != nil {
			return 0, err
		}
	}
	if err := source.Do(ctx, "migrate-continue", object{"state": "pre-switchover"}, nil); err != nil {
		return 0, err
	}
	downtime, err := awaitMigration(ctx, source, "completed")
	if err != nil {
		return 0, err
	}
	if h.live {
		return downtime, awaitRunning(ctx, target.qmp)
	}
	if err := awaitPaused(ctx, target.qmp); err != nil {
		return 0, err
	}
	if err := target.qmp.Do(ctx, "cont", nil, nil); err != nil {
		return 0, err
	}
	paused = time.Since(stopped)
	return paused, target.qmp.Do(ctx, "announce-self", object{"initial": 50, "max": 550, "rounds": 5, "step": 100}, nil)
}

// mirror copies the disk to the target, and returns when the copy is complete and follows each write.
func (h *hand) mirror(ctx context.Context, target *qmp.Conn, socket string) error {
	address := object{"type": "unix", "data": object{"path": socket}}
	if err := target.Do(ctx, "nbd-server-start", object{"addr": address}, nil); err != nil {
		return err
	}
	export := object{"type": "nbd", "id": "disk0", "node-name": "disk0", "name": "disk0", "writable": true}
	if err := target.Do(ctx, "block-export-add", export, nil); err != nil {
		return err
	}
	node := object{"driver": "nbd", "node-name": "copy", "export": "disk0", "server": object{"type": "unix", "path": socket}}
	if err := h.now.qmp.Do(ctx, "blockdev-add", node, nil); err != nil {
		return err
	}
	if err := h.now.qmp.Do(ctx, "blockdev-mirror", object{
		"job-id": "copy", "device": "disk0", "target": "copy", "sync": "full", "copy-mode": "write-blocking",
	}, nil); err != nil {
		return err
	}
	return poll(ctx, "the disk is copied", func() (bool, error) {
		var jobs []struct{ Ready bool }
		err := h.now.qmp.Do(ctx, "query-block-jobs", nil, &jobs)
		if err == nil && len(jobs) == 0 {
			err = errors.New("the copy has failed")
		}
		return err == nil && jobs[0].Ready, err
	})
}

// endMirror ends the copy of the disk.
func endMirror(ctx context.Context, source *qmp.Conn) error {
	if err := source.Do(ctx, "block-job-cancel", object{"device": "copy"}, nil); err != nil {
		return err
	}
	return poll(ctx, "the copy of the disk has ended", func() (bool, error) {
		var jobs []object
		err := source.Do(ctx, "query-block-jobs", nil, &jobs)
		return len(jobs) == 0, err
	})
}

// awaitMigration waits until the migration has a status, and returns the downtime that QEMU reports.
func awaitMigration(ctx context.Context, source *qmp.Conn, status string) (downtime time.Duration, err error) {
	err = poll(ctx, "the migration is "+status, func() (bool, error) {
		var m struct {
			Status, Error string
			Downtime      int64
		}
		if err := source.Do(ctx, "query-migrate", nil, &m); err != nil {
			return false, err
		}
		if m.Status == "failed" || m.Status == "cancelled" {
			return false, fmt.Errorf("it is %s: %s", m.Status, m.Error)
		}
		downtime = time.Duration(m.Downtime) * time.Millisecond
		return m.Status == status, nil
	})
	return downtime, err
}

func awaitPaused(ctx context.Context, target *qmp.Conn) error {
	return awaitState(ctx, target, func(state string) bool { return state != "inmigrate" })
}

func awaitRunning(ctx context.Context, target *qmp.Conn) error {
	return awaitState(ctx, target, func(state string) bool { return state == "running" })
}

func awaitState(ctx context.Context, target *qmp.Conn, is func(string) bool) error {
	return poll(ctx, "the target has the guest", func() (bool, error) {
		var s struct{ Status string }
		err := target.Do(ctx, "query-status", nil, &s)
		return is(s.Status), err
	})
}

// poll calls done at intervals of qmpPoll until it returns true or an error.
func poll(ctx context.Context, what string, done func() (bool, error)) error {
	for {
		ok, err := done()
		if err != nil {
			return fmt.Errorf("wait until %s: %w", what, err)
		}
		if ok {
			return nil
		}
		select {
		case <-time.After(qmpPoll):
		case <-ctx.Done():
			return fmt.Errorf("wait until %s: %w", what, ctx.Err())
		}
	}
}
