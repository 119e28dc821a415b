package watchdog

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/testenv"
)

// TestWatchdogOfAKernel runs the program of the directory probe as init of a guest with Linux's module softdog. The
// module resets the guest, and QEMU then ends, if the program stops petting the watchdog, or if the process that has
// armed the watchdog ends. If the program disarms the watchdog, the guest is not reset.
func TestWatchdogOfAKernel(t *testing.T) {
	kernel, initrd := build(t)
	for probe, want := range map[string]string{
		"stop": "PROBE has petted", "exit": "PROBE has lost the process", "disarm": "PROBE lives on",
	} {
		t.Run(probe, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			qemu := exec.CommandContext(ctx, testenv.Program(t, "qemu-system-x86_64"), "-nodefaults", "-display", "none",
				"-no-reboot", "-accel", "tcg", "-m", "192", "-serial", "stdio", "-kernel", kernel, "-initrd", initrd, "-append",
				"console=ttyS0 panic=-1 cryptomgr.notests tsc=unstable no_timer_check rdinit=/init probe="+probe)
			out, err := qemu.CombinedOutput()
			_, out, _ = bytes.Cut(out, []byte("Run /init as init process"))
			require.NoError(t, err, "%s", out)
			require.Contains(t, string(out), want)
			require.NotContains(t, string(out), "PROBE failed")
			// The message of softdog before it resets the machine.
			require.Equal(t, probe != "disarm", bytes.Contains(out, []byte("Initiating system reboot")), "%s", out)
		})
	}
}

// build returns the paths of a kernel, and of an initial file system with the program probe and the module softdog of
// that kernel.
func build(t *testing.T) (kernel, initrd string) {
	guest := os.Getenv("TRIVET_GUEST_DIR")
	if guest == "" {
		guest = filepath.Join("..", "..", ".build", "guest")
	}
	packages, err := filepath.Glob(filepath.Join(guest, "kernel", "*", "*.deb"))
	require.NoError(t, err)
	if len(packages) == 0 {
		testenv.Skip(t, "the small guest is not built: make guest")
	}
	dir := t.TempDir()
	run := func(command string) {
		t.Helper()
		c := exec.CommandContext(t.Context(), "bash", "-euo", "pipefail", "-c", command)
		c.Env = append(os.Environ(), "CGO_ENABLED=0", "DEB="+packages[0], "DIR="+dir)
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s: %s", command, out)
	}
	run(`go build -trimpath -o "$DIR/init" ./probe`)
	run(`dpkg-deb --fsys-tarfile "$DEB" | tar -x -C "$DIR" --wildcards '*/watchdog/softdog.ko' '*/watchdog/watchdog.ko'`)
	run(`find "$DIR/lib" -name '*.ko' -exec mv -t "$DIR" {} +`)
	run(`cd "$DIR" && printf 'init\nsoftdog.ko\nwatchdog.ko\n' | cpio --quiet -o -H newc >initrd`)
	return filepath.Join(guest, "vmlinuz"), filepath.Join(dir, "initrd")
}

// TestOpenRefuses checks that Open refuses a device that is not a watchdog.
func TestOpenRefuses(t *testing.T) {
	_, err := Open(filepath.Join(t.TempDir(), "none"), time.Second)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = Open("/dev/null", time.Second)
	require.ErrorContains(t, err, "is not a watchdog")
	require.True(t, strings.Contains(err.Error(), "/dev/null"))
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, []byte("data"), 0o600))
	_, err = Open(file, time.Second)
	require.ErrorContains(t, err, "is not a watchdog")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "data", string(text))
}

// TestNoWayOut checks that a watchdog that cannot be disarmed is refused. /dev/null, with the number 1:3, takes its place.
func TestNoWayOut(t *testing.T) {
	sys := t.TempDir()
	require.NoError(t, checkDisarms(sys, "/dev/null"), "the kernel does not say")
	dir := filepath.Join(sys, "dev", "char", "1:3")
	require.NoError(t, os.MkdirAll(dir, 0o700))
	for text, refused := range map[string]bool{"0\n": false, "1\n": true} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "nowayout"), []byte(text), 0o600))
		if err := checkDisarms(sys, "/dev/null"); refused {
			require.ErrorContains(t, err, "configured with nowayout")
		} else {
			require.NoError(t, err)
		}
	}
}
