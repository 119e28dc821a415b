package facts

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/digitalocean/go-qemu/qmp/raw"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func TestAllocatable(t *testing.T) {
	host := Resources{VCPUs: 100, MemoryMiB: 64 << 10, StorageGiB: 1000}
	for name, tc := range map[string]struct {
		capacity, reserve Resources
		over              Overcommit
		want              Resources
	}{
		"no reserve and no factors":                       {host, Resources{}, Overcommit{}, host},
		"factors of 1":                                    {host, Resources{}, Overcommit{1, 1, 1}, host},
		"host with reserve and overcommitted vCPUs":       {host, Resources{2, 4 << 10, 20}, Overcommit{VCPUs: 4, Memory: 1, Storage: 1}, Resources{392, 60 << 10, 980}},
		"small host with overcommitted vCPUs and storage": {Resources{2, 7900, 20}, Resources{0, 512, 4}, Overcommit{VCPUs: 64, Memory: 1, Storage: 20}, Resources{128, 7388, 320}},
		"rounded down":                                    {Resources{3, 3, 3}, Resources{}, Overcommit{1.5, 1.1, 0.5}, Resources{4, 3, 1}},
		"factors that are not exact in binary":            {host, Resources{}, Overcommit{VCPUs: 1.15, Storage: 0.29}, Resources{115, 64 << 10, 290}},
		"all capacity reserved":                           {host, host, Overcommit{4, 4, 4}, Resources{}},
		"more reserved than the capacity":                 {host, Resources{101, 1 << 40, 1001}, Overcommit{4, 4, 4}, Resources{}},
		"no capacity":                                     {Resources{}, Resources{}, Overcommit{4, 4, 4}, Resources{}},
		"product above the largest number":                {Resources{math.MaxUint32, math.MaxUint64, math.MaxUint64}, Resources{}, Overcommit{2, 2, 1000}, Resources{math.MaxUint32, math.MaxUint64, math.MaxUint64}},
		"one less than the largest number of vCPUs":       {Resources{VCPUs: math.MaxUint32}, Resources{VCPUs: 1}, Overcommit{}, Resources{VCPUs: math.MaxUint32 - 1}},
		"memory that a float64 cannot represent":          {Resources{MemoryMiB: 1<<60 + 1}, Resources{}, Overcommit{}, Resources{MemoryMiB: 1<<60 + 1}},
		"invalid factors":                                 {host, Resources{}, Overcommit{-1, math.NaN(), math.Inf(1)}, host},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, tc.want, Allocatable(tc.capacity, tc.reserve, tc.over))
		})
	}
}

func TestOvercommitIsChecked(t *testing.T) {
	require.NoError(t, Overcommit{}.Validate())
	require.NoError(t, Overcommit{VCPUs: 64, Memory: 0.9, Storage: MaxOvercommit}.Validate())
	require.ErrorContains(t, Overcommit{VCPUs: -1}.Validate(), "overcommit.vcpus is -1")
	require.ErrorContains(t, Overcommit{Memory: math.NaN()}.Validate(), "overcommit.memory is NaN")
	require.ErrorContains(t, Overcommit{Storage: 1001}.Validate(), "overcommit.storage is 1001")
	require.ErrorContains(t, Overcommit{Storage: math.Inf(1)}.Validate(), "+Inf")
}

func TestMemoryMiB(t *testing.T) {
	n, err := memoryMiB("MemTotal:        8134567 kB\nMemFree:          123456 kB\n")
	require.NoError(t, err)
	require.EqualValues(t, 7943, n)
	for _, bad := range []string{"", "MemFree: 1 kB\n", "MemTotal: kB\n", "MemTotal: -5 kB\n", "MemTotal: 12 MB\n"} {
		_, err := memoryMiB(bad)
		require.Error(t, err, "%q", bad)
	}
}

func TestHugepagesMiB(t *testing.T) {
	dir := t.TempDir()
	n, err := hugepagesMiB(dir)
	require.NoError(t, err)
	require.Zero(t, n)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "hugepages-2048kB"), 0o700))
	for text, want := range map[string]uint64{"0\n": 0, "512\n": 1024, "": 0, "-1": 0, "1099511627776": 0} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "hugepages-2048kB", "nr_hugepages"), []byte(text), 0o600))
		n, err := hugepagesMiB(dir)
		require.Equal(t, want, n, "%q", text)
		require.Equal(t, !strings.HasSuffix(text, "\n"), err != nil, "%q", text)
	}
}

func TestStorageGiB(t *testing.T) {
	const gib4k = 1 << 18 // blocks of 4 KiB in a GiB
	for name, tc := range map[string]struct{ blocks, free, avail, size, want uint64 }{
		"nothing reserved":                    {10 * gib4k, 5 * gib4k, 5 * gib4k, 4096, 10},
		"rounded down":                        {10*gib4k - 1, 0, 0, 4096, 9},
		"blocks reserved for root":            {100 * gib4k, 50 * gib4k, 45 * gib4k, 4096, 95},
		"more free blocks than blocks":        {1, 1 << 40, 0, 4096, 0},
		"byte count above 64 bits":            {1 << 60, 0, 0, 4096, 1 << 42},
		"block size that is not a power of 2": {3 << 30, 0, 0, 1000, 3000},
	} {
		require.Equal(t, tc.want, storageGiB(tc.blocks, tc.free, tc.avail, tc.size), name)
	}
}

func TestParseVersion(t *testing.T) {
	for out, want := range map[string]string{
		"QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18+b3)\nCopyright (c) 2003-2022\n": "7.2.22",
		"QEMU emulator version 10.1.0":            "10.1.0",
		"QEMU emulator version 9.2.91 (v9.3-rc1)": "9.2.91",
		"":                                "",
		"GNU bash, version 5.2":           "",
		"hello QEMU emulator version 7.2": "",
		"QEMU emulator version seven":     "",
	} {
		got, err := parseVersion(out)
		require.Equal(t, want, got)
		require.Equal(t, want == "", err != nil)
	}
}

func TestInspectQEMU(t *testing.T) {
	q35, pc := "q35", "pc"
	machines := []raw.MachineInfo{{Name: "none"}, {Name: "pc-q35-7.1"}, {Name: "pc-q35-7.2", Alias: &q35}, {Name: "pc-i440fx-7.2", Alias: &pc}}
	name, err := resolve(machines, "q35")
	require.NoError(t, err)
	require.Equal(t, "pc-q35-7.2", name)
	_, err = resolve(machines, "virt")
	require.ErrorContains(t, err, "virt")

	models := []raw.CPUDefinitionInfo{{Name: "qemu64", UnavailableFeatures: []string{}}, {Name: "host", UnavailableFeatures: []string{"kvm"}},
		{Name: "unknown"}, {Name: "max", UnavailableFeatures: []string{}}, {Name: "qemu64", UnavailableFeatures: []string{}}}
	require.Equal(t, []string{"max", "qemu64"}, supportedModels(models))
	require.Equal(t, []string{}, supportedModels(nil))
}

func TestMode(t *testing.T) {
	works := func(context.Context) (time.Duration, error) { return 1234567 * time.Nanosecond, nil }
	broken := func(context.Context) (time.Duration, error) { return 0, errors.New("interpreted") }
	never := func(context.Context) (time.Duration, error) { panic("asked") }
	stuck := func(context.Context) (time.Duration, error) { time.Sleep(time.Hour); return 0, nil }
	stopped := func(ctx context.Context) (time.Duration, error) { <-ctx.Done(); return 0, errors.New("kicked") }
	for name, tc := range map[string]struct {
		mode  Mode
		probe func(context.Context) (time.Duration, error)
		want  Accelerator
		says  string
	}{
		"auto, KVM works":    {mode: Auto, probe: works, want: Accelerator{KVM, "1000000 loops of guest code in 1.23ms"}},
		"auto, KVM broken":   {mode: Auto, probe: broken, want: Accelerator{TCG, "interpreted"}},
		"auto, KVM hangs":    {mode: Auto, probe: stuck, want: Accelerator{TCG, "KVM did not respond within 5s"}},
		"auto, context ends": {mode: Auto, probe: stopped, says: "context deadline exceeded"},
		"kvm, KVM works":     {mode: WantKVM, probe: works, want: Accelerator{KVM, "1000000 loops of guest code in 1.23ms"}},
		"kvm, KVM broken":    {mode: WantKVM, probe: broken, says: "KVM does not run guests here: interpreted"},
		"kvm, KVM hangs":     {mode: WantKVM, probe: stuck, says: "did not respond"},
		"tcg":                {mode: WantTCG, probe: never, want: Accelerator{TCG, "configured"}},
		"no mode":            {mode: "", probe: never, says: `unknown acceleration ""`},
		"unknown mode":       {mode: "hvf", probe: never, says: "want auto, kvm or tcg"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				if strings.HasSuffix(name, "context ends") {
					ctx, cancel = context.WithTimeout(ctx, time.Second)
					defer cancel()
				}
				got, err := chooseAccelerator(ctx, tc.mode, tc.probe)
				time.Sleep(2 * time.Hour) // after an hour the goroutine of the stuck probe returns, too
				require.Equal(t, tc.want, got)
				if tc.says == "" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, tc.says)
				}
			})
		})
	}
}

// held returns the open files and memory mappings of this process that a probe could leak.
func held(t *testing.T) (out []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, e := range entries {
		if link, err := os.Readlink("/proc/self/fd/" + e.Name()); err == nil && !strings.HasPrefix(link, "/proc/") && !strings.HasPrefix(link, "anon_inode:[event") {
			out = append(out, link)
		}
	}
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "kvm") || strings.Contains(line, "/dev/zero") { // /dev/zero: shared anonymous memory
			out = append(out, line)
		}
	}
	slices.Sort(out)
	return out
}

// TestProbe checks the real probe of this host, whatever its result: the result must be the same for Auto and WantKVM,
// a canceled context must stop the probe, and no files or mappings may be left open.
func TestProbe(t *testing.T) {
	before := held(t)
	auto, err := Accel(t.Context(), Auto)
	require.NoError(t, err)
	require.Contains(t, []Kind{KVM, TCG}, auto.Kind)
	require.NotEmpty(t, auto.Reason)
	t.Logf("%s: %s", auto.Kind, auto.Reason)

	demanded, err := Accel(t.Context(), WantKVM)
	require.Equal(t, auto.Kind == KVM, err == nil, "%v", err)
	require.Equal(t, auto.Kind == KVM, demanded.Kind == KVM)

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Accel(ctx, Auto)
	if err != nil { // on a fast host the probe may finish before it checks the context
		require.ErrorIs(t, err, context.Canceled)
	}
	require.Equal(t, before, held(t))
}

// TestGuestHalts checks that a guest with 1000 loops halts and that its time is returned. Even a KVM that interprets
// guest code finishes so few loops, so the successful path is tested on every host with /dev/kvm.
func TestGuestHalts(t *testing.T) {
	before := held(t)
	took, err := runLoops(t.Context(), 1000)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) {
		require.ErrorContains(t, err, "open /dev/kvm")
	} else {
		require.NoError(t, err)
		require.Positive(t, took)
	}
	require.Equal(t, before, held(t))
}

func TestRead(t *testing.T) {
	before := held(t)
	dir := t.TempDir()
	h, err := Read(t.Context(), Options{DataDir: dir, Accel: TCG})
	if err != nil && strings.Contains(err.Error(), "find QEMU") && os.Getenv("CI") != "true" {
		t.Skip(err)
	}
	require.NoError(t, err)
	require.GreaterOrEqual(t, h.Capacity.VCPUs, uint32(runtime.NumCPU()))
	require.Greater(t, h.Capacity.MemoryMiB, uint64(64))
	var fs unix.Statfs_t
	require.NoError(t, unix.Statfs(dir, &fs))
	require.LessOrEqual(t, h.Capacity.StorageGiB, fs.Blocks*uint64(fs.Frsize)>>30)
	require.Regexp(t, regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`), h.BootID)
	require.NotEmpty(t, h.Arch)
	require.True(t, filepath.IsAbs(h.QEMU.Path))
	require.Regexp(t, `^\d+\.\d+\.\d+$`, h.QEMU.Version)
	major, _, _ := strings.Cut(h.QEMU.Version, ".")
	require.Regexp(t, `^pc-q35-`+major+`\.\d+$`, h.QEMU.Machine)
	require.Contains(t, h.QEMU.CPUModels, "qemu64")
	require.NotContains(t, h.QEMU.CPUModels, "host", "the CPU model host must not be listed without KVM")
	require.True(t, slices.IsSorted(h.QEMU.CPUModels))

	again, err := Read(t.Context(), Options{DataDir: dir, Accel: TCG})
	require.NoError(t, err)
	require.Equal(t, h, again)
	require.Equal(t, before, held(t))
}

func TestReadRefuses(t *testing.T) {
	dir := t.TempDir()
	script := func(name, body string) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+body+"\n"), 0o700))
		return path
	}
	const polite = `[ "$1" = --version ] && echo "QEMU emulator version 7.2.22" && exit 0`
	before := held(t)
	for name, tc := range map[string]struct {
		o    Options
		says string
	}{
		"no data directory":                   {Options{Accel: TCG}, "no data directory"},
		"empty accelerator":                   {Options{DataDir: dir}, `unknown accelerator ""`},
		"missing data directory":              {Options{DataDir: dir + "/none", Accel: TCG}, "no such file or directory"},
		"missing QEMU program":                {Options{DataDir: dir, Accel: TCG, QEMU: "no-such-qemu"}, "find QEMU"},
		"QEMU program that is not executable": {Options{DataDir: dir, Accel: TCG, QEMU: "/proc/version"}, "find QEMU"},
		"program that is not QEMU":            {Options{DataDir: dir, Accel: TCG, QEMU: "/bin/echo"}, `version: it answers "echo`},
		"program that fails":                  {Options{DataDir: dir, Accel: TCG, QEMU: "/bin/false"}, "version: exit status 1"},
		"program that hangs":                  {Options{DataDir: dir, Accel: TCG, QEMU: script("hangs", "exec sleep 1000")}, "version: context deadline exceeded"},
		"program that waits for a child":      {Options{DataDir: dir, Accel: TCG, QEMU: script("forks", "sleep 1000 & wait")}, "version: context deadline exceeded"},
		"program that prints without end":     {Options{DataDir: dir, Accel: TCG, QEMU: script("talks", "exec yes")}, "version: context deadline exceeded"},
		"QEMU without the accelerator":        {Options{DataDir: dir, Accel: TCG, QEMU: script("refuses", polite+"; echo 'invalid accelerator tcg' >&2; exit 1")}, "it says \"invalid accelerator tcg\""},
		"QEMU whose monitor sends nothing":    {Options{DataDir: dir, Accel: TCG, QEMU: script("silent", polite+"; exec sleep 1000")}, "sends no greeting"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			switch {
			case strings.Contains(tc.says, "deadline"):
				ctx, cancel = context.WithTimeout(ctx, 200*time.Millisecond)
			case strings.Contains(tc.says, "greet"):
				// Within this time two shells must start, even on a slow machine.
				ctx, cancel = context.WithTimeout(ctx, 3*time.Second)
			}
			defer cancel()
			_, err := Read(ctx, tc.o)
			require.ErrorContains(t, err, tc.says)
		})
	}
	require.Equal(t, before, held(t))
}

func TestHeadKeepsTheBeginning(t *testing.T) {
	var h head
	n, err := io.Copy(&h, io.LimitReader(strings.NewReader(strings.Repeat("x", maxOutput)+strings.Repeat("y", maxOutput)), 2*maxOutput))
	require.NoError(t, err)
	require.EqualValues(t, 2*maxOutput, n)
	require.Equal(t, strings.Repeat("x", maxOutput), h.String())
	fmt.Fprint(&h, "z")
	require.False(t, bytes.Contains([]byte(h.String()), []byte("z")))
}
