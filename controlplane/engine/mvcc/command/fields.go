package command

import (
	"encoding/binary"
)

// decoder reads the fields of a record. The first fault sticks; what is read after it is zero.
type FieldDecoder struct {
	Rest []byte
	Err  error
}

func (d *FieldDecoder) Fail() {
	d.Rest, d.Err = nil, ErrMalformed
}

func (d *FieldDecoder) Byte() byte {
	if len(d.Rest) == 0 {
		d.Fail()
		return 0
	}
	v := d.Rest[0]
	d.Rest = d.Rest[1:]
	return v
}

func (d *FieldDecoder) Uint64() uint64 {
	v, n := binary.Uvarint(d.Rest)
	if n <= 0 {
		d.Fail()
		return 0
	}
	d.Rest = d.Rest[n:]
	return v
}

func (d *FieldDecoder) Int64() int64 {
	v := d.Uint64()
	if int64(v) < 0 {
		d.Fail()
		return 0
	}
	return int64(v)
}

// count reads a number of things of which each takes at least one byte more.
func (d *FieldDecoder) Count(most int) int {
	v := d.Uint64()
	if v > uint64(most) || v > uint64(len(d.Rest)) {
		d.Fail()
		return 0
	}
	return int(v)
}

// bytes reads a length and that many bytes, which alias the input and cannot be appended to.
func (d *FieldDecoder) Bytes(most int) []byte {
	n := d.Count(most)
	v := d.Rest[:n:n]
	d.Rest = d.Rest[n:]
	return v
}

// take reads n bytes, which alias the input.
func (d *FieldDecoder) Take(n int) []byte {
	if n > len(d.Rest) {
		d.Fail()
		return nil
	}
	v := d.Rest[:n:n]
	d.Rest = d.Rest[n:]
	return v
}

func (d *FieldDecoder) Fixed64() uint64 {
	if v := d.Take(8); v != nil {
		return binary.BigEndian.Uint64(v)
	}
	return 0
}

func appendBytes(b, v []byte) []byte {
	return append(binary.AppendUvarint(b, uint64(len(v))), v...)
}
