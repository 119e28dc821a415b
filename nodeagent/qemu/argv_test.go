package qemu

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// TestArgv checks the command lines in testdata/argv. The input of each case is JSON that overrides fields of spec();
// the expected output is QEMU's command line, one option per line, or the error. With the argument "short", lines that
// the command line of spec() has too are omitted.
func TestArgv(t *testing.T) {
	datadriven.RunTest(t, "testdata/argv", func(t *testing.T, d *datadriven.TestData) string {
		s := spec()
		dec := json.NewDecoder(strings.NewReader(d.Input))
		dec.DisallowUnknownFields()
		require.NoError(t, dec.Decode(&s), d.Pos)
		s, err := s.KeepSlots(Spec{})
		if err != nil {
			return err.Error() + "\n"
		}
		argv, err := Argv("/usr/bin/qemu-system-x86_64", s)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			return err.Error() + "\n"
		}
		lines := optionLines(argv)
		if d.HasArg("short") {
			small, err := Argv("/usr/bin/qemu-system-x86_64", spec())
			require.NoError(t, err)
			plain := optionLines(small)
			lines = slices.DeleteFunc(lines, func(line string) bool { return slices.Contains(plain, line) })
		}
		return strings.Join(lines, "\n") + "\n"
	})
}

// optionLines returns argv with each option and its value joined to one line.
func optionLines(argv []string) []string {
	var lines []string
	for i, a := range argv {
		if i > 0 && !strings.HasPrefix(a, "-") && strings.HasPrefix(argv[i-1], "-") {
			lines[len(lines)-1] += " " + a
			continue
		}
		lines = append(lines, a)
	}
	return lines
}

func TestKeepSlots(t *testing.T) {
	disk := func(id string, bus Bus, slot int) Disk { return Disk{ID: id, Bus: bus, Slot: slot, Cache: NoCache} }
	s := spec()
	s.Disks = []Disk{disk("a", Virtio, -1), disk("b", Virtio, -1), disk("c", SCSI, -1), disk("d", Virtio, 1)}
	first, err := s.KeepSlots(Spec{})
	require.NoError(t, err)
	require.Equal(t, []Disk{disk("a", Virtio, 0), disk("b", Virtio, 2), disk("c", SCSI, 0), disk("d", Virtio, 1)}, first.Disks)
	require.Equal(t, -1, s.Disks[0].Slot, "KeepSlots must not change its argument")

	// After the first disk is removed, another added, and the bus of a third changed, a disk that has the same id and
	// bus must have the same slot.
	s.Disks = []Disk{disk("new", Virtio, -1), disk("b", Virtio, -1), disk("c", Virtio, -1)}
	next, err := s.KeepSlots(first)
	require.NoError(t, err)
	require.Equal(t, []Disk{disk("new", Virtio, 0), disk("b", Virtio, 2), disk("c", Virtio, 1)}, next.Disks)

	s.Disks = nil
	for i := range 5 {
		s.Disks = append(s.Disks, disk(fmt.Sprintf("d%d", i), IDE, -1))
	}
	_, err = s.KeepSlots(Spec{})
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "has room for only 4 disks")
	s.Disks = []Disk{disk("x", "floppy", -1)}
	s, err = s.KeepSlots(Spec{})
	require.NoError(t, err)
	require.ErrorContains(t, s.Validate(), `the bus "floppy"`)
}

// FuzzArgv checks where the strings of a tenant may appear on the command line. Argv must either refuse a spec, or
// return the command line of the same spec with harmless strings, in which only these strings are replaced. The
// kernel's command line must not appear.
func FuzzArgv(f *testing.F) {
	f.Add(vmID, "pc-q35-7.2", "qemu64", "console=ttyS0", "root", "virtio", "none", "qcow2", 1, 64, 0)
	f.Add(vmID, "pc-q35-7.2", "max,+vmx", "a,b=c -kernel /etc/shadow", "data-1", "scsi", "writeback", "raw", 2, 512, 3)
	f.Add(vmID+",x=y", "q35", "host", "\x00", `x","filename":"/etc/shadow`, "ide", "unsafe", "vmdk", 300, 0, 9)
	f.Fuzz(func(t *testing.T, id, machine, model, cmdline, diskID, bus, cache, format string, vcpus, memory, slot int) {
		s := Spec{ID: id, GenerationID: id, Machine: machine, Accel: TCG, CPUModel: model, VCPUs: vcpus, MemoryMiB: uint64(memory),
			Kernel: true, Cmdline: cmdline,
			Disks: []Disk{{ID: diskID, Bus: Bus(bus), Slot: slot, Cache: Cache(cache), Base: qcow2.Format(format)}}}
		got, err := Argv("/usr/bin/qemu", s)
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			require.Nil(t, got)
			return
		}
		const mild = "x"
		s.Cmdline, s.Disks[0].ID, s.ID, s.GenerationID, s.CPUModel, s.Machine = mild, mild, vmID, vmID, "qemu64", "pc-q35-7.2"
		want, err := Argv("/usr/bin/qemu", s)
		require.NoError(t, err)
		if cmdline == "" {
			want = want[:len(want)-1]
		}
		require.Len(t, got, len(want))
		for i, arg := range want {
			// Validate has accepted the strings, so they may appear in place of the harmless ones, and nowhere else.
			arg = strings.ReplaceAll(arg, vmID, id)
			if i > 0 && want[i-1] == "-cpu" {
				arg = model
			}
			if i > 0 && want[i-1] == "-machine" {
				arg = strings.Replace(arg, "pc-q35-7.2", machine, 1)
			}
			if strings.Contains(arg, deviceID(mild)) {
				var a, b map[string]any
				require.NoError(t, json.Unmarshal([]byte(arg), &a))
				require.NoError(t, json.Unmarshal([]byte(got[i]), &b))
				require.Equal(t, deviceID(diskID), b["id"])
				require.Equal(t, diskID[:min(20, len(diskID))], b["serial"])
				a["id"], a["serial"] = b["id"], b["serial"]
				require.Equal(t, a, b)
				continue
			}
			require.Equal(t, arg, got[i])
		}
	})
}
