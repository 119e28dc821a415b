package machine

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// rawImage makes the lab provide an image of the format RAW.
func (l *lab) rawImage(data []byte) *agentv1.AssignedImage {
	sum := sha256.Sum256(data)
	l.more[hex.EncodeToString(sum[:])] = data
	return &agentv1.AssignedImage{ImageId: "raw", Sha256: hex.EncodeToString(sum[:]), SizeBytes: uint64(len(data)),
		Format: vmv1.ImageFormat_IMAGE_FORMAT_RAW}
}

// TestBootFromCDROM starts a VM with an empty disk and a bootable CD-ROM image. It does so for each bus that a CD-ROM
// drive can have.
func TestBootFromCDROM(t *testing.T) {
	l := newLab(t)
	for n, os := range []vmv1.OsType{vmv1.OsType_OS_TYPE_LINUX, vmv1.OsType_OS_TYPE_WINDOWS} {
		want := l.blank(n + 1)
		want.Cdrom, want.OsType = l.rawImage(isoImage(l.image[:512], "")), os
		want = on(want)
		l.assign(want)
		l.sees(want, cloud.ObservedRunning)
		l.says(want.VmId, "GUEST UP", 1)
		l.assign(destroyed(want))
		l.sees(destroyed(want), cloud.ObservedAbsent)
	}
}

// TestRescue starts a VM, whose own disk is not bootable, from a rescue disk. Each start has a new rescue disk. The
// VM's own disk keeps its slot and its content. After the rescue has ended, the VM starts from its own disk.
func TestRescue(t *testing.T) {
	l := newLab(t)
	want := l.blank(1)
	l.assign(want)
	l.sees(want, cloud.ObservedBuilt)
	dir := filepath.Join(l.dir, "vms", want.VmId, "disks")
	own := func() []string {
		all, err := disk.List(dir)
		require.NoError(t, err)
		var ids []string
		for _, d := range all {
			ids = append(ids, d.ID)
		}
		return ids
	}
	require.Equal(t, []string{"root"}, own())

	rescue := on(want)
	image := l.vm(1).Disks[0].Image
	rescue.Rescue = &agentv1.AssignedDisk{Id: cloud.RescueDisk, SizeBytes: image.SizeBytes, Bus: virtio, Cache: writeback, Image: image}
	l.assign(rescue)
	l.sees(rescue, cloud.ObservedRunning)
	l.says(want.VmId, "GUEST UP", 1)
	require.Equal(t, []string{"root", cloud.RescueDisk}, own())
	homes, err := qemu.OpenHomes(filepath.Join(l.dir, "vms"), qemu.FirstUID, qemu.LastUID)
	require.NoError(t, err)
	home, err := homes.Open(want.VmId)
	require.NoError(t, err)
	first := func() string {
		record, err := home.Record()
		require.NoError(t, err)
		return record.Spec.Disks[0].ID
	}
	require.Equal(t, cloud.RescueDisk, first())

	stopped := off(rescue, 0)
	l.assign(stopped)
	l.sees(stopped, cloud.ObservedBuilt)
	again := with(stopped, func(w *agentv1.AssignedVm) {
		w.Power, w.Rescue = agentv1.Power_POWER_ON, nil
		w.Starts++
	})
	l.assign(again)
	l.sees(again, cloud.ObservedRunning)
	require.Equal(t, []string{"root"}, own())
	require.Equal(t, "root", first())
	l.assign(destroyed(again))
	l.sees(destroyed(again), cloud.ObservedAbsent)
}

// tpmCommand returns a shell command that sends a command to the guest's TPM and prints the response in hexadecimal.
func tpmCommand(code uint32, handles []uint32, parameters ...byte) string {
	body := binary.BigEndian.AppendUint32(nil, code)
	for _, h := range handles {
		body = binary.BigEndian.AppendUint32(body, h)
	}
	body = append(body, 0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0) // an empty password
	body = append(body, parameters...)
	all := binary.BigEndian.AppendUint32([]byte{0x80, 0x02}, uint32(len(body)+6))
	var text strings.Builder
	for _, b := range append(all, body...) {
		fmt.Fprintf(&text, `\%03o`, b)
	}
	return `exec 3<>/dev/tpm0; printf '` + text.String() + `' >&3; dd bs=4096 count=1 <&3 2>/dev/null | od -v -An -tx1 | tr -d '\n'`
}

// TestTPMAndCDROM starts Linux with a TPM and a CD-ROM drive, and reads the CD-ROM in the guest. The guest writes a
// value to the TPM. The value can be read after a restart of the agent, after the death of swtpm, and after a stop and
// start of the VM.
func TestTPMAndCDROM(t *testing.T) {
	swtpm, err := exec.LookPath("swtpm")
	if err != nil {
		testenv.Skip(t, err.Error())
	}
	l := newLab(t)
	l.stop()
	l.swtpm = swtpm
	l.start()
	want := l.linux(1)
	want.Tpm, want.Cdrom = true, l.rawImage(isoImage(nil, "HELLO FROM THE CD-ROM\n"))
	want = on(want)
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	l.boots(want, 1)
	run := func(line, answer string, times int) {
		t.Helper()
		l.command(want.VmId, "run "+line, func() { l.says(want.VmId, answer, times) })
	}
	run("mkdir -p /tmp/cd && mount -t iso9660 -o ro /dev/sr0 /tmp/cd && cat /tmp/cd/hello.txt", "OUT HELLO FROM THE CD-ROM", 1)

	const index, owner = 0x01800001, 0x40000001
	const ok = "OUT  80 02 00 00 00 13 00 00 00 00" // the length of the response and no error
	define := []byte{0, 0, 0, 14, 0x01, 0x80, 0x00, 0x01, 0x00, 0x0b, 0x02, 0x06, 0x00, 0x06, 0, 0, 0, 8}
	run(tpmCommand(0x12a, []uint32{owner}, define...), ok, 1)
	run(tpmCommand(0x137, []uint32{index, index}, append(append([]byte{0, 8}, "trivet-1"...), 0, 0)...), ok, 2)
	read, value := tpmCommand(0x14e, []uint32{index, index}, 0, 8, 0, 0), "74 72 69 76 65 74 2d 31"
	run(read, value, 1)

	l.stop()
	l.start()
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	run(read, value, 2)

	homes, err := qemu.OpenHomes(filepath.Join(l.dir, "vms"), qemu.FirstUID, qemu.LastUID)
	require.NoError(t, err)
	home, err := homes.Open(want.VmId)
	require.NoError(t, err)
	record, err := home.Record()
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(record.TPM.PID, syscall.SIGKILL))
	o := l.until(cloud.VMID(want.VmId), "running without a TPM", func(o cloud.Observation) bool { return o.LastError != "" })
	require.Equal(t, cloud.ObservedRunning, o.Observed)
	require.Equal(t, "the process of the VM's TPM has ended: stop and start the VM to get the TPM back", o.LastError)

	stopped := off(want, 0)
	l.assign(stopped)
	l.sees(stopped, cloud.ObservedBuilt)
	want = on(stopped)
	l.assign(want)
	l.sees(want, cloud.ObservedRunning)
	l.boots(want, 2)
	run(read, value, 3)
	l.assign(destroyed(want))
	l.sees(destroyed(want), cloud.ObservedAbsent)
	require.NoDirExists(t, filepath.Join(l.dir, "vms", want.VmId))
}
