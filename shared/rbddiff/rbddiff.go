// Package rbddiff writes and reads streams in the format "rbd diff v1" of Ceph, which the commands rbd export-diff,
// import-diff and merge-diff use. Such a stream has the content of a disk, or the changes between two snapshots of a
// disk. Trivet uses the format for all exports of volumes, also of those that are not RBD images.
//
// A stream has the following parts. Numbers are little-endian.
//
//	"rbd diff v1\n"
//	'f' length(4) name        the older snapshot; absent if the stream has the whole content
//	't' length(4) name        the snapshot of the content
//	's' size(8)               the size of the disk in bytes
//	'w' offset(8) length(8) data   bytes to write; any number of these and of the next
//	'z' offset(8) length(8)        bytes to set to zero
//	'e'                       the end; a stream without it is incomplete
//
// The ranges of a stream of this package do not overlap, and their offsets rise. In a stream of the whole content, all
// bytes outside of the ranges are zero. In a stream of changes, they are unchanged.
//
// https://docs.ceph.com/en/pacific/dev/rbd-diff/ defines the format.
package rbddiff

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

const magic = "rbd diff v1\n"

// exportMagics are the first bytes of all versions of Ceph's formats for exports.
var exportMagics = []string{"rbd diff v", "rbd image v"}

// IsExport reports whether a file with these first bytes is an export of Ceph in any format with a header: rbd
// export-diff, or rbd export --export-format 2. [Reader] reads only version 1 of export-diff. The caller passes at
// least DetectLength bytes, or the whole file.
func IsExport(first []byte) bool {
	return slices.ContainsFunc(exportMagics, func(m string) bool { return bytes.HasPrefix(first, []byte(m)) })
}

// DetectLength is the number of bytes that [IsExport] needs.
const DetectLength = len(magic)

const (
	fromTag  = 'f'
	toTag    = 't'
	sizeTag  = 's'
	dataTag  = 'w'
	zerosTag = 'z'
	endTag   = 'e'
)

const (
	// MaxData is the maximum length in bytes of the data of one range that [Reader] accepts and [Writer] writes.
	MaxData = 64 << 20
	// maxName is the maximum length of a snapshot's name in bytes.
	maxName = 4096
)

// Header describes a stream.
type Header struct {
	// From is the name of the older snapshot. It is empty if the stream has the whole content of the snapshot To.
	From string
	To   string
	// Size is the size of the disk in bytes. If it differs from the size in the older snapshot, the disk gets this size
	// before the ranges are written.
	Size uint64
}

// Range is a range of bytes of the disk.
type Range struct {
	Offset uint64
	Length uint64
	// Data has Length bytes, or is nil if all bytes of the range are zero.
	Data []byte
}

// Writer writes a stream.
type Writer struct {
	w    io.Writer
	size uint64
	end  uint64 // of the last range
}

// NewWriter writes the header of a stream to w and returns a Writer for the ranges. Each range is written with at most
// two calls of w.Write.
func NewWriter(w io.Writer, h Header) (*Writer, error) {
	b := []byte(magic)
	for _, name := range []struct {
		tag  byte
		text string
	}{{fromTag, h.From}, {toTag, h.To}} {
		if name.text == "" {
			continue
		}
		if len(name.text) > maxName {
			return nil, fmt.Errorf("write diff: the name of a snapshot has %d bytes, at most %d are possible", len(name.text), maxName)
		}
		b = append(b, name.tag)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(name.text)))
		b = append(b, name.text...)
	}
	b = append(b, sizeTag)
	b = binary.LittleEndian.AppendUint64(b, h.Size)
	if _, err := w.Write(b); err != nil {
		return nil, fmt.Errorf("write diff: %w", err)
	}
	return &Writer{w: w, size: h.Size}, nil
}

// Write writes a range. It returns an error if the range is empty, begins before the end of the previous one, or
// exceeds the disk.
func (w *Writer) Write(r Range) error {
	if err := check(r, w.end, w.size); err != nil {
		return fmt.Errorf("write diff: %w", err)
	}
	if r.Data != nil && uint64(len(r.Data)) != r.Length {
		return fmt.Errorf("write diff: a range of %d bytes has %d bytes of data", r.Length, len(r.Data))
	}
	head := [17]byte{zerosTag}
	if r.Data != nil {
		head[0] = dataTag
	}
	binary.LittleEndian.PutUint64(head[1:], r.Offset)
	binary.LittleEndian.PutUint64(head[9:], r.Length)
	w.end = r.Offset + r.Length
	if _, err := w.w.Write(head[:]); err != nil {
		return fmt.Errorf("write diff: %w", err)
	}
	if r.Data == nil {
		return nil
	}
	if _, err := w.w.Write(r.Data); err != nil {
		return fmt.Errorf("write diff: %w", err)
	}
	return nil
}

// Close writes the end of the stream.
func (w *Writer) Close() error {
	if _, err := w.w.Write([]byte{endTag}); err != nil {
		return fmt.Errorf("write diff: %w", err)
	}
	return nil
}

// ErrFormat is wrapped by the errors of [Reader] about a stream that is not valid or not complete.
var ErrFormat = errors.New("not a valid diff of a volume")

// Reader reads a stream. It is safe for streams from untrusted sources.
type Reader struct {
	r      *bufio.Reader
	header Header
	tag    byte // of the next range, or 0
	end    uint64
	read   int64
	buffer []byte
}

// NewReader reads the header of a stream.
func NewReader(r io.Reader) (*Reader, error) {
	d := &Reader{r: bufio.NewReaderSize(r, 256<<10)}
	first := make([]byte, len(magic))
	if err := d.full(first); err != nil {
		return nil, err
	}
	if string(first) != magic {
		return nil, fmt.Errorf("%w: it does not begin with %q", ErrFormat, magic)
	}
	sized := false
	for {
		tag, err := d.readTag()
		if err != nil {
			return nil, err
		}
		switch tag {
		case fromTag:
			d.header.From, err = d.name()
		case toTag:
			d.header.To, err = d.name()
		case sizeTag:
			sized = true
			d.header.Size, err = d.number()
		default:
			if !sized {
				return nil, fmt.Errorf("%w: the size is missing", ErrFormat)
			}
			d.tag = tag
			return d, nil
		}
		if err != nil {
			return nil, err
		}
	}
}

// Header returns the header.
func (d *Reader) Header() Header { return d.header }

// Consumed returns the number of bytes of the stream up to the end of the header or of the last range that Next has
// returned.
func (d *Reader) Consumed() int64 {
	if d.tag != 0 {
		return d.read - 1
	}
	return d.read
}

// Next returns the next range, or io.EOF after the last one if the stream is complete. Data is valid until the next
// call. All other errors wrap [ErrFormat] or are errors of the underlying reader. A stream that ends too early is an
// error that wraps both [ErrFormat] and io.ErrUnexpectedEOF.
func (d *Reader) Next() (r Range, err error) {
	tag := d.tag
	d.tag = 0
	if tag == 0 {
		if tag, err = d.readTag(); err != nil {
			return r, err
		}
	}
	switch tag {
	case endTag:
		return r, io.EOF
	case dataTag, zerosTag:
	default:
		return r, fmt.Errorf("%w: the record type %q is unknown", ErrFormat, tag)
	}
	if r.Offset, err = d.number(); err != nil {
		return r, err
	}
	if r.Length, err = d.number(); err != nil {
		return r, err
	}
	if err := check(r, d.end, d.header.Size); err != nil {
		return r, fmt.Errorf("%w: %w", ErrFormat, err)
	}
	d.end = r.Offset + r.Length
	if tag == zerosTag {
		return r, nil
	}
	if r.Length > MaxData {
		return r, fmt.Errorf("%w: a range has %d bytes of data, at most %d are possible", ErrFormat, r.Length, MaxData)
	}
	if uint64(len(d.buffer)) < r.Length {
		d.buffer = make([]byte, r.Length)
	}
	r.Data = d.buffer[:r.Length]
	return r, d.full(r.Data)
}

// check returns an error if a range is empty, begins before end, or is not within size bytes.
func check(r Range, end, size uint64) error {
	switch {
	case r.Length == 0:
		return fmt.Errorf("the range at offset %d is empty", r.Offset)
	case r.Offset < end:
		return fmt.Errorf("the range at offset %d begins before the end of the previous one", r.Offset)
	case r.Offset > size || r.Length > size-r.Offset:
		return fmt.Errorf("the range of %d bytes at offset %d exceeds the disk of %d bytes", r.Length, r.Offset, size)
	}
	return nil
}

func (d *Reader) full(b []byte) error {
	n, err := io.ReadFull(d.r, b)
	d.read += int64(n)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: it is incomplete: %w", ErrFormat, io.ErrUnexpectedEOF)
	}
	return err
}

func (d *Reader) readTag() (byte, error) {
	var b [1]byte
	err := d.full(b[:])
	return b[0], err
}

func (d *Reader) number() (uint64, error) {
	var b [8]byte
	err := d.full(b[:])
	return binary.LittleEndian.Uint64(b[:]), err
}

func (d *Reader) name() (string, error) {
	var length [4]byte
	if err := d.full(length[:]); err != nil {
		return "", err
	}
	n := binary.LittleEndian.Uint32(length[:])
	if n > maxName {
		return "", fmt.Errorf("%w: the name of a snapshot has %d bytes, at most %d are possible", ErrFormat, n, maxName)
	}
	b := make([]byte, n)
	err := d.full(b)
	return string(b), err
}
