// Package console removes control sequences from the serial output of a guest, so that it can be printed on a terminal.
//
// The bytes of a console log are chosen by a tenant and could move the cursor, set the terminal's title or make the
// terminal send input. A [Filter] writes valid UTF-8 in which newline and tab are the only control characters.
//
// # Decisions
//
//   - Sequences are dropped whole (ECMA-48: CSI, OSC, DCS, SOS, PM, APC, escapes of two and more bytes), in their
//     seven-bit form and as the C1 characters U+0080 to U+009F that a UTF-8 terminal obeys as well.
//   - A carriage return that overwrites a line becomes a newline, so that no text is lost; before a newline it is
//     dropped.
//   - A newline ends any sequence, and so do [maxSequence] characters: a guest that stops in the middle of one, or
//     sends binary data, does not hide the output that follows.
package console

import (
	"io"
	"unicode/utf8"
)

// maxSequence is the maximum length of a control sequence in characters.
const maxSequence = 4096

type state uint8

const (
	text state = iota
	// escape is after ESC, intermediate after ESC and one of 0x20 to 0x2f.
	escape
	intermediate
	// csi is after CSI; str inside of a string, which ST ends.
	csi
	str
)

// Filter is an io.Writer that passes on text and drops control sequences. Close passes on an incomplete character.
type Filter struct {
	w     io.Writer
	state state
	// length of the sequence so far, in characters.
	length int
	// rest is the beginning of a character whose other bytes have not been written yet.
	rest []byte
	// returned is set while the character after a carriage return is not known, fresh while the line is empty.
	returned, fresh bool
	out             []byte
}

// NewFilter returns a filter that writes to w.
func NewFilter(w io.Writer) *Filter { return &Filter{w: w, fresh: true} }

// Write filters p and writes the text to w. It always returns len(p); the error is that of w.
func (f *Filter) Write(p []byte) (int, error) {
	in := append(f.rest, p...)
	for len(in) > 0 && utf8.FullRune(in) {
		r, size := utf8.DecodeRune(in)
		in = in[size:]
		f.step(r)
	}
	f.rest = append([]byte(nil), in...)
	return len(p), f.flush()
}

// Close writes an incomplete character as U+FFFD. It does not close w.
func (f *Filter) Close() error {
	for range f.rest {
		f.step(utf8.RuneError)
	}
	f.rest = nil
	return f.flush()
}

func (f *Filter) flush() error {
	if len(f.out) == 0 {
		return nil
	}
	_, err := f.w.Write(f.out)
	f.out = f.out[:0]
	return err
}

// step processes one character. Invalid UTF-8 arrives as utf8.RuneError and is text.
func (f *Filter) step(r rune) {
	switch {
	case r == 0x1b:
		f.enter(escape)
	case r == 0x9b:
		f.enter(csi)
	case r == 0x90, r == 0x98, r == 0x9d, r == 0x9e, r == 0x9f:
		f.enter(str)
	case r == 0x18, r == 0x1a, r >= 0x80 && r < 0xa0: // CAN and SUB cancel a sequence, ST ends one
		f.state = text
	case f.state == text || r == '\n' || f.length >= maxSequence:
		f.state = text
		f.emit(r)
	default:
		f.length++
		f.sequence(r)
	}
}

func (f *Filter) enter(s state) { f.state, f.length = s, 0 }

// sequence processes a character inside of a sequence.
func (f *Filter) sequence(r rune) {
	switch f.state {
	case escape, intermediate:
		switch {
		case r >= 0x20 && r <= 0x2f:
			f.state = intermediate
		case f.state == escape && r == '[':
			f.state = csi
		case f.state == escape && (r == ']' || r == 'P' || r == 'X' || r == '^' || r == '_'):
			f.state = str
		case r >= 0x30 && r <= 0x7e:
			f.state = text
		case r >= 0xa0:
			f.state = text
			f.emit(r)
		}
	case csi:
		switch {
		case r >= 0x40 && r <= 0x7e:
			f.state = text
		case r >= 0xa0:
			f.state = text
			f.emit(r)
		}
	case str:
		if r == 0x07 { // BEL ends an OSC, as in xterm
			f.state = text
		}
	}
}

// emit appends a character to the output. It drops control characters other than newline and tab.
func (f *Filter) emit(r rune) {
	switch {
	case r == '\r':
		f.returned = true
		return
	case r == '\n':
		f.out = append(f.out, '\n')
		f.returned, f.fresh = false, true
		return
	case r < 0x20 && r != '\t', r == 0x7f:
		return
	}
	if f.returned && !f.fresh {
		f.out = append(f.out, '\n')
	}
	f.out = utf8.AppendRune(f.out, r)
	f.returned, f.fresh = false, false
}
