// Package codec encodes and decodes the fields of the binary formats of package consensus.
package codec

import "encoding/binary"

// AppendBool appends v to buf as one byte: 0 for false, 1 for true.
func AppendBool(buf []byte, v bool) []byte {
	if v {
		return append(buf, 1)
	}
	return append(buf, 0)
}

// Reader decodes fields from the start of Rest, which becomes shorter with each field. Short is set if Rest ended
// within a field, Malformed if a field had an invalid value. After either, the returned values are meaningless. When
// all fields are decoded, the caller must check that Short and Malformed are false and that Rest is empty.
type Reader struct {
	Rest             []byte
	Short, Malformed bool
}

// Take removes the first n bytes from Rest and returns them without copying. If Rest is shorter, it returns nil and
// sets Short.
func (r *Reader) Take(n int) []byte {
	if len(r.Rest) < n {
		r.Short, r.Rest = true, nil
		return nil
	}
	v := r.Rest[:n]
	r.Rest = r.Rest[n:]
	return v
}

// Byte returns the next byte.
func (r *Reader) Byte() byte {
	if v := r.Take(1); v != nil {
		return v[0]
	}
	return 0
}

// Bool decodes a bool that AppendBool has encoded. A byte above 1 sets Malformed.
func (r *Reader) Bool() bool {
	v := r.Byte()
	r.Malformed = r.Malformed || v > 1
	return v == 1
}

// Fixed64 returns the next 8 bytes as a little-endian number.
func (r *Reader) Fixed64() uint64 {
	if v := r.Take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

// Uvarint decodes a number that binary.AppendUvarint has encoded.
func (r *Reader) Uvarint() uint64 {
	v, n := binary.Uvarint(r.Rest)
	switch {
	case n == 0:
		r.Short = true
		return 0
	case n < 0:
		r.Malformed = true
		r.Rest = nil
		return 0
	}
	r.Rest = r.Rest[n:]
	return v
}
