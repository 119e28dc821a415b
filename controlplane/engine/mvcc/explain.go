package mvcc

import "fmt"

// ExplainCommand reads the Data of a Command that EncodeProgram or EncodeCompact made: the program, or, without one, the
// revision below which nothing can be read any more. The program aliases data. It is for tools that read a log; a
// Command of EncodeTxn, which only the platform's own records are written with, is ErrUnknownFormat to it.
func ExplainCommand(data []byte) (p *Program, compact int64, err error) {
	d := decoder{b: data}
	format, kind := d.byte(), d.byte()
	switch {
	case d.err != nil:
	case format == commandFormat && kind == commandProgram:
		p, d.err = new(programDecoder).decode(d.b)
	case format == commandFormat && kind == commandCompact:
		if compact = d.int64(); d.err == nil && len(d.b) > 0 {
			d.fail()
		}
	default:
		d.err = ErrUnknownFormat
	}
	if d.err != nil {
		return nil, 0, fmt.Errorf("explain command: %w", d.err)
	}
	return p, compact, nil
}
