package ipsec

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// The kernel of a machine that runs tests may lack ESP. So the tests whose names begin with TestESP then run in a
// virtual machine, the guest, with the kernel of images/guest and its modules. The guest has no program except this
// package's test binary, which runs as process 1.

// guestModules are the kernel modules that the tests need. Their own dependencies are loaded too, and are not listed
// here.
var guestModules = []string{
	"veth", "vxlan", "xfrm_user", "esp4", "esp6", "ctr", "ghash_generic", "gcm", "seqiv", "aesni_intel", "sha512_generic",
	"drbg",
}

// inGuest is an environment variable of process 1 of the guest. The kernel sets it because it is on the kernel's
// command line.
const inGuest = "TRIVET_IPSEC_GUEST"

func TestMain(m *testing.M) {
	if os.Getenv(inGuest) == "" || os.Getpid() != 1 {
		os.Exit(m.Run())
	}
	code := 1
	if err := startGuest(); err != nil {
		fmt.Println("start the guest:", err)
	} else {
		code = m.Run()
	}
	fmt.Printf("GUEST EXIT %d\n", code)
	time.Sleep(100 * time.Millisecond) // until the serial port has sent the line
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {}
}

// startGuest mounts the file systems that the tests need, and loads the modules in the order of their names.
func startGuest() error {
	for target, kind := range map[string]string{"/proc": "proc", "/sys": "sysfs", "/run": "tmpfs", "/tmp": "tmpfs"} {
		if err := os.MkdirAll(target, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(kind, target, kind, 0, ""); err != nil {
			return fmt.Errorf("mount %s: %w", target, err)
		}
	}
	files, err := filepath.Glob("/modules/*")
	if err != nil {
		return err
	}
	slices.Sort(files)
	for _, path := range files {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		err = unix.FinitModule(int(f.Fd()), "", 0)
		f.Close()
		if err != nil && err != unix.EEXIST {
			return fmt.Errorf("load %s: %w", path, err)
		}
	}
	return nil
}

// withESP reports whether the kernel of this process has ESP, so that the caller can run its test. If the kernel has
// none, withESP runs all tests whose names begin with TestESP in the guest, once for all callers, and fails t if the
// test of the same name failed there.
func withESP(t *testing.T) bool {
	t.Helper()
	missing, err := MissingFeatures(t.Context())
	require.NoError(t, err)
	if len(missing) == 0 {
		return true
	}
	require.Empty(t, os.Getenv(inGuest), "the kernel of the guest lacks %v", missing)
	text, err := runGuest()
	var absent errNotInstalled
	if errors.As(err, &absent) && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	require.NoError(t, err, text)
	result := regexp.MustCompile(`(?ms)^=== RUN   ` + t.Name() + `$.*^--- PASS: ` + t.Name() + ` \([^\n]*$`).FindString(text)
	if t.Log(result); result == "" {
		t.Fatalf("the test fails in the guest:\n%s", text)
	}
	return false
}

// errNotInstalled says which program or file of the guest the machine lacks.
type errNotInstalled string

func (e errNotInstalled) Error() string { return string(e) }

// runGuest runs the tests of ESP in the guest and returns the output.
var runGuest = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "ipsec-guest-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	ctx, cancel := context.WithTimeout(context.Background(), 6*time.Minute)
	defer cancel()
	kernel, err := kernelPackage()
	if err != nil {
		return "", err
	}
	unpacked := filepath.Join(dir, "kernel")
	if _, err := run(ctx, "dpkg-deb", "-x", kernel, unpacked); err != nil {
		return "", err
	}
	image, err := theOnly(filepath.Join(unpacked, "boot", "vmlinuz-*"))
	if err != nil {
		return "", err
	}
	binary := filepath.Join(dir, "ipsec.test")
	// Without C, because the guest has no C library.
	if _, err := run(ctx, "env", "CGO_ENABLED=0", "go", "test", "-c", "-o", binary, "."); err != nil {
		return "", err
	}
	modules, err := modulePaths(ctx, unpacked)
	if err != nil {
		return "", err
	}
	initrd := filepath.Join(dir, "initrd.gz")
	if err := writeInitrd(initrd, binary, modules); err != nil {
		return "", err
	}
	output, err := run(ctx, "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-accel", "tcg", "-cpu", "max",
		"-m", "512", "-smp", "1", "-display", "none", "-no-reboot", "-serial", "stdio", "-kernel", image, "-initrd", initrd,
		"-append", "console=ttyS0 quiet panic=-1 tsc=unstable no_timer_check cryptomgr.notests "+inGuest+"=1"+
			" -- -test.v -test.run=^TestESP")
	return strings.ReplaceAll(output, "\r", ""), err
})

// kernelPackage returns the path of the Debian package with the guest's kernel, which images/guest/build downloads.
func kernelPackage() (string, error) {
	for _, tool := range []string{"qemu-system-x86_64", "dpkg-deb", "depmod", "modprobe", "go"} {
		if _, err := exec.LookPath(tool); err != nil {
			return "", errNotInstalled(err.Error())
		}
	}
	guest := os.Getenv("TRIVET_GUEST_DIR")
	if guest == "" {
		guest = filepath.Join("..", "..", ".build", "guest")
	}
	path, err := theOnly(filepath.Join(guest, "kernel", "linux-image-cloud-amd64", "*.deb"))
	if err != nil {
		return "", errNotInstalled("no kernel for the guest, run make guest: " + err.Error())
	}
	return path, nil
}

// theOnly returns the path of the only file that matches a pattern.
func theOnly(pattern string) (string, error) {
	found, err := filepath.Glob(pattern)
	if err == nil && len(found) != 1 {
		err = fmt.Errorf("%d files match %s", len(found), pattern)
	}
	if err != nil {
		return "", err
	}
	return found[0], nil
}

// run runs a program and returns its standard output. The program ends with the tests.
func run(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	output, err := cmd.Output()
	if err != nil {
		return string(output), fmt.Errorf("%s: %w: %s", name, err, &complaints)
	}
	return string(output), nil
}

// modulePaths returns the files of guestModules and of the modules that these need, in the order of loading.
func modulePaths(ctx context.Context, root string) (paths []string, err error) {
	tree, err := theOnly(filepath.Join(root, "lib", "modules", "*"))
	if err != nil {
		return nil, err
	}
	if _, err := run(ctx, "depmod", "-b", root, filepath.Base(tree)); err != nil {
		return nil, err
	}
	for _, name := range guestModules {
		list, err := run(ctx, "modprobe", "-d", root, "-S", filepath.Base(tree), "--show-depends", name)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(list) {
			path, isModule := strings.CutPrefix(strings.TrimSpace(line), "insmod ")
			if isModule && !slices.Contains(paths, path) {
				paths = append(paths, path)
			}
		}
	}
	return paths, nil
}

// writeInitrd writes a compressed cpio archive with the test binary as /init, and the modules.
func writeInitrd(path, binary string, modules []string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewWriterLevel(f, gzip.BestSpeed)
	if err != nil {
		return err
	}
	files := []struct{ name, source string }{{"init", binary}}
	for i, m := range modules {
		files = append(files, struct{ name, source string }{fmt.Sprintf("modules/%03d-%s", i, filepath.Base(m)), m})
	}
	all := writeEntry(z, 1, "modules", syscall.S_IFDIR|0o755, nil)
	for i, file := range files {
		content, err := os.ReadFile(file.source)
		if err != nil {
			return err
		}
		all = errors.Join(all, writeEntry(z, 2+i, file.name, syscall.S_IFREG|0o755, content))
	}
	return errors.Join(all, writeEntry(z, 2+len(files), "TRAILER!!!", 0, nil), z.Close())
}

// writeEntry writes a file in the cpio format newc, which the kernel reads.
func writeEntry(w io.Writer, number int, name string, mode fs.FileMode, content []byte) error {
	pad := func(n int) string { return strings.Repeat("\x00", (4-n%4)%4) }
	header := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x",
		number, uint32(mode), 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name)+1, 0)
	_, err := fmt.Fprintf(w, "%s%s\x00%s%s%s", header, name, pad(len(header)+len(name)+1), content, pad(len(content)))
	return err
}
