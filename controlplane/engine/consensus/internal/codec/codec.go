// Package codec reads and writes the fields of the binary formats of consensus.
package codec

import "encoding/binary"

func AppendBool(buf []byte, v bool) []byte {
	if v {
		return append(buf, 1)
	}
	return append(buf, 0)
}

// Reader takes fields off a buffer and remembers whether one was missing or malformed.
type Reader struct {
	Rest             []byte
	Short, Malformed bool
}

func (r *Reader) Take(n int) []byte {
	if len(r.Rest) < n {
		r.Short, r.Rest = true, nil
		return nil
	}
	v := r.Rest[:n]
	r.Rest = r.Rest[n:]
	return v
}

func (r *Reader) Byte() byte {
	if v := r.Take(1); v != nil {
		return v[0]
	}
	return 0
}

func (r *Reader) Bool() bool {
	v := r.Byte()
	r.Malformed = r.Malformed || v > 1
	return v == 1
}

func (r *Reader) Fixed64() uint64 {
	if v := r.Take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

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
