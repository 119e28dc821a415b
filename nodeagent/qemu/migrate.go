package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// ErrMigrating means that the guest must not run because of a migration. ResumeMigrated ends this state.
var ErrMigrating = errors.New("the guest is stopped by a migration")

// ErrGuestRan means that a source must not hand its guest over, because the guest may have run until QEMU had sent all
// of its memory. If such a QEMU cannot send the last part of the state, it resumes the guest by itself.
var ErrGuestRan = errors.New("the guest was not stopped before QEMU had sent its memory")

// migratingName is the name of a file in the VM's home. The file exists while QEMU must not run the guest because of a
// migration. At the source, SendState and StopGuest create it. At the target, LaunchIncoming creates it. ResumeMigrated
// removes it. Without the file, a later agent could not distinguish such a guest from one that was stopped for a
// snapshot, and would resume it.
//
// At the source, the content of the file is stoppedMark after QEMU has confirmed that the guest is stopped, and that it
// had not yet sent all of its memory. Before that, and at the target, the file is empty.
const (
	migratingName = "migrating"
	stoppedMark   = "stopped\n"
)

// setMigrating creates or replaces the file migratingName.
func (h *Home) setMigrating(content string) error {
	if err := os.WriteFile(h.path(migratingName), []byte(content), 0o600); err != nil {
		return fmt.Errorf("record that a migration stops the guest: %w", err)
	}
	return nil
}

// stoppedSince returns the time at which the guest of a source was stopped for a migration. It returns false if the
// file migratingName does not say that the guest is stopped, or cannot be read.
func (h *Home) stoppedSince() (time.Time, bool) {
	content, err := os.ReadFile(h.path(migratingName))
	if err != nil || string(content) != stoppedMark {
		return time.Time{}, false
	}
	info, err := os.Stat(h.path(migratingName))
	if err != nil {
		return time.Time{}, false
	}
	return info.ModTime(), true
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
// The parameter keys has the LUKS passphrases of the disks of Spec.ReopenedDisks, by disk ID.
func (p *Process) ResumeMigrated(ctx context.Context, keys map[string]Key) error {
	// The file is removed last, so that the caller can repeat the call after an error.
	if err := p.withKeys(ctx, keys, func() error { return p.resume(ctx) }); err != nil {
		return err
	}
	if err := os.Remove(p.home.path(migratingName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("resume guest after a migration: %w", err)
	}
	// QEMU may have refused to remove the hold node in CancelMigration or EndIncoming. If it refuses again, SendRunning
	// repeats the removal.
	_ = p.removeHold(ctx)
	return nil
}

// machineVersion is the highest version of the format that Machine returns. Agents of earlier versions ignore the fields
// that a later version has added to Spec, and would start another machine. Version 2 added Display, Hugepages and
// DedicatedCPUs. Version 3 has UEFI or TPM.
const machineVersion = 3

// machine is the format of the result of Process.Machine.
type machine struct {
	Version int  `json:"version"`
	Spec    Spec `json:"spec"`
}

// Machine returns a description of the running QEMU for ParseMachine. It contains the Spec with the slots of all
// devices, and the number of root ports with which QEMU was started. Machine returns an error if the home has state that
// a migration would not move.
func (p *Process) Machine() ([]byte, error) {
	r := p.Record()
	s := r.Spec
	if err := p.checkTPM(); err != nil {
		return nil, err
	}
	if s.UEFI && s.CodeBytes == 0 {
		return nil, errors.New("an agent of an earlier version has started the VM with UEFI: stop and start the VM")
	}
	if err := p.home.checkIdleState(s); err != nil {
		return nil, err
	}
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
	switch {
	case s.UEFI || s.TPM:
		version = 3
	case s.Display || s.Hugepages || s.DedicatedCPUs:
		version = 2
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
	Mirrors               []Mirror
	Memory                Memory
}

// Memory is the progress of a source that sends the guest's memory.
type Memory struct {
	// Elapsed is the time since QEMU began to send.
	Elapsed time.Duration
	// Pass counts the passes over the memory. Each pass sends the pages that the guest has written during the pass before
	// it. The first pass sends all pages.
	Pass uint64
	// Remaining is the part of the present pass that has not been sent, in bytes. Sent is the number of bytes that QEMU
	// has written in all passes. SentByChannels is the part of Sent that QEMU has not sent over its main connection.
	Remaining, Sent, SentByChannels uint64
	// DirtyRate is the number of bytes per second in pages that the guest writes. QEMU measures it once a second at most,
	// from the second pass on.
	DirtyRate uint64
	// Rate is the number of bytes per second that QEMU has sent in its last interval of 100 ms.
	Rate uint64
}

// Mirror is a job of the source that copies a disk or the NVRAM to the target.
type Mirror struct {
	node         string // the copied node
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
		Status  string `json:"status"`
		Error   string `json:"error-desc"`
		Elapsed uint64 `json:"total-time"` // in milliseconds
		RAM     struct {
			Total       uint64  `json:"total"`
			Remaining   uint64  `json:"remaining"`
			Transferred uint64  `json:"transferred"`
			Channels    uint64  `json:"multifd-bytes"`
			Pass        uint64  `json:"dirty-sync-count"`
			DirtyPages  uint64  `json:"dirty-pages-rate"`
			PageSize    uint64  `json:"page-size"`
			Mbps        float64 `json:"mbps"`
		} `json:"ram"`
	}
	if err := conn.Do(ctx, "query-migrate", nil, &info); err != nil {
		// QEMU refuses the command only before the end of preconfig: the agent that started QEMU ended before it called
		// configure. There is no migration then.
		return Migration{}, refused(err)
	}
	m := Migration{Status: info.Status, Error: printable(info.Error, 300)}
	m.Memory = Memory{
		Elapsed: time.Duration(info.Elapsed) * time.Millisecond, Pass: info.RAM.Pass, Remaining: info.RAM.Remaining,
		Sent: info.RAM.Transferred, SentByChannels: info.RAM.Channels, DirtyRate: info.RAM.DirtyPages * info.RAM.PageSize, Rate: uint64(max(info.RAM.Mbps, 0) * 1e6 / 8),
	}
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

// setCapabilities sets the capabilities of a migration. With return-path, the source reports a migration as completed
// only after the target has confirmed that it has the state. With pause-before-switchover, the source waits for the
// command migrate-continue before it closes the disks and sends the last part of the state. With auto-converge, the
// source slows the CPUs of a guest that writes memory faster than QEMU sends it. The capability events is not set,
// because QEMU would send an event for each pass over the memory of an idle guest: thousands a second. With
// late-block-activate, the target opens its block nodes for writing only when its guest runs. The parameter
// bitmaps sets dirty-bitmaps, with which addHold works. If channels is not 0, QEMU sends or receives the memory over that
// many connections besides the main one (multifd).
func setCapabilities(ctx context.Context, conn *qmp.Conn, bitmaps bool, channels int) error {
	var all []object
	for name, on := range map[string]bool{
		"return-path": true, "pause-before-switchover": true, "auto-converge": true, "events": false,
		"late-block-activate": true, "dirty-bitmaps": bitmaps, "multifd": channels > 0,
	} {
		all = append(all, object{"capability": name, "state": on})
	}
	if err := conn.Do(ctx, "migrate-set-capabilities", object{"capabilities": all}, nil); err != nil || channels == 0 {
		return err
	}
	return conn.Do(ctx, "migrate-set-parameters", object{"multifd-channels": channels}, nil)
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

// StoppedForMigration returns the time at which SendState or StopGuest has stopped the guest of a source. It returns
// false if the guest may have run until QEMU had sent all of its memory. HandOver then returns ErrGuestRan.
func (p *Process) StoppedForMigration() (time.Time, bool) { return p.home.stoppedSince() }

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
