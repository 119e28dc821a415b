package facts

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Firmware contains the paths of the files of a UEFI firmware for guests. The paths are those of QEMU's firmware
// descriptors. If the host has no such firmware, Problem is the reason, and the paths are empty.
type Firmware struct {
	Code      string // the firmware
	Variables string // the initial content of an NVRAM
	Problem   string
}

// Machines describes the optional features of virtual machines that the host can serve.
type Machines struct {
	UEFI       Firmware // without secure boot
	SecureUEFI Firmware // with secure boot and enrolled keys
	SWTPM      string   // path of swtpm, which emulates TPMs
	TPMProblem string   // why SWTPM is empty
}

// descriptorDirs are the directories of QEMU's firmware descriptors (docs/interop/firmware.json of QEMU). A file in a
// later directory replaces the one of the same name in an earlier directory.
var descriptorDirs = []string{"/usr/share/qemu/firmware", "/etc/qemu/firmware"}

// ReadMachines finds the firmware and the TPM emulator of this host. The parameter machine is the versioned machine
// type of guests, and arch the architecture of the host.
func ReadMachines(machine, arch string, accel Kind) Machines {
	m := Machines{
		UEFI:       findFirmware(descriptorDirs, machine, arch, false),
		SecureUEFI: findFirmware(descriptorDirs, machine, arch, true),
	}
	if accel == KVM && m.SecureUEFI.Problem == "" && !hasSMM() {
		m.SecureUEFI = Firmware{Problem: "KVM on this host does not support system management mode (SMM)"}
	}
	swtpm, err := exec.LookPath("swtpm")
	if err != nil {
		m.TPMProblem = "swtpm is not installed"
		return m
	}
	m.SWTPM = swtpm
	return m
}

// descriptor is the part of a firmware descriptor that findFirmware uses.
type descriptor struct {
	Interfaces []string `json:"interface-types"`
	Mapping    struct {
		Device     string
		Executable struct{ Filename, Format string }
		NVRAM      struct{ Filename, Format string } `json:"nvram-template"`
	}
	Targets []struct {
		Architecture string
		Machines     []string
	}
	Features []string
}

// findFirmware returns the first UEFI firmware for the machine type, in the order of the file names of the descriptors
// in dirs. If secure is true, the firmware must have secure boot with enrolled keys. Otherwise it must not have secure
// boot.
func findFirmware(dirs []string, machine, arch string, secure bool) Firmware {
	files := map[string]string{} // by file name
	for _, dir := range dirs {
		found, _ := filepath.Glob(filepath.Join(dir, "*.json")) // The only possible error is a malformed pattern.
		for _, file := range found {
			files[filepath.Base(file)] = file
		}
	}
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		text, err := os.ReadFile(files[name])
		var d descriptor
		if err != nil || json.Unmarshal(text, &d) != nil || !d.fits(machine, arch, secure) {
			continue
		}
		f := Firmware{Code: d.Mapping.Executable.Filename, Variables: d.Mapping.NVRAM.Filename}
		if isFile(f.Code) && isFile(f.Variables) {
			return f
		}
	}
	what := "UEFI firmware"
	if secure {
		what = "UEFI firmware with secure boot and enrolled keys"
	}
	return Firmware{Problem: fmt.Sprintf("no %s for %s is installed", what, machine)}
}

func (d *descriptor) fits(machine, arch string, secure bool) bool {
	has := func(feature string) bool { return slices.Contains(d.Features, feature) }
	if d.Mapping.Device != "flash" || !slices.Contains(d.Interfaces, "uefi") ||
		d.Mapping.Executable.Format != "raw" || d.Mapping.NVRAM.Format != "raw" {
		return false
	}
	if secure && !(has("secure-boot") && has("enrolled-keys") && has("requires-smm")) || !secure && has("secure-boot") {
		return false
	}
	for _, t := range d.Targets {
		if t.Architecture != arch {
			continue
		}
		for _, pattern := range t.Machines {
			if ok, err := path.Match(pattern, machine); ok && err == nil {
				return true
			}
		}
	}
	return false
}

func isFile(path string) bool {
	st, err := os.Stat(path)
	return err == nil && st.Mode().IsRegular() && strings.HasPrefix(path, "/")
}

// kvmCapSMM is KVM_CAP_X86_SMM.
const kvmCapSMM = 117

// hasSMM reports whether guests of KVM have the system management mode, in which a firmware with secure boot protects
// its keys.
func hasSMM() bool {
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(kvm)
	n, err := ioctl(kvm, kvmCheckExtension, kvmCapSMM)
	return err == nil && n > 0
}
