package qemu

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
)

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
			return fmt.Errorf("sync the state of the firmware: %w", err)
		}
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
