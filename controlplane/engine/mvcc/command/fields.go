package command

import (
	"encoding/binary"
)

// FieldDecoder decodes the fields of a binary encoding one after the other from Rest. After an error, Err is set and
// all methods return zero values.
type FieldDecoder struct {
	Rest []byte
	Err  error
}

// Fail sets Err to ErrMalformed and drops the rest of the input.
func (d *FieldDecoder) Fail() {
	d.Rest, d.Err = nil, ErrMalformed
}

// Byte decodes one byte. It fails at the end of the input.
func (d *FieldDecoder) Byte() byte {
	if len(d.Rest) == 0 {
		d.Fail()
		return 0
	}
	v := d.Rest[0]
	d.Rest = d.Rest[1:]
	return v
}

// Uint64 decodes an unsigned varint. It fails if there is no valid one.
func (d *FieldDecoder) Uint64() uint64 {
	v, n := binary.Uvarint(d.Rest)
	if n <= 0 {
		d.Fail()
		return 0
	}
	d.Rest = d.Rest[n:]
	return v
}

// Int64 decodes an unsigned varint. It fails if the number does not fit into an int64.
func (d *FieldDecoder) Int64() int64 {
	v := d.Uint64()
	if int64(v) < 0 {
		d.Fail()
		return 0
	}
	return int64(v)
}

// Count decodes the number of items that follow. It fails if the number is above the parameter most, or above the
// number of bytes that are left, since an item takes at least one byte.
func (d *FieldDecoder) Count(most int) int {
	v := d.Uint64()
	if v > uint64(most) || v > uint64(len(d.Rest)) {
		d.Fail()
		return 0
	}
	return int(v)
}

// Bytes decodes a byte string that is preceded by its length. It fails if the length is above the parameter most. The
// result aliases the input and has no spare capacity.
func (d *FieldDecoder) Bytes(most int) []byte {
	n := d.Count(most)
	v := d.Rest[:n:n]
	d.Rest = d.Rest[n:]
	return v
}

// Take returns the next n bytes, which alias the input. It fails if fewer are left.
func (d *FieldDecoder) Take(n int) []byte {
	if n > len(d.Rest) {
		d.Fail()
		return nil
	}
	v := d.Rest[:n:n]
	d.Rest = d.Rest[n:]
	return v
}

// Fixed64 decodes a big-endian uint64 of eight bytes.
func (d *FieldDecoder) Fixed64() uint64 {
	if v := d.Take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

func appendBytes(b, v []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(v))), v...)
}
