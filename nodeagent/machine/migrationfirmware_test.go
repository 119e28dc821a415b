package machine

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// runs starts the VM at the source, and waits until its guest has printed the text.
func (m *move) runs(vm *agentv1.AssignedVm, text string) {
	m.Helper()
	for sum, data := range m.source.more {
		m.target.more[sum] = data
	}
	m.vm = on(vm)
	m.generation = m.vm.Generation
	m.source.assign(m.vm)
	m.source.sees(m.vm, cloud.ObservedRunning)
	require.Eventually(m, func() bool { return m.source.said(m.vm.VmId, text) > 0 }, 3*time.Minute, 10*time.Millisecond,
		"the guest says %q", text) // UEFI boots slowly on a busy host.
}

// moved runs the whole migration.
func (m *move) moved() {
	m.Helper()
	m.atSwitchover()
	m.enter(switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
}

// types writes a command to the guest's serial port, and waits until the console log has the text count times.
func (m *move) types(l *lab, command, text string, count int) {
	m.Helper()
	conn := dialConsole(m.T, l.homeDir(m.vm.VmId))
	defer conn.Close()
	_, err := conn.Write([]byte(command))
	require.NoError(m, err)
	l.says(m.vm.VmId, text, count)
}

// TestMigrationOfCDROM moves a guest that was booted from a CD-ROM. At the target, the guest can boot from it again.
func TestMigrationOfCDROM(t *testing.T) {
	m := newHosts(t, nil)
	m.answers = func(l *lab) { m.types(l, "x", "x", l.said(m.vm.VmId, "x")+1) }
	vm := m.source.blank(1)
	vm.Cdrom = m.source.rawImage(isoImage(m.source.image[:512], ""))
	m.runs(vm, "GUEST UP")
	m.moved()
	m.target.assign(with(m.vm, func(w *agentv1.AssignedVm) { w.Resets++ }))
	m.target.says(m.vm.VmId, "GUEST UP", 1)
}

// TestMigrationOfRescuedVM moves a guest that was booted from a rescue disk. The rescue disk is copied to the target.
func TestMigrationOfRescuedVM(t *testing.T) {
	m := newHosts(t, nil)
	vm, image := m.source.blank(1), m.source.vm(1).Disks[0].Image
	vm.Rescue = &agentv1.AssignedDisk{Id: cloud.RescueDisk, SizeBytes: image.SizeBytes, Bus: virtio, Cache: writeback, Image: image}
	m.runs(vm, "GUEST UP")
	m.writes(m.source)
	m.moved()
	m.vm = with(m.vm, func(w *agentv1.AssignedVm) { w.Resets++ })
	m.target.assign(m.vm)
	m.target.says(m.vm.VmId, "GUEST UP", 1)
	require.FileExists(t, filepath.Join(m.target.homeDir(m.vm.VmId), "disks", cloud.RescueDisk+".qcow2"))
	m.source, m.target, m.generation, m.attempt = m.target, m.source, m.vm.Generation, 8
	m.moved()
}

// TestMigrationOfFirmware moves a guest with UEFI and a TPM, which shows its variable and its TPM at each host. The
// first attempt ends with a rollback, and the second one with a restart of both agents before the guest runs.
func TestMigrationOfFirmware(t *testing.T) {
	swtpm, err := exec.LookPath("swtpm")
	if err != nil {
		testenv.Skip(t, err.Error())
	}
	const ovmf = "/usr/share/OVMF/"
	if _, err := os.Stat(ovmf + "OVMF_CODE_4M.fd"); err != nil {
		testenv.Skip(t, err.Error())
	}
	m := newHosts(t, nil)
	for _, l := range []*lab{m.source, m.target} {
		l.stop()
		l.swtpm, l.uefi = swtpm, qemu.Firmware{Code: ovmf + "OVMF_CODE_4M.fd", Variables: ovmf + "OVMF_VARS_4M.fd"}
		l.start()
		l.SetGuarded(true)
	}
	m.answers = func(l *lab) {
		m.types(l, "v", "EFI UP boots=1 ", l.said(m.vm.VmId, "EFI UP boots=1 ")+1)
		m.types(l, getRandom, "80010000001400000000", l.said(m.vm.VmId, "80010000001400000000")+1)
	}
	vm := m.source.blank(1)
	vm.MemoryMib, vm.Firmware, vm.Tpm = 128, agentv1.Firmware_FIRMWARE_UEFI, true
	vm.Disks[0].Image = m.source.rawImage(efiImage(t))
	m.runs(vm, "EFI UP boots=1 ")
	m.answers(m.source)

	m.atSwitchover()
	m.enterAt(m.source, switchover)
	m.reports(m.target, cloud.MigrationReceived)
	kill(t, m.target.qemuOnly(m.vm.VmId))
	m.reports(m.target, cloud.MigrationFailed)
	m.enterAt(m.source, rollback)
	m.reports(m.source, cloud.MigrationRunning)
	m.aborted()

	m.attempt++
	m.atSwitchover()
	m.enterAt(m.source, switchover)
	m.reports(m.target, cloud.MigrationReceived)
	m.restart(m.source)
	m.phase = transferIt
	m.restart(m.target)
	m.reports(m.target, cloud.MigrationReceived)
	m.enterAt(m.target, switchover)
	m.reports(m.target, cloud.MigrationRunning)
	m.settled()
	require.NoDirExists(t, m.source.homeDir(m.vm.VmId))
}

// getRandom is a command of the program efiwait of package qemu, which requests 8 random bytes from the TPM.
const getRandom = "t\x0c\x80\x01\x00\x00\x00\x0c\x00\x00\x01\x7b\x00\x08"

// efiImage returns a FAT file system with the program efiwait of package qemu as boot loader.
func efiImage(t *testing.T) []byte {
	t.Helper()
	image := filepath.Join(t.TempDir(), "image")
	for _, args := range [][]string{
		{"mformat", "-i", image, "-C", "-f", "1440", "::"}, {"mmd", "-i", image, "::/EFI", "::/EFI/BOOT"},
		{"mcopy", "-i", image, "../qemu/testdata/efiwait.bin", "::/EFI/BOOT/BOOTX64.EFI"},
	} {
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, "%s: %s", args[0], out)
	}
	data, err := os.ReadFile(image)
	require.NoError(t, err)
	return data
}

// qemuOnly returns the pid of the VM's QEMU. Unlike qemu, it allows a process of a TPM.
func (l *lab) qemuOnly(id string) int {
	l.Helper()
	for _, v := range l.machines() {
		v.mu.Lock()
		p := v.process
		v.mu.Unlock()
		if p != nil && string(v.id) == id {
			return p.Record().PID
		}
	}
	l.Fatal("no process")
	return 0
}
