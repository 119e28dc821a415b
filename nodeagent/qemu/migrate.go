package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// ErrMigrating means that the guest must not run because of a migration. ResumeMigrated ends this state.
var ErrMigrating = errors.New("the guest is stopped by a migration")

// migratingName is the name of a file in the VM's home. The file exists while QEMU must not run the guest because of a
// migration. At the source, SendState creates it. At the target, LaunchIncoming creates it. ResumeMigrated removes it.
// Without the file, a later agent could not distinguish such a guest from one that was stopped for a snapshot, and
// would resume it.
const migratingName = "migrating"

func (h *Home) setMigrating() error {
	if err := os.WriteFile(h.path(migratingName), nil, 0o600); err != nil {
		return fmt.Errorf("record that a migration stops the guest: %w", err)
	}
	return nil
}

func (h *Home) migrating() (bool, error) {
	_, err := os.Stat(h.path(migratingName))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// ResumeMigrated starts the CPUs of a guest that a migration has stopped. The caller must first have recorded the
// decision that permits it: at the target, that the guest runs there; at the source, that the migration is cancelled.
func (p *Process) ResumeMigrated(ctx context.Context) error {
	// The file is removed last, so that the caller can repeat the call after an error.
	if err := p.resume(ctx); err != nil {
		return err
	}
	if err := os.Remove(p.home.path(migratingName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("resume guest after a migration: %w", err)
	}
	return nil
}

// machineVersion is the highest version of the format that Machine returns. Agents of earlier versions know only version
// 1. They ignore the fields that version 2 has added to Spec, and would start another machine.
const machineVersion = 2

// machine is the format of the result of Process.Machine.
type machine struct {
	Version int  `json:"version"`
	Spec    Spec `json:"spec"`
}

// Machine returns a description of the running QEMU for ParseMachine. It contains the Spec with the slots of all
// devices, and the number of root ports with which QEMU was started.
func (p *Process) Machine() ([]byte, error) {
	r := p.Record()
	s := r.Spec
	s.DiskPorts, s.NICPorts, s.CPUs, s.MemoryNode = 0, 0, nil, nil
	for _, arg := range r.Argv {
		var device struct {
			Driver string `json:"driver"`
			ID     string `json:"id"`
		}
		if !strings.HasPrefix(arg, "{") || json.Unmarshal([]byte(arg), &device) != nil || device.Driver != "pcie-root-port" {
			continue
		}
		switch {
		case strings.HasPrefix(device.ID, "nicport"):
			s.NICPorts++
		case strings.HasPrefix(device.ID, "port"):
			s.DiskPorts++
		}
	}
	version := 1
	if s.Display || s.Hugepages || s.DedicatedCPUs {
		version = machineVersion
	}
	return json.Marshal(machine{version, s})
}

// ParseMachine returns the Spec with which the target of a migration must start QEMU. The parameter text is the result
// of Machine at the source. The error wraps [ErrInvalid].
func ParseMachine(text []byte) (Spec, error) {
	var m machine
	if err := json.Unmarshal(text, &m); err != nil {
		return Spec{}, invalid("the source's description of the VM is not valid: %v", err)
	}
	if m.Version < 1 || m.Version > machineVersion {
		return Spec{}, invalid("the source's description of the VM has version %d, and this agent knows versions up to %d", m.Version, machineVersion)
	}
	return m.Spec, m.Spec.Validate()
}

// Migration is the state of a migration in QEMU, at the source or at the target.
type Migration struct {
	// Status is MigrationStatus of QEMU's qapi/migration.json. It is "" before memory is sent or received.
	Status string
	Error  string
	// TotalBytes is the size of the disks and the memory that the source sends. SentBytes is how much of it has been
	// sent.
	TotalBytes, SentBytes uint64
	DowntimeMS            uint64
	Mirrors               []Mirror
}

// Mirror is a job of the source that copies a disk to the target.
type Mirror struct {
	node         string // the top node of the disk
	Ready, Ended bool
	Error        string
	// Size is the number of bytes to copy, and Done the number of bytes that were copied.
	Size, Done uint64
}

// Active reports whether QEMU sends or receives memory, or waits before the switchover.
func (m Migration) Active() bool {
	switch m.Status {
	case "", "none", "completed", "failed", "cancelled":
		return false
	}
	return true
}

// mirrorPrefix is the beginning of the names of the jobs that copy disks to the target, and of their target nodes.
const mirrorPrefix = "migrate-"

func (d Disk) mirrorNode() string { return mirrorPrefix + d.node() }

// Migration queries the state of the migration.
func (p *Process) Migration(ctx context.Context) (m Migration, err error) {
	err = p.call(ctx, p.inspect, func(ctx context.Context, conn *qmp.Conn) error {
		m, err = queryMigration(ctx, conn)
		return err
	})
	return m, err
}

func queryMigration(ctx context.Context, conn *qmp.Conn) (Migration, error) {
	var info struct {
		Status   string `json:"status"`
		Error    string `json:"error-desc"`
		Downtime uint64 `json:"downtime"`
		RAM      struct {
			Total     uint64 `json:"total"`
			Remaining uint64 `json:"remaining"`
		} `json:"ram"`
	}
	if err := conn.Do(ctx, "query-migrate", nil, &info); err != nil {
		// QEMU refuses the command only before the end of preconfig: the agent that started QEMU ended before it called
		// configure. There is no migration then.
		return Migration{}, refused(err)
	}
	m := Migration{Status: info.Status, Error: printable(info.Error, 300), DowntimeMS: info.Downtime}
	m.TotalBytes, m.SentBytes = info.RAM.Total, info.RAM.Total-min(info.RAM.Remaining, info.RAM.Total)
	var jobs []struct {
		Device string `json:"device"`
		Len    uint64 `json:"len"`
		Offset uint64 `json:"offset"`
		Ready  bool   `json:"ready"`
		Status string `json:"status"`
		Error  string `json:"error"`
	}
	if err := conn.Do(ctx, "query-block-jobs", nil, &jobs); err != nil {
		return Migration{}, err
	}
	for _, j := range jobs {
		node, ok := strings.CutPrefix(j.Device, mirrorPrefix)
		if !ok {
			continue
		}
		m.Mirrors = append(m.Mirrors, Mirror{node: node, Ready: j.Ready, Ended: j.Status == "concluded",
			Error: printable(j.Error, 300), Size: j.Len, Done: j.Offset})
		m.TotalBytes, m.SentBytes = m.TotalBytes+j.Len, m.SentBytes+j.Offset
	}
	return m, nil
}

// migrationCapabilities are set on both sides. With return-path, the source reports a migration as completed only after
// the target has confirmed that it has the state. With pause-before-switchover, the source waits for the command
// migrate-continue before it closes the disks and sends the last part of the state.
var migrationCapabilities = []string{"return-path", "pause-before-switchover", "events"}

func setCapabilities(ctx context.Context, conn *qmp.Conn) error {
	var all []object
	for _, name := range migrationCapabilities {
		all = append(all, object{"capability": name, "state": true})
	}
	return conn.Do(ctx, "migrate-set-capabilities", object{"capabilities": all}, nil)
}

// refused returns nil if err means that QEMU has refused a command. Otherwise it returns err.
func refused(err error) error {
	var refusal *qmp.Error
	if errors.As(err, &refusal) {
		return nil
	}
	return err
}

// Migrating reports whether QEMU must not run the guest because of a migration. Resume then returns ErrMigrating.
// Migrating also returns true if the state cannot be determined.
func (p *Process) Migrating() bool {
	migrating, err := p.home.migrating()
	return migrating || err != nil
}

// PIDFD returns a new pidfd of the process. The pidfd becomes readable when the process ends. The caller must close it.
func (p *Process) PIDFD() (*os.File, error) {
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	var dupErr error
	if err := raw.Control(func(own uintptr) { fd, dupErr = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) }); err != nil {
		return nil, err
	}
	if dupErr != nil {
		return nil, os.NewSyscallError("fcntl", dupErr)
	}
	return os.NewFile(uintptr(fd), "pidfd"), nil
}
