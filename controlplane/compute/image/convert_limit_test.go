package image

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// bomb returns a streamOptimized VMDK with grains of 64 KiB, all full of the same byte. Package vdisk accepts the
// image. Its data is about 100 times as large as the file.
func bomb(t *testing.T, grains int) []byte {
	t.Helper()
	const sector, perTable, grain = 512, 512, 128 // the last two in sectors or entries
	var grainData bytes.Buffer
	z := zlib.NewWriter(&grainData)
	_, err := z.Write(bytes.Repeat([]byte{7}, grain*sector))
	require.NoError(t, err)
	require.NoError(t, z.Close())

	descriptor := fmt.Sprintf("# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\ncreateType=\"streamOptimized\"\n"+
		"RW %d SPARSE \"disk.vmdk\"\n", grains*grain)
	tables := (grains + perTable - 1) / perTable
	directoryAt := 3
	tablesAt := directoryAt + (tables*4+sector-1)/sector
	dataAt := tablesAt + tables*perTable*4/sector
	step := (12 + grainData.Len() + sector - 1) / sector
	out := make([]byte, (dataAt+grains*step)*sector)
	copy(out[sector:], descriptor)
	le := binary.LittleEndian
	copy(out, "KDMV")
	for at, v := range map[int]uint32{4: 3, 8: 1<<16 | 1<<17 | 1, 44: perTable} {
		le.PutUint32(out[at:], v)
	}
	for at, v := range map[int]uint64{12: uint64(grains * grain), 20: grain, 28: 1, 36: 2, 48: 0, 56: uint64(directoryAt), 64: uint64(dataAt)} {
		le.PutUint64(out[at:], v)
	}
	le.PutUint16(out[77:], 1)
	for i := range tables {
		le.PutUint32(out[directoryAt*sector+i*4:], uint32(tablesAt+i*perTable*4/sector))
	}
	for i := range grains {
		at := dataAt + i*step
		le.PutUint32(out[tablesAt*sector+i*4:], uint32(at))
		le.PutUint64(out[at*sector:], uint64(i*grain))
		le.PutUint32(out[at*sector+8:], uint32(grainData.Len()))
		copy(out[at*sector+12:], grainData.Bytes())
	}
	return out
}

// TestConversionIsLimited imports an image whose conversion takes longer than allowed. The image must become ERROR with
// the reason, and leave no file. Without the limit, the same image must be converted.
func TestConversionIsLimited(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	s.convertTime = time.Nanosecond
	w.run(s)
	data := bomb(t, 2000)
	made, err := s.Create(member(t), described(w.write("bomb", data)), [32]byte{})
	require.NoError(t, err)
	i := w.settled(made.Image.ID)
	require.Equal(t, cloud.ImageError, i.Status)
	require.Contains(t, i.Metadata[cloud.ImageReason], "its conversion to QCOW2 took longer than 1ns")
	require.Empty(t, w.kept(1))

	w = newWorld(t, 1)
	s = w.member(1)
	w.run(s)
	made, err = s.Create(member(t), described(w.write("bomb", data)), [32]byte{})
	require.NoError(t, err)
	i = w.settled(made.Image.ID)
	require.Equal(t, cloud.ImageAvailable, i.Status, i.Metadata)
	require.Greater(t, i.SizeBytes, uint64(100*len(data)/2))
}

// TestConversionEndsWithImage deletes images whose conversions wait until another conversion ends. The imports must
// end, and their files must be removed.
func TestConversionEndsWithImage(t *testing.T) {
	w := newWorld(t, 1)
	s := w.member(1)
	for range maxConversions {
		s.conversions <- struct{}{} // in place of conversions that never end
	}
	w.run(s)
	// One file for both imports: an import fails if its source is written again while it is read.
	source := w.write("bomb", bomb(t, 100))
	var ids []cloud.ImageID
	for range 2 {
		made, err := s.Create(member(t), described(source), [32]byte{})
		require.NoError(t, err)
		ids = append(ids, made.Image.ID)
	}
	copies := func(n int) func() bool { return func() bool { return len(w.kept(1)) == n } }
	require.Eventually(t, copies(2), 30*time.Second, time.Millisecond, "the sources are copied: %v", w.kept(1))
	for n, id := range ids {
		require.NoError(t, s.Delete(member(t), "acme", id, [32]byte{}))
		require.Eventually(t, copies(1-n), 30*time.Second, time.Millisecond, "the import of a deleted image ends")
	}
	// An import without a conversion does not wait.
	made, err := s.Create(member(t), described(w.write("raw", noise(1000))), [32]byte{})
	require.NoError(t, err)
	require.Equal(t, cloud.ImageAvailable, w.settled(made.Image.ID).Status)
}
