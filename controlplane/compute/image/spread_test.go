package image

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// blank returns the bytes of an empty QCOW2 image of 1 GiB, after patch, if any, has changed them.
func blank(t *testing.T, patch func([]byte)) []byte {
	path := filepath.Join(t.TempDir(), "blank")
	f, err := os.Create(path)
	require.NoError(t, err)
	_, err = qcow2.Create(f, 1<<30)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	if patch != nil {
		patch(b)
	}
	return b
}

// TestExamine checks that the format of an image is detected from its bytes, and that it must equal the declared
// format, if any. A refused image must leave no file.
func TestExamine(t *testing.T) {
	backing := func(b []byte) { // write the name of a backing file into the free space after the header
		copy(b[1024:], "/etc/shadow")
		binary.BigEndian.PutUint64(b[8:], 1024)
		binary.BigEndian.PutUint32(b[16:], uint32(len("/etc/shadow")))
	}
	external := func(b []byte) { b[79] |= 4 } // incompatible feature 2: external data file
	for _, c := range []struct {
		name     string
		bytes    []byte
		declared cloud.ImageFormat
		is       cloud.ImageFormat
		virtual  uint64
		says     string
	}{
		{"raw", noise(4096), cloud.FormatUnspecified, cloud.FormatRaw, 4096, ""},
		{"raw, as declared", noise(1001), cloud.FormatRaw, cloud.FormatRaw, 1001, ""},
		{"qcow2", blank(t, nil), cloud.FormatUnspecified, cloud.FormatQCOW2, 1 << 30, ""},
		{"qcow2, as declared", blank(t, nil), cloud.FormatQCOW2, cloud.FormatQCOW2, 1 << 30, ""},
		{"a compressed initrd", append([]byte("\x1f\x8b\x08"), noise(100)...), cloud.FormatRaw, cloud.FormatRaw, 103, ""},
		{"declared qcow2, but raw", noise(4096), cloud.FormatQCOW2, 0, 0, "declared QCOW2, but its bytes are raw"},
		{"declared raw, but qcow2", blank(t, nil), cloud.FormatRaw, 0, 0, "declared RAW, but its bytes are qcow2"},
		{"a backing file", blank(t, backing), cloud.FormatUnspecified, 0, 0, "backing"},
		{"an external data file", blank(t, external), cloud.FormatQCOW2, 0, 0, "another file"},
		{"an absurd virtual size", blank(t, func(b []byte) { binary.BigEndian.PutUint64(b[24:], 1<<62) }), cloud.FormatQCOW2, 0, 0, "virtual"},
		{"a qcow2 header that is cut short", blank(t, nil)[:100], cloud.FormatQCOW2, 0, 0, ""},
		{"vmdk", append([]byte("KDMV"), noise(1000)...), cloud.FormatUnspecified, 0, 0, "disk image refused"},
		{"a vmdk descriptor naming a host's file", []byte("# Disk DescriptorFile\nRW 1 FLAT \"/etc/shadow\" 0\n"), cloud.FormatRaw, 0, 0, "bytes are vmdk"},
		{"the same, declared vmdk", []byte("# Disk DescriptorFile\nRW 1 FLAT \"/etc/shadow\" 0\n" + strings.Repeat("\n", 512)), cloud.FormatVMDK, 0, 0, "data in other files"},
		{"vhdx", append([]byte("vhdxfile"), noise(1000)...), cloud.FormatUnspecified, 0, 0, "disk image refused"},
		{"declared vmdk, but raw", noise(4096), cloud.FormatVMDK, 0, 0, "declared VMDK, but its bytes are raw"},
		{"declared vmdk, but qcow2", blank(t, nil), cloud.FormatVMDK, 0, 0, "declared VMDK, but its bytes are qcow2"},
		{"declared vhd, but qcow2", blank(t, nil), cloud.FormatVHD, 0, 0, "declared VHD, but its bytes are qcow2"},
		{"declared vhd, but raw", noise(4096), cloud.FormatVHD, 0, 0, "no VHD footer"},
		{"another format", append([]byte("QED\x00"), noise(1000)...), cloud.FormatUnspecified, 0, 0, "qed are not served"},
		{"nothing", nil, cloud.FormatRaw, 0, 0, "empty"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 1)
			s := w.member(1)
			w.run(s)
			i := described(w.write("image", c.bytes))
			i.Format = c.declared
			made, err := s.Create(member(t), i, [32]byte{})
			require.NoError(t, err)
			got := w.settled(made.Image.ID)
			if c.is != cloud.FormatUnspecified {
				require.Equal(t, cloud.ImageAvailable, got.Status, got.Metadata)
				require.Equal(t, c.is, got.Format)
				require.Equal(t, c.virtual, got.VirtualSize)
				require.Equal(t, []string{sumOf(c.bytes)}, w.kept(1))
				return
			}
			require.Equal(t, cloud.ImageError, got.Status)
			require.Contains(t, got.Metadata[cloud.ImageReason], c.says)
			require.NotContains(t, got.Metadata[cloud.ImageReason], w.imports, "the reason contains a path of the member's host")
			require.Empty(t, got.SHA256)
			// The file is deleted just after the record has the reason, so wait.
			require.Eventually(t, func() bool { return len(w.kept(1)) == 0 }, 20*time.Second, time.Millisecond)
		})
	}
}

// fakeHolder simulates a member that has an image: it returns a reader of content from offset.
type fakeHolder func(content []byte, offset uint64) (io.Reader, error)

func serveAll(b []byte, at uint64) (io.Reader, error) { return bytes.NewReader(b[at:]), nil }
func absent([]byte, uint64) (io.Reader, error) {
	return nil, errors.New("the holder does not have the image")
}
func serveWrongBytes(b []byte, at uint64) (io.Reader, error) {
	b = bytes.Clone(b)
	b[len(b)-1]++
	return bytes.NewReader(b[at:]), nil
}

// serveThenFail returns a fakeHolder whose reader returns n bytes and then an error. If bad is set, the first byte is
// wrong.
func serveThenFail(n int, bad bool, with error) fakeHolder {
	return func(b []byte, at uint64) (io.Reader, error) {
		part := bytes.Clone(b[at:min(len(b), int(at)+n)])
		if bad {
			part[0]++
		}
		return io.MultiReader(bytes.NewReader(part), fails{with}), nil
	}
}

type fails struct{ err error }

func (f fails) Read([]byte) (int, error) { return 0, f.err }

func serveTooMuch(b []byte, at uint64) (io.Reader, error) {
	return bytes.NewReader(append(bytes.Clone(b[at:]), 1)), nil
}

type fakeHolders struct {
	Peers     // nil: only ReadImage is called
	content   []byte
	holders   map[uint64]fakeHolder
	requested []string
}

func (m *fakeHolders) ReadImage(_ context.Context, member uint64, _ string, offset uint64) (io.ReadCloser, error) {
	m.requested = append(m.requested, fmt.Sprintf("%d@%d", member, offset))
	r, err := m.holders[member](m.content, offset)
	return io.NopCloser(r), err
}

// TestPull pulls an image from holders that send wrong bytes, fail or end early. Afterwards the image must be stored
// complete and correct, or not at all.
func TestPull(t *testing.T) {
	gone := errors.New("connection reset")
	for _, c := range []struct {
		name    string
		holders []fakeHolder // holders 1, 2, …; the member that pulls is 9
		asked   string
		says    string // text of the expected error; empty: the pull succeeds
	}{
		{"one holder", []fakeHolder{serveAll}, "1@0", ""},
		{"the first returns an error", []fakeHolder{absent, serveAll}, "1@0 2@0", ""},
		{"one fails halfway, the next continues", []fakeHolder{serveThenFail(400, false, gone), serveAll}, "1@0 2@400", ""},
		{"two fail partway", []fakeHolder{serveThenFail(400, false, gone), serveThenFail(400, false, gone), serveAll}, "1@0 2@400 3@800", ""},
		{"one ends early", []fakeHolder{serveThenFail(400, false, io.EOF), serveAll}, "1@0 2@400", ""},
		{"one is corrupt, the next is not", []fakeHolder{serveWrongBytes, serveAll}, "1@0 2@0", ""},
		{"one sends too much", []fakeHolder{serveTooMuch, serveAll}, "1@0 2@0", ""},
		{"the first half has wrong bytes", []fakeHolder{serveThenFail(400, true, gone), serveAll}, "1@0 2@400 2@0", ""},
		{"the second half has wrong bytes", []fakeHolder{serveThenFail(400, false, gone), serveWrongBytes, serveAll}, "1@0 2@400 2@0 3@0", ""},
		{"all are corrupt", []fakeHolder{serveWrongBytes, serveTooMuch, serveWrongBytes}, "1@0 2@0 3@0", "bytes with another checksum"},
		{"all fail", []fakeHolder{serveThenFail(100, false, gone), serveThenFail(100, false, gone)}, "1@0 2@100", "connection reset"},
		{"no holder", nil, "", "no other member"},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t, 3)
			s := w.member(9)
			m := &fakeHolders{content: noise(1000), holders: map[uint64]fakeHolder{}}
			s.opts.Peers = m
			i := &cloud.Image{SHA256: sumOf(m.content), SizeBytes: 1000, Holders: []uint64{9}}
			for n, mouth := range c.holders {
				m.holders[uint64(n+1)] = mouth
				i.Holders = append(i.Holders, uint64(n+1))
			}
			err := s.pull(t.Context(), i)
			require.Equal(t, c.asked, strings.Join(m.requested, " "))
			if c.says != "" {
				require.ErrorContains(t, err, c.says)
				require.Empty(t, w.kept(9))
				return
			}
			require.NoError(t, err)
			require.Equal(t, []string{i.SHA256}, w.kept(9))
			got, err := os.ReadFile(filepath.Join(w.dirs[9], i.SHA256))
			require.NoError(t, err)
			require.Equal(t, m.content, got)
		})
	}
}

func TestPullTimesOut(t *testing.T) {
	w := newWorld(t, 3)
	s := w.member(9)
	ctx, cancel := context.WithCancel(t.Context())
	m := &fakeHolders{content: noise(1000)}
	m.holders = map[uint64]fakeHolder{
		1: func(b []byte, at uint64) (io.Reader, error) { cancel(); return bytes.NewReader(b), nil },
		2: serveAll,
	}
	s.opts.Peers = m
	err := s.pull(ctx, &cloud.Image{SHA256: sumOf(m.content), SizeBytes: 1000, Holders: []uint64{1, 2}})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []string{"1@0"}, m.requested)
	require.Empty(t, w.kept(9))
}

// TestSweep checks that sweep removes exactly the old files that are named by a checksum and not in wanted.
func TestSweep(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "with [odd* name")
	f, err := OpenFiles(dir)
	require.NoError(t, err)
	sums := map[string]string{}
	for _, name := range []string{"wanted", "old", "young", "anew"} {
		sums[name] = sumOf([]byte(name))
		require.NoError(t, os.WriteFile(filepath.Join(dir, sums[name]), []byte(name), 0o600))
	}
	for _, name := range []string{"part-1", "notes.txt", strings.ToUpper(sums["old"])} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	past := time.Now().Add(-time.Hour)
	for _, name := range []string{sums["wanted"], sums["old"], sums["anew"], "part-1", "notes.txt", strings.ToUpper(sums["old"])} {
		require.NoError(t, os.Chtimes(filepath.Join(dir, name), past, past))
	}
	// An import that stores the same bytes again must make the file young.
	p, err := f.begin(4)
	require.NoError(t, err)
	require.NoError(t, p.copy(t.Context(), strings.NewReader("anew"), 4))
	require.NoError(t, p.commit())
	p.discard()
	require.NoError(t, f.sweep(map[string]bool{sums["wanted"]: true}, time.Now(), sweepAge))
	for name, stays := range map[string]bool{"wanted": true, "old": false, "young": true, "anew": true} {
		has, err := f.has(sums[name])
		require.NoError(t, err)
		require.Equal(t, stays, has, name)
	}
	for _, name := range []string{"part-1", "notes.txt", strings.ToUpper(sums["old"])} {
		require.FileExists(t, filepath.Join(dir, name))
	}
	_, err = OpenFiles(dir)
	require.NoError(t, err)
	require.NoFileExists(t, filepath.Join(dir, "part-1"))
	for _, sum := range []string{"", "..", "../" + sums["wanted"], strings.ToUpper(sums["old"]), sums["wanted"] + "x"} {
		_, err := f.Open(sum)
		require.Error(t, err, sum)
	}
}

func TestNoDiskSpace(t *testing.T) {
	f, err := OpenFiles(t.TempDir())
	require.NoError(t, err)
	_, err = f.begin(1 << 60)
	require.ErrorIs(t, err, errNoSpace)
}

// TestOpenRefusesInvalidChecksums calls Open and has with names that are no SHA-256: paths to a file outside the
// directory, and names of other files in it. All must be refused.
func TestOpenRefusesInvalidChecksums(t *testing.T) {
	above := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(above, "secret"), []byte("secret"), 0o600))
	dir := filepath.Join(above, "images")
	f, err := OpenFiles(dir)
	require.NoError(t, err)
	sum := strings.Repeat("0a", 32)
	for _, name := range []string{sum, "file", partPrefix + "1"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	for _, name := range []string{"../secret", filepath.Join(above, "secret"), "./" + sum, sum + "/", sum + "\n", sum + "/../../secret", "file", partPrefix + "1", ".", ""} {
		_, err := f.Open(name)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%q: %v", name, err)
		_, err = f.has(name)
		require.True(t, fault.Is(err, fault.InvalidArgument), "%q: %v", name, err)
	}
	image, err := f.Open(sum)
	require.NoError(t, err)
	require.NoError(t, image.Close())
}
