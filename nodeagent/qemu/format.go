package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/cgroup"
	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

const (
	// formatPrefix begins the name of the home directory and of the control group of a formatting process: a QEMU
	// without a VM that Format starts. The rest of the name is the volume's id.
	formatPrefix = "format-"
	// formatTimeout is the maximum time of Format. QEMU needs about 2 seconds of processor time.
	formatTimeout = 2 * time.Minute
	// formatAttempts is the maximum number of attempts to make the file (see errNoCPUTime).
	formatAttempts = 20
	// formatBytes is the maximum length of the file in bytes. The file contains 2 MiB of LUKS header and the first
	// QCOW2 tables, whose length grows with the volume's size.
	formatBytes = 64 << 20
	// iterationMillis is the time in milliseconds for which QEMU hashes the passphrase. Many iterations protect
	// passphrases that people choose. A random passphrase of 256 bits needs no such protection, so this is short.
	iterationMillis = 10
)

// errNoCPUTime is the text of QEMU's error when the processor time of its hash benchmark was too short for the kernel
// to measure. This error occurs at random, most often with kernels that count processor time in ticks. Another attempt
// normally succeeds.
const errNoCPUTime = "Unable to get accurate CPU usage"

// Format returns a file in memory with the content of an empty QCOW2 image of size bytes that has LUKS encryption with
// the given key. The parameter id is the id of the volume. Format starts a QEMU without a VM to make the content. This
// QEMU is confined like the QEMU of a VM, with a uid and a control group of its own, and ends before Format returns.
// The key is not stored. The caller closes the file.
func (l *Launcher) Format(ctx context.Context, homes *Homes, id string, size uint64, key Key) (*os.File, error) {
	f, err := l.format(ctx, homes, formatPrefix+id, size, key)
	if err != nil {
		return nil, fmt.Errorf("format encrypted volume %s: %w", id, err)
	}
	return f, nil
}

func (l *Launcher) format(ctx context.Context, homes *Homes, name string, size uint64, key Key) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, formatTimeout)
	defer cancel()
	fd, err := unix.MemfdCreate("volume", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "volume")
	home, err := homes.claim(name)
	if err == nil {
		err = l.formatFile(ctx, home, f, size, key)
		err = errors.Join(err, l.removeFormat(context.WithoutCancel(ctx), home))
	}
	if err != nil {
		closeAll(f)
		return nil, err
	}
	return f, nil
}

// formatFile makes the content of the empty file f with a new QEMU.
func (l *Launcher) formatFile(ctx context.Context, home *Home, f *os.File, size uint64, key Key) error {
	if err := l.Cgroups.Kill(ctx, home.id); err != nil { // An earlier agent may have left a process.
		return err
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	r := Record{Argv: formatArgv(l.Program), BootID: boot}
	if err := home.begin(r); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	if err := l.Cgroups.Create(home.id, cgroup.Limits{CPUs: 1, Memory: 1 << 30, Tasks: r.Spec.tasks(false)}); err != nil {
		return err
	}
	p, err := l.start(ctx, home, r, Files{Disks: map[string]Layers{"": {Size: formatBytes}}}, []*os.File{f})
	if err != nil {
		return err
	}
	defer p.Close()
	err = p.makeEncrypted(ctx, size, key)
	return errors.Join(err, p.killNow(context.WithoutCancel(ctx)))
}

// removeFormat ends the processes of a formatting process's control group, and removes the group and the directory.
func (l *Launcher) removeFormat(ctx context.Context, home *Home) error {
	ctx, cancel := context.WithTimeout(ctx, killTimeout)
	defer cancel()
	if err := l.Cgroups.Kill(ctx, home.id); err != nil {
		return err
	}
	if err := l.Cgroups.Remove(ctx, home.id); err != nil {
		return err
	}
	return home.Remove()
}

// RemoveFormats ends the formatting processes of earlier agents, and removes their directories and control groups. It
// must not be called while Format runs.
func (l *Launcher) RemoveFormats(ctx context.Context, homes *Homes) error {
	names, err := homes.names()
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, formatPrefix) {
			continue
		}
		if err := l.removeFormat(ctx, &Home{id: name, dir: homes.path(name)}); err != nil {
			return fmt.Errorf("remove %s: %w", name, err)
		}
	}
	return nil
}

// formatArgv returns the command line of a QEMU without a machine. The descriptor fdDisks is the file to format.
func formatArgv(program string) []string {
	a := args{program}
	a.add("-nodefaults", "-no-user-config", "-machine", "none", "-accel", "tcg,tb-size=1", "-display", "none", "-S")
	a.add("-msg", "timestamp=on", "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
	a.monitors()
	a.fdset(fdDisks, "volume")
	return a
}

// makeEncrypted makes an empty encrypted QCOW2 image in the file at the descriptor fdDisks.
func (p *Process) makeEncrypted(ctx context.Context, size uint64, key Key) error {
	const secret, file = "key", "file"
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := addSecret(ctx, conn, secret, "raw", key); err != nil {
			return err
		}
		return conn.Do(ctx, "blockdev-add", object{"driver": "file", "node-name": file, "filename": fdsetPath(fdDisks)}, nil)
	})
	if err != nil {
		return err
	}
	options := object{"driver": "qcow2", "file": file, "size": size,
		"encrypt": object{"format": "luks", "key-secret": secret, "iter-time": iterationMillis}}
	for range formatAttempts {
		err = p.runJob(ctx, "blockdev-create", object{"options": options})
		if err == nil || !strings.Contains(err.Error(), errNoCPUTime) {
			return err
		}
	}
	return err
}

// runJob starts a job of QEMU by a command, waits until the job has ended, and removes it. It returns the job's error.
func (p *Process) runJob(ctx context.Context, command string, arguments object) error {
	const id = "job"
	arguments["job-id"] = id
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, command, arguments, nil)
	})
	changes := newJobWait()
	for err == nil {
		var jobs []job
		// The job blocks QEMU's main loop, so the query may time out while the job runs.
		err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
			changes.begin(conn)
			return conn.Do(ctx, "query-jobs", nil, &jobs)
		})
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			err = nil
			continue
		}
		for _, j := range jobs {
			if j.ID != id || j.Status != "concluded" {
				continue
			}
			err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
				return conn.Do(ctx, "job-dismiss", object{"id": id}, nil)
			})
			if err == nil && j.Error != "" {
				err = errors.New(j.Error)
			}
			return err
		}
		if err == nil {
			changes.wait(ctx)
		}
	}
	return err
}
