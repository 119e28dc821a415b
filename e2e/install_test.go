package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"image/png"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// installer is the script of the init process of the installer. It writes the disk image from the CD-ROM to the first
// disk, writes a random text to a file on this disk, and powers the VM off.
const installer = `#!/bin/sh
busybox() { /bin/busybox "$@"; }
set -e
busybox mount -t proc proc /proc
busybox mount -t sysfs sys /sys
busybox mount -t devtmpfs dev /dev || true
for module in virtio_pci virtio_blk virtio_scsi sr_mod isofs ext4; do busybox modprobe $module || true; done
until [ -b /dev/sr0 ] && [ -b /dev/vda ]; do busybox usleep 50000; done
busybox mkdir /cd
busybox mount -t iso9660 -o ro /dev/sr0 /cd
busybox zcat /cd/system.gz | busybox dd of=/dev/vda bs=1M conv=fsync
busybox blockdev --rereadpt /dev/vda
until [ -b /dev/vda2 ]; do busybox usleep 50000; done
busybox mount -t ext4 /dev/vda2 /data
busybox cat /proc/sys/kernel/random/uuid >/data/installed
text=$(busybox cat /data/installed)
busybox umount /data
busybox sync
echo "INSTALLED $text"
busybox poweroff -f
`

// isolinuxConfig makes isolinux show the file screen and wait for a key.
const isolinuxConfig = `DISPLAY screen
PROMPT 1
TIMEOUT 0
DEFAULT install
LABEL install
 KERNEL /vmlinuz
 INITRD /install.cpio,/initrd.lz4
 APPEND ` + guestCmdline + ` rdinit=/install
`

// installerISO writes an ISO image that boots from BIOS. It contains isolinux, the kernel of the test guest
// (images/guest), the script installer, and the disk of the test guest, which is the system to install.
func installerISO(t *testing.T, file string) {
	t.Helper()
	xorriso := testenv.Program(t, "xorriso")
	tree, built := t.TempDir(), guest(t)
	for name, source := range map[string]string{
		"isolinux.bin": "/usr/lib/ISOLINUX/isolinux.bin", "ldlinux.c32": "/usr/lib/syslinux/modules/bios/ldlinux.c32",
		"vmlinuz": filepath.Join(built, "vmlinuz"), "initrd.lz4": filepath.Join(built, "initrd.lz4"),
	} {
		content, err := os.ReadFile(source)
		if os.IsNotExist(err) {
			testenv.Skip(t, source+" does not exist: apt-get install isolinux syslinux-common")
		}
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(tree, name), content, 0o644))
	}
	require.NoError(t, os.WriteFile(filepath.Join(tree, "isolinux.cfg"), []byte(isolinuxConfig), 0o644))
	// The form feed clears the screen.
	screen := "\f" + strings.TrimSuffix(bootScreen, "boot: ")
	require.NoError(t, os.WriteFile(filepath.Join(tree, "screen"), []byte(screen), 0o644))

	dir := t.TempDir()
	run := func(in io.Reader, out io.Writer, name string, args ...string) {
		t.Helper()
		cmd := exec.Command(name, args...)
		var errs strings.Builder
		cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, in, out, &errs
		require.NoError(t, cmd.Run(), "%s: %s", name, errs.String())
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "install"), []byte(installer), 0o755))
	archive, err := os.Create(filepath.Join(tree, "install.cpio"))
	require.NoError(t, err)
	run(strings.NewReader("install\n"), archive, "cpio", "--quiet", "-o", "-H", "newc", "--owner", "0:0")
	require.NoError(t, archive.Close())
	disk, err := filepath.Abs(filepath.Join(built, "disk.qcow2"))
	require.NoError(t, err)
	run(nil, nil, "qemu-img", "convert", "-O", "raw", disk, "system")
	system, err := os.ReadFile(filepath.Join(dir, "system"))
	require.NoError(t, err)
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestSpeed)
	require.NoError(t, err)
	_, err = z.Write(system)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	require.NoError(t, os.WriteFile(filepath.Join(tree, "system.gz"), packed.Bytes(), 0o644))
	run(nil, nil, xorriso, "-as", "mkisofs", "-quiet", "-V", "TRIVET", "-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot",
		"-boot-load-size", "4", "-boot-info-table", "-o", file, tree)
}

// installFromCD installs a system from an ISO image to the disk of a VM. The parameter trivet runs the command line
// client as the tenant. The boot screen must look like the reference picture in a screenshot and in a VNC viewer. A key
// from the viewer starts the installation. After this, the VM must boot from its disk without the CD-ROM drive.
func (w *world) installFromCD(ctx context.Context, trivet func(args ...string) string) {
	t := w.t
	t.Helper()
	dir := t.TempDir()
	iso := filepath.Join(dir, "installer.iso")
	installerISO(t, iso)
	trivet("image", "upload", "installer-iso", iso, "--format", "raw")
	trivet("vm", "create", "installed", "--disk", "1", "--cdrom", "installer-iso", "--memory", "192", "--network", "none", "--start")
	var vm struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(trivet("vm", "show", "installed", "-o", "json")), &vm))

	picture := filepath.Join(dir, "screen.png")
	if *rewrite {
		// Compare the new picture with itself. This fails while another screen is shown, because cells of the same
		// letter in bootScreen then have different glyphs.
		picture = screenFile
	}
	require.NoError(t, lab.Until(ctx, "the screenshot shows the boot screen", func(context.Context) error {
		trivet("vm", "screenshot", "installed", picture)
		file, err := os.ReadFile(picture)
		if err != nil {
			return err
		}
		shown, err := png.Decode(bytes.NewReader(file))
		if err != nil {
			return err
		}
		return compareScreen(shown)
	}))
	command := w.startCommand(ctx, "vm", "vnc", "installed")
	command.prints(ctx, "vnc://")
	address := strings.TrimPrefix(strings.TrimSpace(command.out.String()), "vnc://")
	viewer, err := openVNC(ctx, address)
	require.NoError(t, err)
	defer viewer.conn.Close()
	require.NoError(t, lab.Until(ctx, "a VNC viewer shows the boot screen", func(context.Context) error {
		shown, err := viewer.picture()
		if err != nil {
			return err
		}
		return compareScreen(shown)
	}))
	const enter = 0xff0d
	require.NoError(t, viewer.press(enter))

	line, err := w.admin.Console(ctx, vm.ID, "INSTALLED", 1)
	require.NoError(t, err)
	_, text, _ := strings.Cut(line, "INSTALLED ")
	text = strings.TrimSpace(text)
	require.Regexp(t, regexp.MustCompile(`^[0-9a-f-]{36}$`), text)
	w.boots(ctx, vm.ID, text, trivet)
}

// boots waits until the VM has powered itself off, removes the CD-ROM drive, deletes the ISO image, and starts the VM.
// The VM must boot from its disk, and the file /data/installed must contain text.
func (w *world) boots(ctx context.Context, id, text string, trivet func(args ...string) string) {
	t := w.t
	t.Helper()
	require.NoError(t, lab.Until(ctx, "the VM has turned itself off", func(context.Context) error {
		if shown := trivet("vm", "show", "installed"); !strings.Contains(shown, "STOPPED") {
			return fmt.Errorf("%s", shown)
		}
		return nil
	}))
	trivet("vm", "update", "installed", "--metadata", "trivet/cdrom=")
	trivet("image", "delete", "installer-iso")
	trivet("vm", "start", "installed")
	_, err := w.admin.Console(ctx, id, banner, 1)
	require.NoError(t, err)
	w.command(ctx, id, "run echo $(cat /data/installed) $(grep -c rdinit /proc/cmdline) $(ls -d /dev/sr0 2>/dev/null || echo no-cd)",
		"OUT "+text+" 0 no-cd")
	trivet("vm", "stop", "installed", "--force")
	trivet("vm", "delete", "installed")
}
