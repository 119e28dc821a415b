package qemu

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Firmware contains the paths of the files of a UEFI firmware on the host. Both files are raw flash images.
type Firmware struct {
	Code string // the firmware, which all VMs share
	// Variables is the initial content of a VM's NVRAM. For secure boot, it must contain the keys with which the
	// firmware verifies boot loaders.
	Variables string
}

// Names of the files in a VM's home that contain the NVRAM of its UEFI firmware. Starts with secure boot use the second
// file. The files are separate, so that a guest that was started without secure boot cannot change the keys for later
// starts with secure boot.
const (
	nvramName       = "nvram.fd"
	secureNVRAMName = "nvram-secure.fd"
)

// CheckHost returns an error that wraps [ErrInvalid] if this host cannot run s, because it lacks the CPU model, the
// firmware or the TPM emulator.
func (l *Launcher) CheckHost(s Spec) error {
	offered := false
	for _, m := range l.CPUModels {
		offered = offered || m == s.CPUModel
	}
	switch {
	case !offered:
		return invalid("this host does not offer the CPU model %q", s.CPUModel)
	case s.UEFI && !s.SecureBoot && l.UEFI.Code == "":
		return invalid("this host does not serve UEFI")
	case s.SecureBoot && l.SecureUEFI.Code == "":
		return invalid("this host does not serve secure boot")
	case s.TPM && l.SWTPM == "":
		return invalid("this host does not serve TPMs")
	}
	return nil
}

// openFirmware opens the code and the NVRAM of the firmware of r.Spec, in this order, and sets their sizes in r.Spec.
// If the VM has no NVRAM yet, openFirmware creates it. For the target of a migration, it creates an empty NVRAM of the
// size at the source. It returns no files for a VM without UEFI. The caller closes the files.
func (l *Launcher) openFirmware(home *Home, r *Record) (files []*os.File, err error) {
	s := &r.Spec
	if !s.UEFI {
		return nil, nil
	}
	firmware, name := l.UEFI, nvramName
	if s.SecureBoot {
		firmware, name = l.SecureUEFI, secureNVRAMName
		if mutant.On(mutant.BootWithoutKeys) {
			firmware.Variables = l.UEFI.Variables
		}
	}
	code, err := os.Open(firmware.Code)
	if err != nil {
		return nil, fmt.Errorf("open firmware: %w", err)
	}
	files = append(files, code)
	defer func() {
		if err != nil {
			closeAll(files...)
		}
	}()
	info, err := code.Stat()
	if err != nil {
		return nil, fmt.Errorf("open firmware: %w", err)
	}
	if s.CodeBytes != 0 && s.CodeBytes != info.Size() {
		return nil, invalid("the UEFI firmware of this host has %d bytes, and that of the source has %d", info.Size(), s.CodeBytes)
	}
	if r.Incoming {
		err = home.makeEmptyNVRAM(name, s.NVRAMBytes)
	}
	var nvram *os.File
	if err == nil {
		nvram, err = home.openNVRAM(name, firmware.Variables)
	}
	if err != nil {
		return nil, fmt.Errorf("open NVRAM: %w", err)
	}
	files = append(files, nvram)
	s.CodeBytes = info.Size()
	if info, err = nvram.Stat(); err != nil {
		return nil, fmt.Errorf("open NVRAM: %w", err)
	}
	s.NVRAMBytes = info.Size()
	return files, nil
}

// makeEmptyNVRAM replaces the file of the given name by one of size bytes, for the target of a migration.
func (h *Home) makeEmptyNVRAM(name string, size int64) error {
	return atomicfile.Write(h.path(name), 0o600, func(to *os.File) error { return to.Truncate(size) })
}

// openNVRAM opens the file of the given name in the home. If the file does not exist, openNVRAM creates it as a copy of
// the file at the path initial.
func (h *Home) openNVRAM(name, initial string) (*os.File, error) {
	f, err := os.OpenFile(h.path(name), os.O_RDWR, 0)
	if !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	from, err := os.Open(initial)
	if err != nil {
		return nil, err
	}
	defer from.Close()
	if err := atomicfile.Write(h.path(name), 0o600, func(to *os.File) error {
		_, err := io.Copy(to, from)
		return err
	}); err != nil {
		return nil, err
	}
	return os.OpenFile(h.path(name), os.O_RDWR, 0)
}

// Names of the block nodes of the firmware's flash.
const (
	codeNode  = "firmware-code"
	nvramNode = "firmware-nvram"
)

// firmware adds the flash of a UEFI firmware. The parameter fd is the descriptor of the code. The descriptor of the
// NVRAM is fd+1. With secure boot, only code in system management mode can write to the flash, so that the guest's
// kernel cannot change the keys. Suspend to RAM (S3) is disabled, because under TCG the firmware with secure boot does
// not start if S3 is enabled.
func (a *args) firmware(s Spec, fd int) {
	for i, one := range []struct {
		node     string
		readOnly bool
	}{{codeNode, true}, {nvramNode, false}} {
		a.fdset(fd+i, one.node)
		a.json("-blockdev", object{"driver": "file", "node-name": one.node + "-file", "filename": fdsetPath(fd + i),
			"read-only": one.readOnly, "auto-read-only": false})
		a.json("-blockdev", object{"driver": "raw", "node-name": one.node, "file": one.node + "-file",
			"read-only": one.readOnly, "auto-read-only": false})
	}
	a.add("-global", "ICH9-LPC.disable_s3=1")
	if s.SecureBoot {
		a.add("-global", "driver=cfi.pflash01,property=secure,value=on")
	}
}

// machineFlash returns the options of -machine for the flash of a UEFI firmware.
func (s Spec) machineFlash() string {
	if !s.UEFI {
		return ""
	}
	flash := fmt.Sprintf(",pflash0=%s,pflash1=%s", codeNode, nvramNode)
	if s.SecureBoot {
		flash += ",smm=on"
	}
	return flash
}
