package cloud

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/fault"
)

const someImage = "0190a000-0000-7000-8000-000000000001"

func blank(id string) Disk { return Disk{ID: id, Blank: true, SizeGiB: 1} }

// TestSpecCheck checks that Check accepts valid specs, and that its error for an invalid one names the field and the
// limit.
func TestSpecCheck(t *testing.T) {
	disks := func(n int, bus DiskBus) (all []Disk) {
		for i := range n {
			d := blank(fmt.Sprint("d", i))
			d.Bus = bus
			all = append(all, d)
		}
		return all
	}
	nics := func(n int) (all []NIC) {
		for i := range n {
			all = append(all, NIC{ID: fmt.Sprint("nic", i)})
		}
		return all
	}
	disk := func(change func(*Disk)) Spec { d := blank("a"); change(&d); return Spec{Disks: []Disk{d}} }
	for _, c := range []struct {
		name  string
		spec  Spec
		field string // "" if the spec is valid
		says  string
	}{
		{"nothing", Spec{}, "", ""},
		{"the smallest values", Spec{CPU: &CPU{VCPUs: 1}, Memory: &Memory{SizeMiB: MinMemoryMiB}}, "", ""},
		{"the largest values", Spec{CPU: &CPU{VCPUs: MaxVCPUs}, Memory: &Memory{SizeMiB: MaxMemoryMiB}, Disks: disks(MaxDisks, BusVirtio), Network: nics(MaxNICs)}, "", ""},
		{"one vCPU too many", Spec{CPU: &CPU{VCPUs: MaxVCPUs + 1}}, "spec.cpu.vcpus", "1 to 288, got 289"},
		{"10^9 vCPUs", Spec{CPU: &CPU{VCPUs: 1e9}}, "spec.cpu.vcpus", "1000000000"},
		{"only sockets and cores", Spec{CPU: &CPU{Sockets: 2, CoresPerSocket: 3}}, "", ""},
		{"1 × 1, the default of REST, with 5 vCPUs", Spec{CPU: &CPU{VCPUs: 5, Sockets: 1, CoresPerSocket: 1}}, "", ""},
		{"2 × 3 with 6 vCPUs", Spec{CPU: &CPU{VCPUs: 6, Sockets: 2, CoresPerSocket: 3}}, "", ""},
		{"2 × 3 with 5 vCPUs", Spec{CPU: &CPU{VCPUs: 5, Sockets: 2, CoresPerSocket: 3}}, "spec.cpu", "2 × 3 is not 5"},
		{"sockets that do not divide", Spec{CPU: &CPU{VCPUs: 5, Sockets: 2}}, "spec.cpu", "sockets"},
		{"cores that do not divide", Spec{CPU: &CPU{VCPUs: 5, CoresPerSocket: 2}}, "spec.cpu", "cores"},
		{"more cores than vCPUs", Spec{CPU: &CPU{VCPUs: 2, CoresPerSocket: 4}}, "spec.cpu", "cores"},
		{"a product that overflows to 0", Spec{CPU: &CPU{Sockets: 1 << 16, CoresPerSocket: 1 << 16}}, "spec.cpu.vcpus", "got 0"},
		{"a product that overflows to a small number", Spec{CPU: &CPU{Sockets: 1<<31 + 1, CoresPerSocket: 2}}, "spec.cpu", "at most 288"},
		{"the largest numbers", Spec{CPU: &CPU{VCPUs: math.MaxUint32, Sockets: math.MaxUint32, CoresPerSocket: math.MaxUint32}}, "spec.cpu.vcpus", ""},
		{"a model", Spec{CPU: &CPU{Model: "Skylake-Server-v4"}}, "", ""},
		{"a model with options", Spec{CPU: &CPU{Model: "max,+invtsc"}}, "spec.cpu.cpu_model", ""},
		{"a long model", Spec{CPU: &CPU{Model: strings.Repeat("m", 65)}}, "spec.cpu.cpu_model", ""},
		{"too little memory", Spec{Memory: &Memory{SizeMiB: MinMemoryMiB - 1}}, "spec.memory.size_mib", "got 63"},
		{"too much memory", Spec{Memory: &Memory{SizeMiB: math.MaxUint64}}, "spec.memory.size_mib", ""},
		{"one disk too many", Spec{Disks: disks(MaxDisks+1, BusVirtio)}, "spec.disks", "at most 16, got 17"},
		{"four IDE disks", Spec{Disks: disks(4, BusIDE)}, "", ""},
		{"five IDE disks", Spec{Disks: disks(5, BusIDE)}, "spec.disks", "at most 4 on one ide bus, got 5"},
		{"seven SATA disks", Spec{Disks: disks(7, BusSATA)}, "spec.disks", "at most 6 on one sata bus"},
		{"two disks with the same id", Spec{Disks: []Disk{blank("a"), blank("a")}}, "spec.disks[a].id", "twice"},
		{"a disk without an id", disk(func(d *Disk) { d.ID = "" }), "spec.disks[0].id", ""},
		{"a disk id that is an option", disk(func(d *Disk) { d.ID = "a,readonly=on" }), "spec.disks[0].id", ""},
		{"a disk id that is a path", disk(func(d *Disk) { d.ID = "../a" }), "spec.disks[0].id", ""},
		{"a long disk id", disk(func(d *Disk) { d.ID = strings.Repeat("a", 33) }), "spec.disks[0].id", ""},
		{"a disk without a source", disk(func(d *Disk) { d.Blank = false }), "spec.disks[a].source", "exactly one"},
		{"a disk with two sources", disk(func(d *Disk) { d.Image = someImage }), "spec.disks[a].source", "exactly one"},
		{"a disk with three sources", disk(func(d *Disk) { d.Image, d.Volume = someImage, "v" }), "spec.disks[a].source", "exactly one"},
		{"a disk from an image", disk(func(d *Disk) { d.Blank, d.Image = false, someImage }), "", ""},
		{"a disk from a path", disk(func(d *Disk) { d.Blank, d.Image = false, "/etc/shadow" }), "spec.disks[a].source.image_id", "UUID"},
		{"a disk of 0 GiB", disk(func(d *Disk) { d.SizeGiB = 0 }), "spec.disks[a].size_gib", "got 0"},
		{"the largest disk", disk(func(d *Disk) { d.SizeGiB = MaxDiskGiB }), "", ""},
		{"a disk above the largest size", disk(func(d *Disk) { d.SizeGiB = MaxDiskGiB + 1 }), "spec.disks[a].size_gib", "got 65537"},
		{"a size that overflows in bytes", disk(func(d *Disk) { d.SizeGiB = 1 << 34 }), "spec.disks[a].size_gib", ""},
		{"an unknown bus", disk(func(d *Disk) { d.Bus = 255 }), "spec.disks[a].bus", "unknown value 255"},
		{"an unknown cache", disk(func(d *Disk) { d.Cache = CacheWritethrough + 1 }), "spec.disks[a].cache", "unknown value"},
		{"one NIC too many", Spec{Network: nics(MaxNICs + 1)}, "spec.network", "at most 8, got 9"},
		{"a NIC without an id", Spec{Network: []NIC{{}}}, "spec.network[0].id", ""},
		{"two NICs with the same id", Spec{Network: []NIC{{ID: "n"}, {ID: "n"}}}, "spec.network[1].id", "twice"},
		{"an unknown NIC model", Spec{Network: []NIC{{ID: "n", Model: 9}}}, "spec.network[0].model", "unknown value 9"},
		{"a kernel", Spec{Boot: Boot{Kernel: someImage, Initrd: someImage, Cmdline: "console=ttyS0"}}, "", ""},
		{"a kernel that is a path", Spec{Boot: Boot{Kernel: "/etc/shadow"}}, "spec.boot.kernel", "not a path"},
		{"an initrd that is a path", Spec{Boot: Boot{Kernel: someImage, Initrd: "../x"}}, "spec.boot.initrd", "not a path"},
		{"an initrd without a kernel", Spec{Boot: Boot{Initrd: someImage}}, "spec.boot.initrd", "needs a kernel"},
		{"a command line without a kernel", Spec{Boot: Boot{Cmdline: "x"}}, "spec.boot.cmdline", "needs a kernel"},
		{"a command line of two lines", Spec{Boot: Boot{Kernel: someImage, Cmdline: "a\nb"}}, "spec.boot.cmdline", "ASCII"},
		{"a command line in Greek", Spec{Boot: Boot{Kernel: someImage, Cmdline: "α"}}, "spec.boot.cmdline", "ASCII"},
		{"a long command line", Spec{Boot: Boot{Kernel: someImage, Cmdline: strings.Repeat("x", MaxCmdline+1)}}, "spec.boot.cmdline", "2049"},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.spec.Normalize()
			err := c.spec.Check()
			if c.field == "" {
				require.NoError(t, err)
				sockets, cores := c.spec.CPU.Topology()
				require.Equal(t, c.spec.CPU.VCPUs, sockets*cores)
				return
			}
			f, ok := fault.From(err)
			require.True(t, ok && f.Kind == fault.InvalidArgument, "%v", err)
			require.Equal(t, c.field, f.Field)
			require.Contains(t, f.Message, c.says)
		})
	}
}

// TestNormalize checks that Normalize sets unset fields to their defaults, changes no other field, and changes nothing
// when called again.
func TestNormalize(t *testing.T) {
	given := Spec{Disks: []Disk{{ID: "a", Blank: true, SizeGiB: 1}, {ID: "b", Blank: true, Bus: BusIDE, Cache: CacheNone}}, Memory: &Memory{Hugepages: true}}
	given.Normalize()
	require.Equal(t, Spec{
		CPU: &CPU{VCPUs: 1}, Memory: &Memory{SizeMiB: DefaultMemory, Hugepages: true},
		Disks: []Disk{
			{ID: "a", Blank: true, SizeGiB: 1, Bus: BusVirtio, Cache: CacheWriteback}, {ID: "b", Blank: true, Bus: BusIDE, Cache: CacheNone},
		},
	}, given, "Normalize must set defaults only, and leave a disk size of 0")
	again := given
	again.Normalize()
	require.Equal(t, given, again)
	shared := &CPU{Sockets: 2, CoresPerSocket: 2}
	s := Spec{CPU: shared}
	s.Normalize()
	require.EqualValues(t, 4, s.CPU.VCPUs)
	require.Zero(t, shared.VCPUs, "Normalize must not change a struct that the caller shares")
}

// TestHugepages checks that memory in huge pages is counted apart from other memory, and must consist of whole pages.
func TestHugepages(t *testing.T) {
	s := Spec{Memory: &Memory{SizeMiB: 64, Hugepages: true}}
	s.Normalize()
	require.NoError(t, s.Check())
	require.Equal(t, Capacity{VCPUs: 1, HugepagesMiB: 64}, s.Need())
	require.EqualValues(t, 64, s.Need().AllMemoryMiB())
	s.Memory.SizeMiB = 65
	f, ok := fault.From(s.Check())
	require.True(t, ok && f.Kind == fault.InvalidArgument, "%v", f)
	require.Equal(t, "spec.memory.size_mib", f.Field)

	n := Node{Allocatable: Capacity{VCPUs: 4, MemoryMiB: 1024}, HugepagesMiB: 128, Allocated: Capacity{VCPUs: 1, HugepagesMiB: 64}}
	require.Equal(t, Capacity{VCPUs: 3, MemoryMiB: 1024, HugepagesMiB: 64}, n.Free())

	vm := VM{State: Running, Spec: s}
	vm.Spec.Memory = &Memory{SizeMiB: 64, Hugepages: true}
	require.Equal(t, []string{FeatureHugepages}, vm.Features())
	next := vm.Spec
	next.Memory = &Memory{SizeMiB: 96}
	require.NoError(t, vm.ResizeAtNextStart(&next))
	require.Equal(t, Capacity{VCPUs: 1, MemoryMiB: 96, HugepagesMiB: 64}, vm.Reserved(), "the present process keeps its huge pages")
	require.Equal(t, "memory_mib=96,hugepages=false", vm.PendingResize())
}

func TestNeedAndImages(t *testing.T) {
	s := Spec{
		CPU: &CPU{VCPUs: 3}, Memory: &Memory{SizeMiB: 100}, Boot: Boot{Kernel: "k", Initrd: "k"},
		Disks: []Disk{{ID: "a", Image: "i", SizeGiB: 2}, {ID: "b", Blank: true, SizeGiB: 3}, {ID: "c", Volume: "v", SizeGiB: 99}, {ID: "d", Image: "i", SizeGiB: 1}},
	}
	require.Equal(t, Capacity{VCPUs: 3, MemoryMiB: 100, StorageGiB: 6}, s.Need(), "volumes must not count as storage of the VM")
	require.Equal(t, []ImageID{"i", "k"}, s.Images(), "Images must return each image once")
}

// TestNamesAndPairs checks which names, IDs and pairs are accepted, among them those that are one byte below and above
// the limits.
func TestNamesAndPairs(t *testing.T) {
	long := strings.Repeat("a", 63)
	for name, ok := range map[string]bool{
		"a": true, long: true, "web-1": true, "": false, long + "a": false, "1a": false, "-a": false, "Web": false, "a_b": false, "a.b": false,
		"a\n": false, "ä": false, "a/b": false,
	} {
		require.Equal(t, ok, CheckName("name", name) == nil, "%q", name)
	}
	for id, ok := range map[string]bool{
		"a": true, "A.b_c@d-e": true, "0": true, long: true, "": false, long + "a": false, ".a": false, "a/b": false, "a:b": false, "a b": false, "a\n": false,
	} {
		require.Equal(t, ok, CheckCallerID("id", id) == nil, "%q", id)
	}
	for id, ok := range map[string]bool{
		someImage: true, "": false, strings.ToUpper("0190a000-0000-7000-8000-00000000000a"): false, "{" + someImage + "}": false,
		"urn:uuid:" + someImage: false, strings.ReplaceAll(someImage, "-", ""): false, someImage + "\n": false,
	} {
		require.Equal(t, ok, CheckUUID("id", id) == nil, "%q", id)
	}
	many := map[string]string{}
	for i := range MaxPairs {
		many[fmt.Sprint(i)] = ""
	}
	require.NoError(t, CheckPairs("labels", many))
	many["more"] = ""
	for name, m := range map[string]map[string]string{
		"too many": many, "no key": {"": "x"}, "a long key": {strings.Repeat("k", MaxPairKey+1): ""}, "a long value": {"k": strings.Repeat("v", MaxPairValue+1)},
		"a key of two lines": {"a\nb": ""}, "a key that is not UTF-8": {"\xff": ""}, "a value that is not UTF-8": {"k": "\xff"}, "a value with NUL": {"k": "\x00"},
	} {
		require.True(t, fault.Is(CheckPairs("labels", m), fault.InvalidArgument), name)
	}
	require.NoError(t, CheckPairs("metadata", map[string]string{strings.Repeat("k", MaxPairKey): strings.Repeat("v", MaxPairValue), "a/b": "α\n"}))
}
