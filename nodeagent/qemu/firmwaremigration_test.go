package qemu

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// efiwait is a UEFI program that has no signature and executes commands from the serial port (see testdata/efi.s).
//
//go:embed testdata/efiwait.bin
var efiwait []byte

// firmwareLab returns a lab whose host serves UEFI, secure boot and TPMs. The firmware with secure boot has the key of
// Debian's test certificate, with which signed signs programs.
func firmwareLab(t *testing.T) *lab {
	t.Helper()
	l := uefiLab(t)
	l.launcher.SecureUEFI.Variables = "/usr/share/OVMF/OVMF_VARS_4M.snakeoil.fd"
	var err error
	if l.launcher.SWTPM, err = exec.LookPath("swtpm"); err != nil {
		skip(t, err.Error())
	}
	return l
}

// signed returns the program efiwait with a signature that the firmware of firmwareLab accepts for secure boot.
func signed(t *testing.T) []byte {
	t.Helper()
	if _, err := exec.LookPath("sbsign"); err != nil {
		skip(t, err.Error())
	}
	dir := t.TempDir()
	program, key := filepath.Join(dir, "program"), filepath.Join(dir, "key")
	require.NoError(t, os.WriteFile(program, efiwait, 0o600))
	const certificate = "/usr/share/ovmf/PkKek-1-snakeoil"
	out, err := exec.Command("openssl", "rsa", "-in", certificate+".key", "-passin", "pass:snakeoil", "-out", key).CombinedOutput()
	require.NoError(t, err, "%s", out)
	out, err = exec.Command("sbsign", "--key", key, "--cert", certificate+".pem", "--output", program+".signed", program).CombinedOutput()
	require.NoError(t, err, "%s", out)
	data, err := os.ReadFile(program + ".signed")
	require.NoError(t, err)
	return data
}

// command sends a command to the program efiwait, and waits until the console log has the text count times.
func (l *lab) command(command, text string, count int) {
	l.Helper()
	conn := l.types(command)
	defer conn.Close()
	l.eventually(func() bool { return l.printed(text) >= count }, "the guest says %q %d times", text, count)
}

// tpm sends a command with an empty password to the TPM through the program efiwait, and waits for a response with the
// text in hexadecimal.
func (l *lab) tpm(code uint32, handles []uint32, parameters []byte, text string, count int) {
	l.Helper()
	body := binary.BigEndian.AppendUint32(nil, code)
	for _, h := range handles {
		body = binary.BigEndian.AppendUint32(body, h)
	}
	body = append(body, 0, 0, 0, 9, 0x40, 0, 0, 9, 0, 0, 0, 0, 0)
	body = append(body, parameters...)
	all := append(binary.BigEndian.AppendUint32([]byte{0x80, 0x02}, uint32(len(body)+6)), body...)
	l.command("t"+string([]byte{byte(len(all))})+string(all), text, count)
}

const (
	tpmIndex = 0x01800001 // an NV index
	tpmPCR   = 16         // a PCR that programs may extend
	tpmOK    = "80020000001300000000"
	// extended is the value of the PCR after writeTPM: the SHA-256 of 32 zero bytes and 32 bytes of 7.
	extended = "daf6d3e6ad66990aba2fae6e6c61f18b2d48f0ca6c29d2cfa19ab41f5a865231"
)

// writeTPM writes the value trivet-1 to an NV index, which is part of the TPM's permanent state, and extends a PCR,
// which is part of its volatile state.
func (l *lab) writeTPM() {
	l.Helper()
	index := binary.BigEndian.AppendUint32(nil, tpmIndex)
	public := append(append([]byte{0, 0, 0, 14}, index...), 0x00, 0x0b, 0x02, 0x06, 0x00, 0x06, 0, 0, 0, 8)
	l.tpm(0x12a, []uint32{0x40000001}, public, tpmOK, 1)
	l.tpm(0x137, []uint32{tpmIndex, tpmIndex}, append(append([]byte{0, 8}, "trivet-1"...), 0, 0), tpmOK, 2)
	l.tpm(0x182, []uint32{tpmPCR}, append([]byte{0, 0, 0, 1, 0, 0x0b}, bytes.Repeat([]byte{7}, 32)...), tpmOK, 3)
}

// readsTPM requires that the TPM has the values of writeTPM. It is the count-th call for this console log.
func (l *lab) readsTPM(count int) {
	l.Helper()
	l.tpm(0x14e, []uint32{tpmIndex, tpmIndex}, []byte{0, 8, 0, 0}, hex.EncodeToString([]byte("trivet-1")), count)
	read := binary.BigEndian.AppendUint32(nil, 0x17e) // TPM2_PCR_Read has no password
	read = append(read, 0, 0, 0, 1, 0, 0x0b, 3, 0, 0, 1)
	all := append(binary.BigEndian.AppendUint32([]byte{0x80, 0x01}, uint32(len(read)+6)), read...)
	l.command("t"+string([]byte{byte(len(all))})+string(all), extended, count)
}

// move makes the complete migration.
func (m *migration) move() {
	m.source.Helper()
	m.paused()
	require.NoError(m.source, m.from.HandOver(m.source.ctx))
	m.status(m.from, "completed")
	m.status(m.to, "completed")
	require.NoError(m.source, m.to.SyncFirmware())
	require.NoError(m.source, m.to.EndIncoming(m.target.ctx))
	require.NoError(m.source, m.to.ResumeMigrated(m.target.ctx, nil))
}

// nvram returns the content of the NVRAM of starts with secure boot.
func (l *lab) nvram() []byte {
	l.Helper()
	data, err := os.ReadFile(l.home.path(secureNVRAMName))
	require.NoError(l, err)
	return data
}

// TestMigrateFirmware moves a guest with secure boot and a TPM to another host. The variables and the TPM are
// the same afterwards. The NVRAM is complete at the target before the switchover. Before the
// move, a migration fails after the target has received the state: the guest continues at the source with its
// TPM. After the move, the guest is moved back.
func TestMigrateFirmware(t *testing.T) {
	source := firmwareLab(t)
	s, files := source.efiDisk(signed(t))
	s.SecureBoot, s.TPM = true, true
	p := source.launch(s, files)
	require.NoError(t, p.Resume(source.ctx))
	source.says("EFI UP boots=1 secure=1\n")
	source.writeTPM()
	source.readsTPM(1)

	target := firmwareLab(t)
	m := migrationTo(source, target, p, files)
	m.paused()
	require.True(t, bytes.Equal(source.nvram(), target.nvram()), "the NVRAM is not complete before the switchover")
	require.Error(t, m.to.SyncFirmware(), "the target has no state of the TPM yet")
	require.NoError(t, m.from.HandOver(source.ctx))
	m.status(m.to, "completed")
	require.NoError(t, m.to.SyncFirmware())
	require.NoError(t, m.to.Kill(target.ctx)) // before it has run the guest
	require.NoError(t, m.from.CancelMigration(source.ctx))
	require.NoError(t, m.from.ResumeMigrated(source.ctx, nil))
	source.readsTPM(2)
	source.command("b", "EFI UP boots=2 secure=1\n", 1)

	m = migrationTo(source, target, p, files)
	m.move()
	target.command("v", "EFI UP boots=2 secure=1\n", 1)
	target.readsTPM(1)
	target.command("b", "EFI UP boots=3 secure=1\n", 1)
	require.False(t, bytes.Equal(source.nvram(), target.nvram()), "the NVRAM at the target has the new value")

	// Migrate the guest back to the first host, whose home still has the files from before the migration.
	require.NoError(t, m.from.PowerOff(source.ctx))
	back := migrationTo(target, source, m.to, m.files)
	back.move()
	source.readsTPM(3)
	source.command("b", "EFI UP boots=4 secure=1\n", 1)
	require.NoError(t, m.to.PowerOff(target.ctx))
	require.NoError(t, back.to.PowerOff(source.ctx))
}

// TestIncompleteFirmware kills the target's QEMU twice: before it has received the state of the TPM, and after
// SyncFirmware. The first time, the target must refuse to start the VM, because the VM would get a new TPM. The second
// time, the target must start the VM with the state of the source's TPM.
func TestIncompleteFirmware(t *testing.T) {
	source, s := tpmLab(t)
	target, _ := tpmLab(t)
	p := source.launch(s, Files{})
	require.NoError(t, p.Resume(source.ctx))
	m := migrationTo(source, target, p, Files{})
	m.paused()
	require.Error(t, m.to.SyncFirmware(), "a target without the state of the TPM was accepted")
	require.NoError(t, m.to.Kill(target.ctx))
	start := func() error {
		started, err := target.launcher.Launch(target.ctx, target.home, s, Files{}, 8, "test")
		if err == nil {
			t.Cleanup(started.Close)
			err = started.PowerOff(target.ctx)
		}
		return err
	}
	err := start()
	require.ErrorIs(t, err, errIncomplete, "the VM was started with a new TPM")
	require.ErrorIs(t, err, ErrInvalid)
	require.NoFileExists(t, target.home.tpmDir("state", tpmStateFile))
	require.NoError(t, m.from.CancelMigration(source.ctx))
	require.NoError(t, m.from.ResumeMigrated(source.ctx, nil))

	m = migrationTo(source, target, p, Files{})
	m.paused()
	require.NoError(t, m.from.HandOver(source.ctx))
	m.status(m.to, "completed")
	require.ErrorIs(t, start(), ErrRunning)
	require.NoError(t, m.to.SyncFirmware())
	require.NoError(t, m.to.SyncFirmware(), "a second call of SyncFirmware must succeed")
	require.NoError(t, m.to.Kill(target.ctx))
	require.NoError(t, start())
}

// TestNVRAMIsCopied checks that the target has the whole NVRAM before the switchover. The guest has not run yet.
func TestNVRAMIsCopied(t *testing.T) {
	source, target := uefiLab(t), uefiLab(t)
	s := spec()
	s.UEFI = true
	nvram := bytes.Repeat([]byte("trivet"), 540672/6)
	require.NoError(t, os.WriteFile(source.home.path(nvramName), nvram, 0o600))
	m := migrationTo(source, target, source.launch(s, Files{}), Files{})
	m.paused()
	copied, err := os.ReadFile(target.home.path(nvramName))
	require.NoError(t, err)
	require.True(t, bytes.Equal(nvram, copied), "the NVRAM is not complete before the switchover")
}

// TestMachineOfFirmware checks which VMs with firmware state cannot be described for a migration, and that a target
// refuses firmware of another size.
func TestMachineOfFirmware(t *testing.T) {
	l := uefiLab(t)
	s := spec()
	s.UEFI = true
	p := l.launch(s, Files{})
	text, err := p.Machine()
	require.NoError(t, err)
	require.Contains(t, string(text), `{"version":3,`)
	parsed, err := ParseMachine(text)
	require.NoError(t, err)
	require.Equal(t, []int64{3653632, 540672}, []int64{parsed.CodeBytes, parsed.NVRAMBytes})
	require.Equal(t, []string{NVRAMCopy}, parsed.Copies())
	for path, want := range map[string]string{
		l.home.path(secureNVRAMName):         "the UEFI variables of starts with secure boot, which a migration would not move",
		l.home.tpmDir("state", tpmStateFile): "the state of a TPM that it does not use now",
	} {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
		require.NoError(t, os.WriteFile(path, nil, 0o600))
		_, err = p.Machine()
		require.ErrorContains(t, err, want)
		require.NoError(t, os.Remove(path))
	}
	require.NoError(t, p.PowerOff(l.ctx))
	p.record.Spec.CodeBytes = 0
	_, err = p.Machine()
	require.ErrorContains(t, err, "an agent of an earlier version has started the VM")

	other := uefiLab(t)
	other.launcher.UEFI.Code = "/usr/share/OVMF/OVMF_CODE.fd"
	_, err = other.launcher.LaunchIncoming(other.ctx, other.home, parsed, Files{}, 1, "test")
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "the UEFI firmware of this host has 1966080 bytes, and that of the source has 3653632")
}
