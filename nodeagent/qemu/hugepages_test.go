package qemu

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/testenv"
)

const kernelHugepages = "/sys/kernel/mm/hugepages/hugepages-2048kB/"

// hugepages returns a number from the kernel's files about huge pages.
func hugepages(t *testing.T, file string) int {
	t.Helper()
	text, err := os.ReadFile(kernelHugepages + file)
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	return n
}

// reserveHugepages makes the kernel reserve enough huge pages for one guest of the given size, until the end of the test.
func reserveHugepages(t *testing.T, mib uint64) {
	t.Helper()
	testenv.NeedRoot(t)
	before := hugepages(t, "nr_hugepages")
	set := func(n int) error {
		return os.WriteFile(kernelHugepages+"nr_hugepages", []byte(strconv.Itoa(n)), 0o644)
	}
	t.Cleanup(func() { require.NoError(t, set(before)) })
	more := int(mib/hugepageMiB) - hugepages(t, "free_hugepages")
	require.NoError(t, set(before+max(more, 0)))
	require.GreaterOrEqual(t, hugepages(t, "free_hugepages"), int(mib/hugepageMiB), "the kernel has too little free memory")
}

// TestHugepages boots a guest whose memory consists of huge pages, and tries to start another one for which the host has
// no pages left.
func TestHugepages(t *testing.T) {
	l := newLab(t)
	s, files := l.bootable()
	s.Hugepages = true
	reserveHugepages(t, s.MemoryMiB)
	free := hugepages(t, "free_hugepages")
	p := l.launch(s, files)
	require.Equal(t, free-int(s.MemoryMiB/hugepageMiB), hugepages(t, "free_hugepages"), "QEMU must take all pages when it starts")
	require.NoError(t, p.Resume(l.ctx))
	l.says("GUEST UP\n")

	other := newLab(t)
	next, nextFiles := other.bootable()
	next.Hugepages, next.MemoryMiB = true, uint64(hugepages(t, "free_hugepages")*hugepageMiB)+s.MemoryMiB
	_, err := other.launcher.Launch(other.ctx, other.home, next, nextFiles, 7, "test")
	require.ErrorContains(t, err, "memory")
	l.writes()
}
