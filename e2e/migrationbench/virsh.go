package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/e2e/bench/libvirt"
)

// secondCommand is the first argument of this program when it runs the second libvirt. The other arguments are the
// directory for logs, the directory of the first libvirt's disks, and the directory that the program mounts over it. A
// disk therefore has the same path for both libvirts, but is a different file. The program prints a line when libvirt
// is ready, and stops libvirt at the end of its standard input.
const secondCommand = "libvirt"

func secondMain(args []string) int {
	if err := runSecond(args[0], args[1], args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "migrationbench:", err)
		return 1
	}
	return 0
}

func runSecond(logs, over, from string) error {
	if err := libvirt.Mount(); err != nil {
		return err
	}
	if err := unix.Mount(from, over, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", over, err)
	}
	d, err := libvirt.Start(context.Background(), logs)
	if err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return errors.Join(err, d.Close())
}

// second is the process of the second libvirt.
type second struct {
	cmd   *exec.Cmd
	stdin io.Closer
	// disks are the directories of the disks of both libvirts, as this process sees them.
	disks [2]string
}

func startSecond(ctx context.Context, dir string) (*second, error) {
	s := &second{disks: [2]string{filepath.Join(dir, "virsh-1"), filepath.Join(dir, "virsh-2")}}
	logs := filepath.Join(dir, "libvirt-2")
	for _, d := range []string{logs, s.disks[0], s.disks[1]} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return nil, err
		}
	}
	s.cmd = exec.Command("/proc/self/exe", secondCommand, logs, s.disks[0], s.disks[1])
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM}
	stdin, err := s.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	s.stdin = stdin
	stdout, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
		return nil, errors.Join(errors.New("the second libvirt did not start"), s.close())
	}
	return s, ctx.Err()
}

func (s *second) close() error { return errors.Join(s.stdin.Close(), s.cmd.Wait()) }

// uri returns the address of a libvirt: 0 is the first one, 1 the second one.
func (s *second) uri(host int) string {
	if host == 0 {
		return "qemu:///system"
	}
	return fmt.Sprintf("qemu+unix:///system?socket=/proc/%d/root/run/libvirt/libvirt-sock", s.cmd.Process.Pid)
}

// domain is a guest of libvirt that is moved.
type domain struct {
	p      *peers
	kind   string
	name   string
	number int
	host   int
}

func (p *peers) bootVirsh(ctx context.Context, kind string, size int) (mover, error) {
	d := &domain{p: p, kind: kind, number: p.next()}
	d.name = fmt.Sprintf("trivet-bench-%d", d.number)
	disk := d.disk(0)
	if kind == "shared" {
		disk = filepath.Join(p.b.dir, d.name+".raw")
	}
	if err := makeRaw(disk); err != nil {
		return nil, err
	}
	xml := libvirt.Domain{
		Name: d.name, UUID: uuid.NewString(), Machine: "pc-q35-7.2", CPUMaximum: true, VCPUs: 1, MemoryMiB: uint64(size),
		Kernel: filepath.Join(p.b.guest, "vmlinuz"), Initrd: filepath.Join(p.b.guest, "initrd.lz4"), Cmdline: p.cmdline,
		Disk: disk, Raw: true, Serial: filepath.Join(p.b.dir, d.name+".serial"), Ports: 6, TBSizeMiB: 256,
		Bridge: bridge, MAC: macOf(d.number).String(),
	}
	file, err := xml.Write(p.b.dir)
	if err != nil {
		return nil, err
	}
	if err := d.virsh(ctx, 0, "create", file); err != nil {
		return nil, err
	}
	guest := neighbour{p.neighbour.namespace, d.address()}
	return d, errors.Join(guest.await(ctx), guest.fill(ctx))
}

// disk returns the path of the disk of a host, as this process sees it.
func (d *domain) disk(host int) string {
	return filepath.Join(d.p.second.disks[host], d.name+".raw")
}

func (d *domain) virsh(ctx context.Context, host int, args ...string) error {
	_, err := output(ctx, append([]string{"virsh", "-q", "-c", d.p.second.uri(host)}, args...)...)
	return err
}

func (d *domain) address() string { return addressOf(d.number).String() }

func (d *domain) migrate(ctx context.Context) (m move, err error) {
	to := 1 - d.host
	began := time.Now()
	args := []string{"migrate", "--unsafe", "--migrateuri", "tcp://127.0.0.1", d.name, d.p.second.uri(to)}
	if d.kind == "local" {
		if err := makeRaw(d.disk(to)); err != nil {
			return m, err
		}
		args = append(args, "--copy-storage-all")
	}
	if err := d.virsh(ctx, d.host, args...); err != nil {
		return m, err
	}
	m.total = time.Since(began)
	if d.kind == "local" {
		err = os.Remove(d.disk(d.host))
	}
	d.host = to
	return m, err
}

func (d *domain) close(ctx context.Context) error { return d.virsh(ctx, d.host, "destroy", d.name) }

// output runs a program and returns what it prints.
func output(ctx context.Context, words ...string) (string, error) {
	out, err := exec.CommandContext(ctx, words[0], words[1:]...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(words, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}
