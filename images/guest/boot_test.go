package guest

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const gib = 1 << 30

func TestManifestDescribesTheFiles(t *testing.T) {
	img := build(t)
	require.Len(t, img.Files, 3)
	for _, file := range img.Files {
		f, err := os.Open(filepath.Join(img.dir, file.Name))
		require.NoError(t, err)
		h := sha256.New()
		n, err := io.Copy(h, f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.Equal(t, file.Bytes, n, file.Name)
		require.Equal(t, file.SHA256, hex.EncodeToString(h.Sum(nil)), file.Name)
	}
	// A second build with the same inputs does not replace the files.
	before, err := os.Stat(filepath.Join(img.dir, "manifest.json"))
	require.NoError(t, err)
	build(t)
	after, err := os.Stat(filepath.Join(img.dir, "manifest.json"))
	require.NoError(t, err)
	require.True(t, os.SameFile(before, after))
}

// TestGuestBootsFromItsDisk boots the guest from its disk on each kind of controller. It checks the line READY, which
// the guest prints when it accepts commands, that the data partition is mounted, and that the power button ends the
// guest.
func TestGuestBootsFromItsDisk(t *testing.T) {
	img := build(t)
	for name, c := range map[string]struct {
		machine string
		device  []string
		disk    string
	}{
		"virtio": {"q35", []string{"-device", "virtio-blk-pci,drive=disk"}, "vda"},
		"scsi":   {"q35", []string{"-device", "virtio-scsi-pci", "-device", "scsi-hd,drive=disk"}, "sda"},
		"ide":    {"pc", []string{"-device", "ide-hd,drive=disk"}, "sda"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			bootFromDisk(t, img, c.machine, c.device, c.disk)
		})
	}
}

// TestFullKernelBootsFromSATA makes the checks of TestGuestBootsFromItsDisk with a disk at a SATA controller, and with
// Debian's full kernel, because the default kernel has no driver for SATA.
func TestFullKernelBootsFromSATA(t *testing.T) {
	if testing.Short() {
		t.Skip("a second image takes time")
	}
	t.Parallel()
	img := buildWith(t, "-full", "linux-image-amd64")
	bootFromDisk(t, img, "q35", []string{"-device", "ide-hd,drive=disk"}, "sda")
}

func bootFromDisk(t *testing.T, img image, machine string, device []string, disk string) {
	drive := "file=" + img.overlay(t) + ",format=qcow2,if=none,id=disk"
	m := start(t, append([]string{"-machine", machine, "-drive", drive}, device...)...)
	ready := m.ready()
	require.Equal(t, 1, ready.CPUs)
	require.Equal(t, []Disk{{disk, gib / SectorSize}}, ready.Disks)

	m.tell("run echo kept >/data/file && sync && grep /data /proc/mounts")
	require.Contains(t, m.hear("OUT"), "/dev/"+disk+"2 /data ext4 ")
	require.Equal(t, "rc=0", m.hear("RAN"))

	m.do("system_powerdown", nil)
	m.hear("POWERBUTTON")
	require.NoError(t, m.ended())
	require.Equal(t, 1, m.count("READY"), "the guest must print READY once")
	require.Zero(t, m.count("ERROR"))
}

// TestGuestCommands boots the guest's kernel without its disk. It checks hotplug of a disk, that data reported as
// written is on the disk, the guest's commands and their errors, the line UP that the guest prints repeatedly, and the
// power button.
func TestGuestCommands(t *testing.T) {
	t.Parallel()
	img := build(t)
	file := filepath.Join(t.TempDir(), "blank.raw")
	disk, err := os.Create(file)
	require.NoError(t, err)
	defer disk.Close()
	require.NoError(t, disk.Truncate(gib))

	m := start(t, append(img.direct(), "-machine", "q35", "-device", "pcie-root-port,id=root1")...)
	ready := m.ready()
	require.Empty(t, ready.Disks)
	require.Equal(t, "boot_id="+ready.BootID, strings.Fields(m.ask("id", "ID"))[0])

	m.do("blockdev-add", map[string]any{"driver": "file", "node-name": "late", "filename": file})
	m.do("device_add", map[string]any{"driver": "virtio-blk-pci", "id": "late", "drive": "late", "bus": "root1"})
	for m.ask("disks", "DISKS") != fmt.Sprintf("disks=vda:%d", gib/SectorSize) {
		// Repeat until the guest has found the disk. The machine's deadline ends the loop.
	}

	const off, length = 768 << 20, 192 << 10
	want := make([]byte, length)
	Pattern(want, "red", off)
	sum := fmt.Sprintf("dev=vda off=%d len=%d sha256=%x", off, length, sha256.Sum256(want))
	answer := m.ask(fmt.Sprintf("write vda red %d %d", off, length), "WROTE")
	require.Equal(t, sum, strings.Replace(answer, " seed=red", "", 1))
	got := make([]byte, length)
	_, err = disk.ReadAt(got, off)
	require.NoError(t, err)
	require.Equal(t, want, got, "data that the guest reported as written must be on the disk")
	require.Equal(t, sum, m.ask(fmt.Sprintf("sum /dev/vda %d %d", off, length), "SUM"))

	for line, complaint := range map[string]string{
		"dance":                "dance: unknown command",
		"write vda":            "write: usage: write DEV SEED",
		"sum vdz":              "sum: open /dev/vdz",
		"sum ttyS0":            "sum:", // a character device
		"sum vda 1":            `sum: "1" is not a multiple`,
		"sum vda 1073741824":   "sum: vda ends at byte 1073741824",
		"spew 1000000":         "spew:",
		"run":                  "run: usage",
		"write ../vda x 0 512": "write: \"../vda\" is no device name",
	} {
		require.True(t, strings.HasPrefix(m.ask(line, "ERROR "), complaint), line)
	}
	require.Equal(t, "rc=3", m.ask("run exit 3", "RAN"))

	require.Equal(t, "kib=64", m.ask("spew 64", "SPEWED"))
	require.Equal(t, 1024, m.count("SPEW "), "the guest must print every line complete")

	m.ask("deaf", "DEAF")
	m.do("system_powerdown", nil)
	m.hear("POWERBUTTON ignored")
	require.Contains(t, m.hear("UP"), "boot_id="+ready.BootID)
	m.ask("off", "OFF")
	require.NoError(t, m.ended())
}

// TestGuestCrashesAndReboots checks that QEMU reports a panic of the guest through its pvpanic device, and that the
// guest reboots on Ctrl-Alt-Del.
func TestGuestCrashesAndReboots(t *testing.T) {
	img := build(t)
	t.Run("crash", func(t *testing.T) {
		t.Parallel()
		m := start(t, append(img.direct(), "-machine", "q35", "-device", "pvpanic-pci")...)
		m.ready()
		m.ask("crash", "CRASH")
		m.event("GUEST_PANICKED")
		require.NoError(t, m.ended())
	})
	t.Run("ctrl-alt-del", func(t *testing.T) {
		t.Parallel()
		m := start(t, append(img.direct(), "-machine", "q35")...)
		m.ready()
		keys := []map[string]string{}
		for _, key := range []string{"ctrl", "alt", "delete"} {
			keys = append(keys, map[string]string{"type": "qcode", "data": key})
		}
		m.do("send-key", map[string]any{"keys": keys})
		m.hear("REBOOT")
		require.NoError(t, m.ended(), "QEMU must end at the reboot, because of -no-reboot")
	})
}
