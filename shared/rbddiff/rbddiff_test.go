package rbddiff

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"testing"
)

var testHeader = Header{From: "monday", To: "tuesday", Size: 1 << 20}

var testRanges = []Range{
	{Offset: 0, Length: 5, Data: []byte("first")},
	{Offset: 4096, Length: 8192},
	{Offset: 1<<20 - 4, Length: 4, Data: []byte("last")},
}

func encode(t *testing.T, h Header, ranges []Range) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := NewWriter(&b, h)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range ranges {
		if err := w.Write(r); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// decode returns the ranges of a stream, with copies of their data.
func decode(stream io.Reader) (h Header, ranges []Range, err error) {
	d, err := NewReader(stream)
	if err != nil {
		return h, nil, err
	}
	for {
		r, err := d.Next()
		if errors.Is(err, io.EOF) && !errors.Is(err, ErrFormat) {
			return d.Header(), ranges, nil
		}
		if err != nil {
			return d.Header(), ranges, err
		}
		r.Data = slices.Clone(r.Data)
		ranges = append(ranges, r)
	}
}

func TestReaderReturnsWhatWriterWrote(t *testing.T) {
	for _, h := range []Header{testHeader, {To: "only", Size: 1 << 20}, {Size: 1 << 20}} {
		got, ranges, err := decode(bytes.NewReader(encode(t, h, testRanges)))
		if err != nil || got != h {
			t.Fatalf("header %+v, %v; want %+v", got, err, h)
		}
		if !slices.EqualFunc(ranges, testRanges, func(a, b Range) bool {
			return a.Offset == b.Offset && a.Length == b.Length && bytes.Equal(a.Data, b.Data) && (a.Data == nil) == (b.Data == nil)
		}) {
			t.Fatalf("ranges %+v, want %+v", ranges, testRanges)
		}
	}
}

func TestIncompleteStreamsAreErrors(t *testing.T) {
	whole := encode(t, testHeader, testRanges)
	for n := range whole {
		if _, _, err := decode(bytes.NewReader(whole[:n])); !errors.Is(err, ErrFormat) || !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("the first %d bytes: %v", n, err)
		}
	}
}

func TestConsumedIsAPositionToContinueAt(t *testing.T) {
	whole := encode(t, testHeader, testRanges)
	d, err := NewReader(bytes.NewReader(whole))
	if err != nil {
		t.Fatal(err)
	}
	headerLength := len(encode(t, testHeader, nil)) - 1
	for n := 0; ; n++ {
		want := len(encode(t, testHeader, testRanges[:n])) - 1
		if d.Consumed() != int64(want) || want < headerLength {
			t.Fatalf("after %d ranges: %d bytes consumed, want %d", n, d.Consumed(), want)
		}
		if _, err := d.Next(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

func TestInvalidRangesAreRefused(t *testing.T) {
	for name, ranges := range map[string][]Range{
		"empty":              {{Offset: 5}},
		"overlap":            {{Offset: 0, Length: 10}, {Offset: 9, Length: 1}},
		"beyond the end":     {{Offset: 1<<20 - 1, Length: 2}},
		"offset at the end":  {{Offset: 1<<20 + 1, Length: 1}},
		"length wraps round": {{Offset: 1, Length: 1<<64 - 1}},
	} {
		var b bytes.Buffer
		w, err := NewWriter(&b, testHeader)
		if err != nil {
			t.Fatal(err)
		}
		lax := &Writer{w: &b, size: 1<<64 - 1}
		var refused error
		for _, r := range ranges {
			if refused = w.Write(r); refused != nil {
				break
			}
		}
		if refused == nil {
			t.Errorf("%s: Write accepted it", name)
		}
		b.Reset()
		if _, err := NewWriter(&b, testHeader); err != nil {
			t.Fatal(err)
		}
		for _, r := range ranges { // written without the check
			lax.end = 0
			if err := lax.Write(r); err != nil && r.Length != 0 && name != "length wraps round" {
				t.Fatal(err)
			}
		}
		if name == "empty" || name == "length wraps round" {
			head := [17]byte{zerosTag}
			head[1] = byte(ranges[0].Offset)
			if name != "empty" {
				copy(head[9:], bytes.Repeat([]byte{0xff}, 8))
			}
			b.Write(head[:])
		}
		if _, _, err := decode(&b); !errors.Is(err, ErrFormat) || errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%s: Reader returned %v", name, err)
		}
	}
}

func FuzzReader(f *testing.F) {
	var b bytes.Buffer
	w, _ := NewWriter(&b, testHeader)
	for _, r := range testRanges {
		_ = w.Write(r)
	}
	_ = w.Close()
	f.Add(b.Bytes())
	f.Add([]byte(magic + "s\x00\x00\x00\x00\x00\x00\x00\x01w"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		h, ranges, err := decode(bytes.NewReader(stream))
		if err != nil {
			if len(ranges) > len(stream) {
				t.Fatal("more ranges than bytes")
			}
			return
		}
		end := uint64(0)
		for _, r := range ranges {
			if r.Offset < end || r.Offset+r.Length > h.Size {
				t.Fatalf("invalid range %d+%d was accepted", r.Offset, r.Length)
			}
			end = r.Offset + r.Length
		}
	})
}
