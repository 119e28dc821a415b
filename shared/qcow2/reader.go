package qcow2

import (
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
)

// Content is the kind of content that an image stores for a cluster of its disk.
type Content uint8

const (
	Unallocated Content = iota // nothing is stored: the cluster has the content of the backing file, or zeros without one
	Zeros
	Data
)

// A Reader reads the data of an image. It accepts the same images as [Inspect], but checks an entry of an L2 table only
// when it reads the entry. Reading a cluster whose entry points outside the file returns an error. A Reader never opens
// a backing file. To read an overlay, the caller must read the clusters that are [Unallocated] from the backing file.
//
// A Reader keeps the L1 table (at most 32 MiB), one L2 table and two clusters in memory. Its methods must not be called
// concurrently.
type Reader struct {
	img *image
	r   io.ReaderAt
	l1  []byte
	// tablesOnly is true for a Reader of NewTableReader: ReadCluster returns an error, because the data may be
	// encrypted.
	tablesOnly bool

	l2   []byte
	l2At uint64 // offset of l2 in the file; 0: none is loaded

	packed   uint64 // entry of the compressed cluster in unpacked; 0: none
	unpacked []byte
	cluster  []byte // buffer of ReadAt
}

// NewReader returns a Reader of the image in r, which is size bytes long. An error that wraps [ErrRefused] means that
// the image is not supported or damaged.
func NewReader(r io.ReaderAt, size int64) (*Reader, error) { return newReader(r, size, false) }

// NewTableReader is like NewReader, but also accepts an encrypted image. The Reader reads only the tables of the image,
// with Lookup and NextMapped. ReadCluster and ReadAt return an error.
func NewTableReader(r io.ReaderAt, size int64) (*Reader, error) { return newReader(r, size, true) }

func newReader(r io.ReaderAt, size int64, encrypted bool) (*Reader, error) {
	first := make([]byte, min(max(size, 0), 1<<MaxClusterBits))
	if _, err := r.ReadAt(first, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read header: %w", err)
	}
	img, err := parse(first, uint64(max(size, 0)), encrypted)
	if err != nil {
		return nil, err
	}
	d := &Reader{img: img, r: r, tablesOnly: encrypted, l1: make([]byte, img.l1Used*8), l2: make([]byte, img.cluster)}
	if _, err := r.ReadAt(d.l1, int64(img.l1Offset)); err != nil {
		return nil, fmt.Errorf("read L1 table: %w", err)
	}
	return d, nil
}

// Size returns the size of the disk in bytes.
func (d *Reader) Size() uint64 { return d.img.info.VirtualSize }

// ClusterSize returns the size of a cluster in bytes.
func (d *Reader) ClusterSize() uint64 { return d.img.cluster }

// Info returns the properties of the image. Allocated is 0, because a Reader does not count the clusters.
func (d *Reader) Info() Info { return d.img.info }

// NextMapped returns the number of the first cluster, from cluster n on, that an L2 table describes. All clusters from
// n up to this cluster are [Unallocated]. If there is no such cluster, NextMapped returns the number of clusters of the
// disk. NextMapped reads no L2 table, so the returned cluster can be [Unallocated] too.
func (d *Reader) NextMapped(n uint64) uint64 {
	perTable := d.img.l2Span / d.img.cluster
	for i := n / perTable; i < d.img.l1Used; i++ {
		if binary.BigEndian.Uint64(d.l1[i*8:])&offsetMask != 0 {
			return max(n, i*perTable)
		}
	}
	return (d.Size() + d.img.cluster - 1) / d.img.cluster
}

// ReadCluster reads cluster n into b, which must have the length of a cluster. It does not change b if it returns
// [Unallocated] or [Zeros] without an error. If the image has extended L2 entries, the unallocated subclusters of a
// cluster with data are zeros in b.
func (d *Reader) ReadCluster(n uint64, b []byte) (Content, error) {
	if d.tablesOnly {
		return 0, errors.New("qcow2: only the tables of this image can be read")
	}
	entry, parts, content, err := d.lookup(n)
	if err != nil || content != Data {
		return content, err
	}
	if entry&flagCompressed != 0 {
		return Data, d.readCompressed(entry, b)
	}
	if err := readFull(d.r, b, int64(entry&offsetMask)); err != nil {
		return 0, err
	}
	if d.img.info.ExtendedL2 {
		part := len(b) / 32
		for i := range 32 {
			if parts>>i&1 == 0 {
				clear(b[i*part : (i+1)*part])
			}
		}
	}
	return Data, nil
}

// Lookup returns the kind of content of cluster n, without reading the data.
func (d *Reader) Lookup(n uint64) (Content, error) {
	_, _, content, err := d.lookup(n)
	return content, err
}

// lookup returns the L2 entry of a cluster after checking it, the subcluster bitmap of an extended L2 entry, and the
// kind of content of the cluster.
func (d *Reader) lookup(n uint64) (entry, parts uint64, content Content, err error) {
	perTable := d.img.l2Span / d.img.cluster
	if n/perTable >= d.img.l1Used {
		return 0, 0, Unallocated, nil
	}
	entry = binary.BigEndian.Uint64(d.l1[n/perTable*8:])
	if entry&l1Reserved != 0 {
		return 0, 0, 0, refuse("L1 entry %d has reserved bits set", n/perTable)
	}
	if entry&offsetMask == 0 {
		return 0, 0, Unallocated, nil
	}
	if err := d.loadL2(entry & offsetMask); err != nil {
		return 0, 0, 0, err
	}
	at := n % perTable * d.img.entrySize()
	entry = binary.BigEndian.Uint64(d.l2[at:])
	where := func() string { return fmt.Sprintf("the L2 entry of cluster %d", n) }
	if entry&flagCompressed != 0 {
		return entry, 0, Data, d.img.compressed(entry, where)
	}
	if entry&l2Reserved != 0 {
		return 0, 0, 0, refuse("%s has reserved bits set", where())
	}
	if d.img.info.ExtendedL2 {
		parts = binary.BigEndian.Uint64(d.l2[at+8:])
	}
	data := entry & offsetMask
	switch {
	case d.img.info.ExtendedL2 && uint32(parts) == 0 && parts != 0, !d.img.info.ExtendedL2 && entry&flagZero != 0:
		return entry, parts, Zeros, nil
	case d.img.info.ExtendedL2 && parts == 0, data == 0:
		return entry, parts, Unallocated, nil
	case data%d.img.cluster != 0 || data >= d.img.fileSize:
		return 0, 0, 0, refuse("%s leads to %#x, which is not a cluster of the file", where(), data)
	}
	return entry, parts, Data, nil
}

// loadL2 reads the L2 table at an offset of the file, unless it is loaded already.
func (d *Reader) loadL2(at uint64) error {
	if at == d.l2At {
		return nil
	}
	if err := d.img.table("L2 table", at, d.img.cluster); err != nil {
		return err
	}
	d.l2At = 0
	if _, err := d.r.ReadAt(d.l2, int64(at)); err != nil {
		return fmt.Errorf("read L2 table at %#x: %w", at, err)
	}
	d.l2At = at
	return nil
}

// readFull fills b with the bytes at an offset of the file. The part of b that lies after the end of the file is set to
// zeros, because the last cluster of a file can be incomplete.
func readFull(r io.ReaderAt, b []byte, at int64) error {
	n, err := r.ReadAt(b, at)
	if err != nil && !errors.Is(err, io.EOF) {
		return fmt.Errorf("read cluster at %#x: %w", at, err)
	}
	clear(b[n:])
	return nil
}

// readCompressed decompresses a cluster into b. entry is its L2 entry, which img.compressed has checked.
func (d *Reader) readCompressed(entry uint64, b []byte) error {
	if entry != d.packed {
		shift := 62 - (d.img.info.ClusterBits - 8)
		at := entry & (1<<shift - 1)
		// The entry gives only the number of sectors. The compressed data can end at any byte of the last sector.
		data := make([]byte, (entry&(flagCompressed-1)>>shift+1)*sector-at%sector)
		if err := readFull(d.r, data, int64(at)); err != nil {
			return err
		}
		if d.unpacked == nil {
			d.unpacked = make([]byte, d.img.cluster)
		}
		d.packed = 0
		if err := decompress(d.unpacked, data, d.img.info.Compression); err != nil {
			return refuse("the compressed cluster at %#x cannot be read: %v", at, err)
		}
		d.packed = entry
	}
	copy(b, d.unpacked)
	return nil
}

// decompress fills out from compressed data, which may be followed by other bytes.
func decompress(out, data []byte, method Compression) error {
	if method == Zstd {
		z, err := zstd.NewReader(bytes.NewReader(data), zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(8<<20))
		if err != nil {
			return err
		}
		defer z.Close()
		_, err = io.ReadFull(z, out)
		return err
	}
	z := flate.NewReader(bytes.NewReader(data))
	_, err := io.ReadFull(z, out)
	return errors.Join(err, z.Close())
}

// ReadAt reads the disk as if the image had no backing file: clusters that are [Unallocated] are zeros. It implements
// io.ReaderAt, except that calls must not be concurrent.
func (d *Reader) ReadAt(b []byte, offset int64) (n int, err error) {
	if offset < 0 {
		return 0, errors.New("qcow2: negative offset")
	}
	if d.cluster == nil {
		d.cluster = make([]byte, d.img.cluster)
	}
	for n < len(b) {
		at := uint64(offset) + uint64(n)
		if at >= d.Size() {
			return n, io.EOF
		}
		within := at % d.img.cluster
		piece := b[n:min(uint64(len(b)), uint64(n)+min(d.img.cluster-within, d.Size()-at))]
		switch content, err := d.ReadCluster(at/d.img.cluster, d.cluster); {
		case err != nil:
			return n, err
		case content == Data:
			copy(piece, d.cluster[within:])
		default:
			clear(piece)
		}
		n += len(piece)
	}
	return n, nil
}
