package consensus

import "encoding/binary"

func appendBool(buf []byte, v bool) []byte {
	if v {
		return append(buf, 1)
	}
	return append(buf, 0)
}

// reader takes fields off a buffer and remembers whether one was missing or malformed.
type reader struct {
	b          []byte
	short, bad bool
}

func (r *reader) take(n int) []byte {
	if len(r.b) < n {
		r.short, r.b = true, nil
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

func (r *reader) byte() byte {
	if v := r.take(1); v != nil {
		return v[0]
	}
	return 0
}

func (r *reader) bool() bool {
	v := r.byte()
	r.bad = r.bad || v > 1
	return v == 1
}

func (r *reader) fixed64() uint64 {
	if v := r.take(8); v != nil {
		return binary.LittleEndian.Uint64(v)
	}
	return 0
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	switch {
	case n == 0:
		r.short = true
		return 0
	case n < 0:
		r.bad = true
		r.b = nil
		return 0
	}
	r.b = r.b[n:]
	return v
}
