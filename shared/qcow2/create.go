package qcow2

import (
	"encoding/binary"
	"fmt"
	"io"
)

// CreateClusterBits is the log2 of the cluster size, in bytes, of images made by Create. The clusters have 64 KiB.
const CreateClusterBits = 16

// Create writes an empty version 3 image of virtualSize bytes to w, which must be empty. It returns the length of the
// resulting file in bytes. The image names no backing file. A program that opens the image with QEMU must pass the
// backing file to QEMU, if there is one.
//
// The image can be used as an overlay of a backing file, or without a backing file as a blank disk. It occupies a few
// clusters. Lazy refcounts are off, so a crash of QEMU can leak clusters, but does no other harm.
//
// virtualSize must be a multiple of 512, above 0 and at most MaxVirtualSize.
func Create(w io.WriterAt, virtualSize uint64) (int64, error) {
	if virtualSize == 0 || virtualSize%sector != 0 || virtualSize > MaxVirtualSize {
		return 0, fmt.Errorf("create qcow2: a virtual size of %d bytes is not possible", virtualSize)
	}
	const (
		cluster  = uint64(1) << CreateClusterBits
		l2Span   = cluster / 8 * cluster
		reftable = 1 * cluster // the refcount table is cluster 1 of the file
		refblock = 2 * cluster // the refcount block is cluster 2: 32768 counts of 16 bits, far more than there are clusters
		l1       = 3 * cluster
	)
	entries := (virtualSize + l2Span - 1) / l2Span
	used := l1/cluster + (entries*8+cluster-1)/cluster
	length := int64(used * cluster)

	head, err := encodeHeader(header{Version: 3, ClusterBits: CreateClusterBits, Size: virtualSize, L1Size: uint32(entries),
		L1Offset: l1, RefcountTableOffset: reftable, RefcountTableClusters: 1})
	if err != nil {
		return 0, err
	}
	counts := make([]byte, used*2)
	for i := range used {
		binary.BigEndian.PutUint16(counts[i*2:], 1)
	}
	for _, part := range []struct {
		at    int64
		bytes []byte
	}{
		{length - 1, []byte{0}}, // extends the file; the L1 table and all other unwritten bytes are zero
		{int64(refblock), counts},
		{int64(reftable), binary.BigEndian.AppendUint64(nil, refblock)},
		{0, head}, // written last, so that an incomplete file is not a valid image
	} {
		if _, err := w.WriteAt(part.bytes, part.at); err != nil {
			return 0, fmt.Errorf("write qcow2: %w", err)
		}
	}
	return length, nil
}
