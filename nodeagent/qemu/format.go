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
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

const (
	// formatPrefix begins the name of the home directory and of the control group of a formatting process: a QEMU
	// without a VM that Format, FormatHeader or EncryptImage starts. The rest of the name is the volume's id.
	formatPrefix = "format-"
	// formatTimeout is the maximum time of Format and of FormatHeader. QEMU needs about 2 seconds of processor time.
	formatTimeout = 2 * time.Minute
	// encryptTimeout is the maximum time of EncryptImage.
	encryptTimeout = 8 * time.Minute
	// formatAttempts is the maximum number of attempts to make the file (see errNoCPUTime).
	formatAttempts = 20
	// formatBytes is the maximum length in bytes of the file that Format or FormatHeader makes. The file contains 2 MiB
	// of LUKS header and, for Format, the first QCOW2 tables, whose length grows with the volume's size.
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
	return l.formatMemory(ctx, homes, id, func(ctx context.Context, p *Process) error {
		return p.format(ctx, object{"driver": "qcow2", "file": fileNode, "size": size,
			"encrypt": object{"format": "luks", "key-secret": keySecret, "iter-time": iterationMillis}}, key)
	})
}

// FormatHeader returns a file in memory with a LUKS header for the given key. A volume that consists of the header and
// of any content behind it is a volume with LUKS encryption: the guest sees the decrypted content, without the header.
// The other properties of FormatHeader are those of Format.
func (l *Launcher) FormatHeader(ctx context.Context, homes *Homes, id string, key Key) (*os.File, error) {
	return l.formatMemory(ctx, homes, id, func(ctx context.Context, p *Process) error { return p.formatLUKS(ctx, 0, key) })
}

// EncryptImage writes a LUKS header for the given key to the empty file to, and behind it the content of an image,
// encrypted. The image has the given format and virtual size. The parameter id is the id of the volume. The QEMU that
// encrypts has the properties that are described at Format.
func (l *Launcher) EncryptImage(ctx context.Context, homes *Homes, id string, key Key, image *os.File, format qcow2.Format, size uint64, to *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, encryptTimeout)
	defer cancel()
	work := formatting{files: []*os.File{to, image}, limit: size + formatBytes, do: func(ctx context.Context, p *Process) error {
		if err := p.formatLUKS(ctx, size, key); err != nil {
			return err
		}
		return p.copyImage(ctx, format)
	}}
	if err := l.format(ctx, homes, formatPrefix+id, work); err != nil {
		return fmt.Errorf("encrypt the image of volume %s: %w", id, err)
	}
	return nil
}

// formatMemory calls do with a new QEMU, and returns the file in memory that QEMU has written.
func (l *Launcher) formatMemory(ctx context.Context, homes *Homes, id string, do func(context.Context, *Process) error) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, formatTimeout)
	defer cancel()
	fd, err := unix.MemfdCreate("volume", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("memfd_create", err)
	}
	f := os.NewFile(uintptr(fd), "volume")
	if err := l.format(ctx, homes, formatPrefix+id, formatting{files: []*os.File{f}, limit: formatBytes, do: do}); err != nil {
		closeAll(f)
		return nil, fmt.Errorf("format encrypted volume %s: %w", id, err)
	}
	return f, nil
}

// formatting is the work of one formatting process.
type formatting struct {
	files []*os.File // that the process gets at the descriptors from fdDisks on; it writes to the first one
	limit uint64     // the maximum length of the first file in bytes
	do    func(context.Context, *Process) error
}

func (l *Launcher) format(ctx context.Context, homes *Homes, name string, work formatting) error {
	home, err := homes.claim(name)
	if err != nil {
		return err
	}
	err = l.runFormat(ctx, home, work)
	return errors.Join(err, l.removeFormat(context.WithoutCancel(ctx), home))
}

// runFormat starts a formatting process, lets it do its work and ends it.
func (l *Launcher) runFormat(ctx context.Context, home *Home, work formatting) error {
	if err := l.Cgroups.Kill(ctx, home.id); err != nil { // An earlier agent may have left a process.
		return err
	}
	boot, err := bootID()
	if err != nil {
		return err
	}
	r := Record{Argv: formatArgv(l.Program, len(work.files)), BootID: boot}
	if err := home.begin(r); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	if err := l.Cgroups.Create(home.id, cgroup.Limits{CPUs: 1, Memory: 1 << 30, Tasks: r.Spec.tasks(false)}); err != nil {
		return err
	}
	p, err := l.start(ctx, home, r, Files{Disks: map[string]Layers{"": {Size: work.limit}}}, work.files)
	if err != nil {
		return err
	}
	defer p.Close()
	err = work.do(ctx, p)
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

// formatArgv returns the command line of a QEMU without a machine, which has files at the descriptors from fdDisks on.
func formatArgv(program string, files int) []string {
	a := args{program}
	a.add("-nodefaults", "-no-user-config", "-machine", "none", "-accel", "tcg,tb-size=1", "-display", "none", "-S")
	a.add("-msg", "timestamp=on", "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
	a.monitors()
	for i := range files {
		a.fdset(fdDisks+i, "volume")
	}
	return a
}

// Names in a formatting process: the secret object with the key, and the block node of the file at fdDisks.
const (
	keySecret = "key"
	fileNode  = "file"
)

// format makes the file at the descriptor fdDisks an encrypted image, according to the options of QEMU's command
// blockdev-create.
func (p *Process) format(ctx context.Context, options object, key Key) error {
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := addSecret(ctx, conn, keySecret, "raw", key); err != nil {
			return err
		}
		return conn.Do(ctx, "blockdev-add", object{"driver": "file", "node-name": fileNode, "filename": fdsetPath(fdDisks)}, nil)
	})
	if err != nil {
		return err
	}
	for range formatAttempts {
		err = p.runJob(ctx, "blockdev-create", object{"options": options})
		if err == nil || !strings.Contains(err.Error(), errNoCPUTime) {
			return err
		}
	}
	return err
}

// formatLUKS writes a LUKS header to the file at the descriptor fdDisks, and gives the file room for size bytes of
// content behind the header.
func (p *Process) formatLUKS(ctx context.Context, size uint64, key Key) error {
	return p.format(ctx, object{"driver": "luks", "file": fileNode, "size": size, "key-secret": keySecret,
		"iter-time": iterationMillis}, key)
}

// copyImage encrypts the image at the descriptor fdDisks+1 and writes it to the file that formatLUKS has formatted. All
// bytes are written, also zeros, because bytes that were never written do not decrypt to zeros.
func (p *Process) copyImage(ctx context.Context, format qcow2.Format) error {
	image := object{"driver": string(format), "node-name": "image", "read-only": true, "auto-read-only": false,
		"file": object{"driver": "file", "filename": fdsetPath(fdDisks + 1), "read-only": true, "auto-read-only": false}}
	if format == qcow2.QCOW2 {
		image["backing"] = nil // A backing file named in the image is not opened.
	}
	err := p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		if err := conn.Do(ctx, "blockdev-add", image, nil); err != nil {
			return err
		}
		return conn.Do(ctx, "blockdev-add", object{"driver": "luks", "node-name": "volume", "file": fileNode, "key-secret": keySecret}, nil)
	})
	if err != nil {
		return err
	}
	return p.runJob(ctx, "blockdev-backup", object{"device": "image", "target": "volume", "sync": "full", "auto-dismiss": false})
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
