// Package console removes control sequences from the serial output of a guest, so that it can be printed on a terminal.
//
// The bytes of a console log are chosen by a tenant and could move the cursor, set the terminal's title or make the
// terminal send input. A [Filter] writes valid UTF-8 in which newline and tab are the only control characters.
//
// # Decisions
//
//   - Complete control sequences are removed (ECMA-48: CSI, OSC, DCS, SOS, PM, APC, escapes of two and more bytes),
//     both in their seven-bit form and as the C1 characters U+0080 to U+009F, which a UTF-8 terminal also interprets.
//   - A carriage return after text on the same line becomes a newline, because a terminal would overwrite that text. A
//     carriage return before a newline is removed.
//   - A newline ends any sequence, and so do [maxSequence] characters, so that the output after an incomplete sequence
//     or binary data is not hidden.
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
	// escape is the state after ESC. intermediate is the state after ESC and a character from 0x20 to 0x2f.
	escape
	intermediate
	// csi is the state after CSI. str is the state inside a control string (OSC, DCS, SOS, PM or APC), which ends with
	// ST.
	csi
	str
)

// Filter is an io.Writer that removes control sequences and writes the remaining text to another writer. Close must be
// called at the end of the input.
type Filter struct {
	w     io.Writer
	state state
	// length is the number of characters of the current control sequence that have been processed.
	length int
	// rest holds the first bytes of a UTF-8 character whose other bytes come with the next Write.
	rest []byte
	// returned is true after a carriage return, until the next character. fresh is true while the current line is
	// empty.
	returned, fresh bool
	out             []byte
}

// NewFilter returns a Filter that writes the remaining text to w.
func NewFilter(w io.Writer) *Filter { return &Filter{w: w, fresh: true} }

// Write removes control sequences from p and writes the remaining text. It always returns len(p). It returns the error
// of the underlying writer, if any.
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

// Close writes U+FFFD for each byte of an incomplete character at the end. It does not close the underlying writer.
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

// step processes one character of the input: it changes the state or calls emit. r is utf8.RuneError for invalid UTF-8,
// which is treated as text.
func (f *Filter) step(r rune) {
	switch {
	case r == 0x1b:
		f.enter(escape)
	case r == 0x9b:
		f.enter(csi)
	case r == 0x90, r == 0x98, r == 0x9d, r == 0x9e, r == 0x9f:
		f.enter(str)
	case r == 0x18, r == 0x1a, r >= 0x80 && r < 0xa0: // CAN and SUB cancel a sequence; C1 characters such as ST end it
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

// sequence processes a character inside of a control sequence, and sets the state to text when the sequence ends.
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
		if r == 0x07 { // BEL ends a control string, as it ends an OSC in xterm
			f.state = text
		}
	}
}

// emit appends a character of text to the output. It removes control characters other than newline and tab, and writes
// a newline for a carriage return that would overwrite text.
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
