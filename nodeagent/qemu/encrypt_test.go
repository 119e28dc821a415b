package qemu

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Keys of encrypted disks in the tests.
var (
	rightKey = Key(strings.Repeat("5eC1e7aa", 8))
	wrongKey = Key(strings.Repeat("00ffee00", 8))
)

// encryptedSize is the size in bytes of the disks of the method encrypted.
const encryptedSize = 64 << 20

// header is the content of an empty encrypted disk of encryptedSize bytes. It is made once, because that takes seconds.
var header []byte

// encrypted returns an encrypted disk of encryptedSize bytes, and its open file.
func (l *lab) encrypted(id string) (Disk, Layers) {
	l.Helper()
	if header == nil {
		content, err := l.launcher.Format(l.ctx, l.homes, vmID, encryptedSize, rightKey)
		require.NoError(l, err)
		defer content.Close()
		header, err = io.ReadAll(io.NewSectionReader(content, 0, formatBytes))
		require.NoError(l, err)
	}
	f, err := os.Create(filepath.Join(l.TempDir(), id))
	require.NoError(l, err)
	l.Cleanup(func() { _ = f.Close() })
	_, err = f.Write(header)
	require.NoError(l, err)
	return Disk{ID: id, Bus: Virtio, Slot: -1, Cache: NoCache, Encrypted: true, Volume: "volume-" + id},
		Layers{Overlay: f, Size: encryptedSize, Keys: Keys{Key: rightKey}}
}

// requireNoKey requires that no file in the VM's directory contains the key, nor the arguments and the environment of
// the process.
func (l *lab) requireNoKey(p *Process) {
	l.Helper()
	files, err := filepath.Glob(filepath.Join(l.home.dir, "*"))
	require.NoError(l, err)
	require.NotEmpty(l, files)
	for _, name := range []string{"cmdline", "environ"} {
		files = append(files, fmt.Sprintf("/proc/%d/%s", p.Record().PID, name))
	}
	for _, file := range files {
		if strings.HasSuffix(file, ".sock") || filepath.Base(file) == "sockets" { // sockets, and the directory for sockets
			continue
		}
		text, err := os.ReadFile(file)
		require.NoError(l, err)
		require.NotContains(l, string(text), string(rightKey), file)
	}
}

// TestEncryptedDisks boots a guest from an encrypted overlay of an image, with a second encrypted disk that has
// limits. It attaches and grows a third one while the guest runs. QEMU must not keep the keys, and nothing that other
// processes can read may contain them.
func TestEncryptedDisks(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	root, layers := l.encrypted("root")
	root.Base, layers.Base = qcow2.Raw, files.Disks["root"].Base
	s.Disks[0], files.Disks["root"] = root, layers
	data, dataFiles := l.encrypted("data")
	data.IOPS = 1000
	s.Disks, files.Disks["data"] = append(s.Disks, data), dataFiles

	p := l.launch(s, files)
	require.Empty(t, p.keys)
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")
	late, lateFiles := l.encrypted("late")
	lateFiles.Key = wrongKey
	before, sets := l.nodes(p)
	err := p.PlugDisk(l.ctx, late, lateFiles)
	require.ErrorIs(t, err, ErrWrongKey)
	require.NotContains(t, err.Error(), string(wrongKey))
	after, setsAfter := l.nodes(p)
	require.Equal(t, []any{before, sets}, []any{after, setsAfter}, "a refused disk leaves nothing in QEMU")
	lateFiles.Key = rightKey
	require.NoError(t, p.PlugDisk(l.ctx, late, lateFiles))
	require.NoError(t, p.ResizeDisk(l.ctx, "late", 2*encryptedSize))
	disks, err := p.Disks(l.ctx)
	require.NoError(t, err)
	require.Len(t, disks, 3)
	require.Equal(t, []uint64{encryptedSize, encryptedSize, 2 * encryptedSize}, []uint64{disks[0].Size, disks[1].Size, disks[2].Size})

	var objects []struct{ Name, Type string }
	conn, err := p.work.Conn(l.ctx)
	require.NoError(t, err)
	require.NoError(t, conn.Do(l.ctx, "qom-list", object{"path": "/objects"}, &objects))
	for _, o := range objects {
		require.NotContains(t, o.Type, "secret", "QEMU needs a key only while it opens the file")
	}
	l.requireNoKey(p)
	l.remove(p, "late", func(Disk) error { return nil })
}

// TestCopyOfEncryptedDisk copies an encrypted disk of a running VM. The copy must be encrypted too: its file must not
// contain the content in plain text. A copy to a file without encryption must be refused.
func TestCopyOfEncryptedDisk(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	d, layers := l.encrypted("data")
	s.Disks, files.Disks["data"] = append(s.Disks, d), layers
	p := l.launch(s, files)
	require.NoError(t, p.Resume(l.ctx))
	l.deviceIO(p, "data", "write -P 7 1M 1M")
	before, sets := l.nodes(p)
	dir := t.TempDir()
	_, err := p.CopyDisks(l.ctx, []CopyTarget{l.copyTarget(dir, "data", encryptedSize)})
	require.ErrorIs(t, err, errPlainCopy, "the content of an encrypted disk was copied in plain text")
	target := l.copyTarget(dir, "data", encryptedSize)
	_, err = target.File.WriteAt(header, 0)
	require.NoError(t, err)
	require.NoError(t, target.File.Truncate(int64(len(header))))
	target.Key = rightKey
	_, err = p.CopyDisks(l.ctx, []CopyTarget{target})
	require.NoError(t, err)
	after, setsAfter := l.nodes(p)
	require.Equal(t, []any{before, sets}, []any{after, setsAfter})
	content, err := os.ReadFile(target.File.Name())
	require.NoError(t, err)
	require.NotContains(t, string(content), strings.Repeat("\x07", 512))
	out, err := exec.Command("qemu-img", "convert", "--object", "secret,id=key,data="+string(rightKey), "--image-opts",
		"driver=qcow2,file.filename="+target.File.Name()+",encrypt.format=luks,encrypt.key-secret=key", "-O", "raw",
		filepath.Join(dir, "flat")).CombinedOutput()
	require.NoError(t, err, "%s", out)
	data, err := os.ReadFile(filepath.Join(dir, "flat"))
	require.NoError(t, err)
	require.Equal(t, strings.Repeat("\x07", 1<<20), string(data[1<<20:2<<20]))
	require.Equal(t, byte(0), data[2<<20])
}

// TestWrongKey starts a VM with the key of another volume, and without a key. The start must fail with ErrWrongKey or
// errNoKey, and no error may contain the key.
func TestWrongKey(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	d, layers := l.encrypted("data")
	for _, c := range []struct {
		key  Key
		want error
	}{{wrongKey, ErrWrongKey}, {nil, errNoKey}} {
		layers.Key = c.key
		s.Disks, files.Disks["data"] = append(s.Disks[:1], d), layers
		_, err := l.launcher.Launch(l.ctx, l.home, s, files, 1, "test")
		require.ErrorIs(t, err, c.want)
		require.NotContains(t, err.Error(), string(wrongKey))
		procs, err := l.launcher.Cgroups.Procs(vmID)
		require.NoError(t, err)
		require.Empty(t, procs)
	}
	require.Equal(t, "(key) (key)", fmt.Sprintf("%v %#v", rightKey, rightKey))
}

// TestKeysLost starts a QEMU that gets no keys, as if the agent had ended before it passed them. The start must be
// recorded as interrupted, and must not be repeated without end.
func TestKeysLost(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	d, layers := l.encrypted("data")
	layers.Key = nil
	s.Disks, files.Disks["data"] = append(s.Disks, d), layers
	r := Record{}
	var err error
	r.Spec, err = s.KeepSlots(Spec{})
	require.NoError(t, err)
	r.Argv, err = Argv(l.launcher.Program, r.Spec)
	require.NoError(t, err)
	r.BootID, err = bootID()
	require.NoError(t, err)
	require.NoError(t, l.home.begin(r))
	require.NoError(t, l.launcher.Cgroups.Create(vmID, s.limits(false)))
	pass := []*os.File{files.Disks["root"].Overlay, files.Disks["root"].Base, layers.Overlay}
	_, err = l.launcher.start(l.ctx, l.home, r, files, pass)
	require.Error(t, err)
	exit, known, err := l.home.Exit()
	require.NoError(t, err)
	require.True(t, known)
	require.Equal(t, exitLaunchLost, exit)
}

// TestFormat checks the file that Format makes, that a VM with the same id can exist, and that nothing of the
// formatting process is left, also if an agent was killed meanwhile.
func TestFormat(t *testing.T) {
	l := newLab(t)
	f, err := l.launcher.Format(l.ctx, l.homes, vmID, 3<<30, rightKey)
	require.NoError(t, err)
	defer f.Close()
	head := make([]byte, 4<<20)
	_, err = f.ReadAt(head, 0)
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, "QFI\xfb", string(head[:4]))
	require.Contains(t, string(head), "LUKS\xba\xbe")
	require.NotContains(t, string(head), string(rightKey))
	names, err := l.homes.names()
	require.NoError(t, err)
	require.Equal(t, []string{vmID}, names)
	groups, err := l.launcher.Cgroups.List()
	require.NoError(t, err)
	require.Empty(t, groups)

	left, err := l.homes.claim(formatPrefix + vmID)
	require.NoError(t, err)
	require.NotEqual(t, l.home.UID(), left.UID())
	ids, err := l.homes.List()
	require.NoError(t, err)
	require.Equal(t, []string{vmID}, ids, "a formatting process is no VM")
	require.NoError(t, l.launcher.Cgroups.Create(left.id, spec().limits(false)))
	require.NoError(t, l.launcher.RemoveFormats(l.ctx, l.homes))
	names, err = l.homes.names()
	require.NoError(t, err)
	require.Equal(t, []string{vmID}, names)
	groups, err = l.launcher.Cgroups.List()
	require.NoError(t, err)
	require.Empty(t, groups)
}

// decrypted returns the content of a file with a LUKS header, as qemu-img decrypts it.
func decrypted(t *testing.T, file string, key Key) []byte {
	t.Helper()
	secret := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(secret, key, 0o600))
	out := filepath.Join(t.TempDir(), "plain")
	text, err := exec.Command("qemu-img", "convert", "--object", "secret,id=key,file="+secret, "-O", "raw", "--image-opts",
		"driver=luks,key-secret=key,file.driver=file,file.filename="+file, out).CombinedOutput()
	require.NoError(t, err, "%s", text)
	content, err := os.ReadFile(out)
	require.NoError(t, err)
	return content
}

// TestEncryptImage encrypts a raw image and a QCOW2 image of the same content. The results must decrypt to the content
// of the image, and must not contain it in plain text. The header that FormatHeader makes must be as long as theirs.
func TestEncryptImage(t *testing.T) {
	l := newLab(t)
	f, err := l.launcher.FormatHeader(l.ctx, l.homes, vmID, rightKey)
	require.NoError(t, err)
	defer f.Close()
	luks, err := io.ReadAll(io.NewSectionReader(f, 0, formatBytes))
	require.NoError(t, err)
	require.Equal(t, "LUKS\xba\xbe", string(luks[:6]))
	require.NotContains(t, string(luks), string(rightKey))

	const size = 3 << 20
	content := make([]byte, size)
	for at := range size / 3 { // two thirds are zeros
		content[at] = "plain content "[at%14]
	}
	raw, converted := filepath.Join(t.TempDir(), "raw"), filepath.Join(t.TempDir(), "qcow2")
	require.NoError(t, os.WriteFile(raw, content, 0o600))
	text, err := exec.Command("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, converted).CombinedOutput()
	require.NoError(t, err, "%s", text)
	for format, file := range map[qcow2.Format]string{qcow2.Raw: raw, qcow2.QCOW2: converted} {
		image, err := os.Open(file)
		require.NoError(t, err)
		defer image.Close()
		to, err := os.Create(filepath.Join(t.TempDir(), "encrypted"))
		require.NoError(t, err)
		defer to.Close()
		require.NoError(t, l.launcher.EncryptImage(l.ctx, l.homes, vmID, rightKey, image, format, size, to))
		result, err := os.ReadFile(to.Name())
		require.NoError(t, err)
		require.Len(t, result, len(luks)+size)
		require.NotContains(t, string(result), "plain content")
		require.True(t, string(decrypted(t, to.Name(), rightKey)) == string(content), "the decrypted content differs: %s", format)
	}
	groups, err := l.launcher.Cgroups.List()
	require.NoError(t, err)
	require.Empty(t, groups)
}
