package qemu

import (
	"bytes"
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// efi is a UEFI program that has no signature (see testdata/efi.s).
//
//go:embed testdata/efi.bin
var efi []byte

// uefiLab returns a lab whose host serves UEFI and secure boot with Debian's OVMF.
func uefiLab(t *testing.T) *lab {
	t.Helper()
	l := newLab(t)
	const dir = "/usr/share/OVMF/"
	l.launcher.UEFI = Firmware{dir + "OVMF_CODE_4M.fd", dir + "OVMF_VARS_4M.fd"}
	l.launcher.SecureUEFI = Firmware{dir + "OVMF_CODE_4M.ms.fd", dir + "OVMF_VARS_4M.ms.fd"}
	if _, err := os.Stat(l.launcher.SecureUEFI.Code); err != nil {
		skip(t, err.Error())
	}
	return l
}

// efiDisk returns the spec and the files of a VM with UEFI. Its disk is a FAT file system with the program as boot
// loader.
func (l *lab) efiDisk(program []byte) (Spec, Files) {
	l.Helper()
	image := l.efiImage(program)
	s, files := spec(), Files{}
	s.UEFI, s.MemoryMiB = true, 128
	l.disk(&s, &files, Disk{ID: "root", Bus: Virtio, Slot: -1, Cache: Writeback, Base: qcow2.Raw})
	layers := files.Disks["root"]
	base, err := os.Open(image)
	require.NoError(l, err)
	l.Cleanup(func() { _ = base.Close() })
	layers.Base = base
	files.Disks["root"] = layers
	return s, files
}

// efiImage returns the path of an image that contains a FAT file system with the program as boot loader.
func (l *lab) efiImage(content []byte) string {
	l.Helper()
	dir := l.TempDir()
	image, program := filepath.Join(dir, "image"), filepath.Join(dir, "BOOTX64.EFI")
	require.NoError(l, os.WriteFile(program, content, 0o600))
	for _, args := range [][]string{
		{"mformat", "-i", image, "-C", "-f", "1440", "::"}, {"mmd", "-i", image, "::/EFI", "::/EFI/BOOT"},
		{"mcopy", "-i", image, program, "::/EFI/BOOT/BOOTX64.EFI"},
	} {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(l, err, "%s: %s", args[0], out)
	}
	return image
}

// TestUEFI starts a VM with UEFI twice. The second start finds the NVRAM that the first one wrote.
func TestUEFI(t *testing.T) {
	l := uefiLab(t)
	s, files := l.efiDisk(efi)
	for _, text := range []string{"EFI UP boots=1 secure=0\n", "EFI UP boots=2 secure=0\n"} {
		p := l.launch(s, files)
		require.NoError(t, p.Resume(l.ctx))
		require.Equal(t, Guest, l.exited(p).Reason)
		l.says(text)
	}
	_, err := os.Stat(l.home.path(secureNVRAMName))
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, l.home.Remove())
	_, err = os.Stat(l.home.path(nvramName))
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestSecureBoot checks that a firmware with secure boot does not start a program without a signature. TestUEFI starts
// the same program from the same disk without secure boot. TestSecureBoot also checks that a start with secure boot
// does not use the NVRAM of a start without it.
func TestSecureBoot(t *testing.T) {
	l := uefiLab(t)
	s, files := l.efiDisk(efi)
	s.SecureBoot = true
	require.NoError(t, os.WriteFile(l.home.path(nvramName), []byte("of a start without secure boot"), 0o600))
	p := l.launch(s, files)
	require.NoError(t, p.Resume(l.ctx))
	var console []byte
	l.eventually(func() bool {
		console, _ = l.home.Console().Tail(1 << 20)
		return bytes.Contains(console, []byte("Access Denied")) || bytes.Contains(console, []byte("EFI UP"))
	}, "the firmware refuses the program")
	require.NotContains(t, string(console), "EFI UP", "a program without a signature was started")
	require.NoError(t, p.PowerOff(l.ctx))
}

// TestHostWithoutFirmware checks that a host without OVMF and swtpm refuses VMs that need them, and changes nothing.
func TestHostWithoutFirmware(t *testing.T) {
	l := newLab(t)
	for text, change := range map[string]func(*Spec){
		"does not serve UEFI":        func(s *Spec) { s.UEFI = true },
		"does not serve secure boot": func(s *Spec) { s.UEFI, s.SecureBoot = true, true },
		"does not serve TPMs":        func(s *Spec) { s.TPM = true },
		"does not offer the CPU":     func(s *Spec) { s.CPUModel = "other" },
	} {
		s := spec()
		change(&s)
		_, err := l.launcher.Launch(l.ctx, l.home, s, Files{}, 1, "test")
		require.ErrorIs(t, err, ErrInvalid)
		require.ErrorContains(t, err, text)
		_, err = l.home.Record()
		require.ErrorIs(t, err, ErrNotStarted)
	}
}
