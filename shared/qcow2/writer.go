package qcow2

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// A Writer writes a QCOW2 image with data. The offsets of successive writes must rise. Like the images of [Create], the
// image has version 3, clusters of 64 KiB and no backing file. Clusters of zeros take no space in the file.
//
// The Writer keeps one cluster, one L2 table and the L1 table in memory: at most 1.2 MiB.
type Writer struct {
	w    io.WriterAt
	size uint64 // of the virtual disk, in bytes

	l1 []byte
	l2 []byte // the table of the range that is being written
	// range2 is the index of l2 in l1. used2 is true if l2 has an entry.
	range2 uint64
	used2  bool

	cluster []byte // the data of the cluster that is being written
	at      uint64 // the number of that cluster on the disk
	next    uint64 // the number of the next free cluster in the file
	end     uint64 // the end, on the disk, of the data written so far
}

// MaxLength returns the largest length of the file of a Writer, in bytes, for a disk with virtualSize bytes and
// clustersWithData clusters that are not zero.
func MaxLength(virtualSize, clustersWithData uint64) int64 {
	const (
		tableSpan = WriterCluster / 8 * WriterCluster // bytes of the disk that an L2 table describes
		counted   = WriterCluster / 2                 // clusters that a block of reference counts counts
	)
	n := clustersWithData
	n += min(n, virtualSize/tableSpan+1)
	n += 1 + clusters(virtualSize/tableSpan*8+8) // the header and the L1 table
	n += n/(counted-1) + 2                       // the reference counts
	return int64(n * WriterCluster)
}

// errOrder is the error of Write if the offset is below the end of the previous data.
var errOrder = errors.New("write qcow2: offsets must rise")

// WriterCluster is the size of the clusters of an image of a Writer, in bytes.
const WriterCluster = uint64(1) << CreateClusterBits

// NewWriter returns a Writer for an image of virtualSize bytes in w, which must be empty. The virtual size must be one
// that Create accepts.
func NewWriter(w io.WriterAt, virtualSize uint64) (*Writer, error) {
	if virtualSize == 0 || virtualSize%sector != 0 || virtualSize > MaxVirtualSize {
		return nil, fmt.Errorf("create qcow2: a virtual size of %d bytes is not possible", virtualSize)
	}
	span := WriterCluster / 8 * WriterCluster
	l1 := (virtualSize + span - 1) / span * 8
	return &Writer{
		w: w, size: virtualSize, l1: make([]byte, l1), l2: make([]byte, WriterCluster), cluster: make([]byte, WriterCluster),
		next: 1 + clusters(l1),
	}, nil
}

// clusters returns the number of clusters that hold this number of bytes.
func clusters(bytes uint64) uint64 { return (bytes + WriterCluster - 1) / WriterCluster }

// Write writes data at an offset of the disk. The offset must not be below the end of the data of the previous Write.
func (w *Writer) Write(offset uint64, data []byte) error {
	if offset < w.end {
		return errOrder
	}
	if offset > w.size || uint64(len(data)) > w.size-offset {
		return fmt.Errorf("write qcow2: %d bytes at offset %d are outside the disk", len(data), offset)
	}
	w.end = offset + uint64(len(data))
	for len(data) > 0 {
		if n := offset / WriterCluster; n != w.at {
			if err := w.flushCluster(); err != nil {
				return err
			}
			w.at = n
		}
		n := copy(w.cluster[offset%WriterCluster:], data)
		data, offset = data[n:], offset+uint64(n)
	}
	return nil
}

// flushCluster writes the current cluster unless all its bytes are zero.
func (w *Writer) flushCluster() error {
	if isZero(w.cluster) {
		return nil
	}
	if n := w.at / (WriterCluster / 8); n != w.range2 {
		if err := w.flushTable(); err != nil {
			return err
		}
		w.range2 = n
	}
	at, err := w.append(w.cluster)
	if err != nil {
		return err
	}
	const copied = 1 << 63 // the reference count is exactly 1
	binary.BigEndian.PutUint64(w.l2[w.at%(WriterCluster/8)*8:], at|copied)
	w.used2 = true
	clear(w.cluster)
	return nil
}

// flushTable writes the current L2 table unless the table has no entry.
func (w *Writer) flushTable() error {
	if !w.used2 {
		return nil
	}
	at, err := w.append(w.l2)
	if err != nil {
		return err
	}
	const copied = 1 << 63
	binary.BigEndian.PutUint64(w.l1[w.range2*8:], at|copied)
	clear(w.l2)
	w.used2 = false
	return nil
}

// append writes whole clusters at the end of the file, and returns their offset.
func (w *Writer) append(data []byte) (at uint64, err error) {
	at = w.next * WriterCluster
	if _, err := w.w.WriteAt(data, int64(at)); err != nil {
		return 0, fmt.Errorf("write qcow2: %w", err)
	}
	w.next += clusters(uint64(len(data)))
	return at, nil
}

// Close writes the tables and the header, and returns the length of the file. Before Close the file is not a valid
// image.
func (w *Writer) Close() (int64, error) {
	if err := w.flushCluster(); err != nil {
		return 0, err
	}
	if err := w.flushTable(); err != nil {
		return 0, err
	}
	// The refcount blocks count themselves and the refcount table, which has one cluster.
	const counted = WriterCluster / 2 // clusters that a block counts, in 16 bits each
	blocks := uint64(1)
	for blocks*counted < w.next+1+blocks {
		blocks++
	}
	if blocks > WriterCluster/8 {
		return 0, errors.New("write qcow2: more than 16 TiB of data are not possible")
	}
	counts, table := make([]byte, blocks*WriterCluster), make([]byte, WriterCluster)
	for i := range w.next + 1 + blocks {
		binary.BigEndian.PutUint16(counts[i*2:], 1)
	}
	first, err := w.append(counts)
	if err != nil {
		return 0, err
	}
	for i := range blocks {
		binary.BigEndian.PutUint64(table[i*8:], first+i*WriterCluster)
	}
	at, err := w.append(table)
	if err != nil {
		return 0, err
	}
	if _, err := w.w.WriteAt(w.l1, int64(WriterCluster)); err != nil {
		return 0, fmt.Errorf("write qcow2: %w", err)
	}
	head, err := encodeHeader(header{
		Version: 3, ClusterBits: CreateClusterBits, Size: w.size, L1Size: uint32(len(w.l1) / 8), L1Offset: WriterCluster,
		RefcountTableOffset: at, RefcountTableClusters: 1,
	})
	if err != nil {
		return 0, err
	}
	if _, err := w.w.WriteAt(head, 0); err != nil { // last, so that an incomplete file is not a valid image
		return 0, fmt.Errorf("write qcow2: %w", err)
	}
	return int64(w.next * WriterCluster), nil
}

// encodeHeader returns the header of an image of version 3, followed by the compression type (zlib) with padding to
// eight bytes, and the end marker of the header extensions.
func encodeHeader(h header) ([]byte, error) {
	copy(h.Magic[:], Magic)
	h3 := header3{RefcountOrder: 4, HeaderLength: header3Length + 8}
	var head bytes.Buffer
	for _, part := range []any{h, h3, [8]byte{}, [2]uint32{extEnd, 0}} {
		if err := binary.Write(&head, binary.BigEndian, part); err != nil {
			return nil, fmt.Errorf("encode qcow2 header: %w", err)
		}
	}
	return head.Bytes(), nil
}

// isZero reports whether all bytes are zero.
func isZero(b []byte) bool { return len(b) == 0 || b[0] == 0 && bytes.Equal(b[1:], b[:len(b)-1]) }
