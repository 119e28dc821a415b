package qemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// incompleteName is the name of a file in the VM's home. While the file exists, the host is or was the target of a
// migration, and has not received the complete NVRAM and state of the TPM. The files in the home must then not be used
// for a start.
const incompleteName = "firmware-incomplete"

// errIncomplete means that the VM must not be started from its home, because the file incompleteName exists. A start
// would create a new TPM. The UEFI firmware would start with an empty or incomplete NVRAM, and with secure boot perhaps
// without the keys.
var errIncomplete = invalid("this host has only a part of the VM's UEFI variables and TPM state, because a migration " +
	"to this host failed: to start the VM without them, the operator must remove the file firmware-incomplete (see " +
	"docs/machines.md, Migration)")

// beginFirmware must be called before a start with the firmware or the TPM of r.Spec changes the NVRAM or the state of
// the TPM. For the target of a migration, beginFirmware creates the file incompleteName. For any other start, it
// returns errIncomplete if this file exists.
func (h *Home) beginFirmware(r Record) error {
	if !r.Spec.UEFI && !r.Spec.TPM {
		return nil
	}
	if r.Incoming {
		return atomicfile.WriteFile(h.path(incompleteName), nil, 0o600)
	}
	_, err := os.Stat(h.path(incompleteName))
	switch {
	case errors.Is(err, fs.ErrNotExist) || mutant.On(mutant.StartIncomplete):
		return nil
	case err != nil:
		return err
	}
	return errIncomplete
}

// clearTPM deletes the state of the VM's TPM. The target of a migration calls it before it starts swtpm, which gets the
// state from the source.
func (h *Home) clearTPM() error {
	entries, err := os.ReadDir(h.tpmDir("state"))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(h.tpmDir("state", e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// checkIdleState returns an error if the home has firmware state that the process of s does not use: the NVRAM of
// starts with another value of SecureBoot or without UEFI, or the state of a TPM that the VM does not have now. A
// migration moves only the state that the process uses, and the home of the source is deleted afterwards.
func (h *Home) checkIdleState(s Spec) error {
	for _, one := range []struct {
		path, text string
		used       bool
	}{
		{h.path(nvramName), "the UEFI variables of starts without secure boot", s.UEFI && !s.SecureBoot},
		{h.path(secureNVRAMName), "the UEFI variables of starts with secure boot", s.SecureBoot},
		{h.tpmDir("state", tpmStateFile), "the state of a TPM that it does not use now", s.TPM},
	} {
		_, err := os.Stat(one.path)
		switch {
		case one.used || errors.Is(err, fs.ErrNotExist):
		case err != nil:
			return err
		default:
			return errors.New("the VM has " + one.text + ", which a migration would not move")
		}
	}
	return nil
}

// SyncFirmware writes the NVRAM and the state of the TPM of a migration's target to stable storage. QEMU must have the
// complete state of the guest, and the guest must not run yet. SyncFirmware returns an error if the TPM has no state.
// Until SyncFirmware succeeds, Launch refuses to start the VM from this home.
// The source's copy may be deleted only after SyncFirmware has succeeded.
func (p *Process) SyncFirmware() error {
	h, s := p.home, p.Record().Spec
	var paths []string
	if s.UEFI {
		paths = append(paths, h.path(nvramName))
		if s.SecureBoot {
			paths[0] = h.path(secureNVRAMName)
		}
	}
	if s.TPM {
		paths = append(paths, h.tpmDir("state", tpmStateFile))
	}
	for _, path := range paths {
		if err := syncFile(path); err != nil {
			if mutant.On(mutant.AcceptUnsynced) {
				continue
			}
			return fmt.Errorf("sync the state of the firmware: %w", err)
		}
	}
	err := os.Remove(h.path(incompleteName))
	if err == nil {
		err = atomicfile.SyncDir(h.dir)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("record that the state of the firmware is complete: %w", err)
	}
	return nil
}

// syncFile writes a file and its directory to stable storage. The file can belong to swtpm. If a hostile swtpm has replaced
// it by a link or a named pipe, syncFile does not follow the link, and does not wait for a writer of the pipe.
func syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := f.Sync(); err != nil {
		return err
	}
	return atomicfile.SyncDir(filepath.Dir(path))
}
