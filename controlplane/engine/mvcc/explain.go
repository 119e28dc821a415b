package mvcc

import "fmt"

// ExplainCommand reads the Data of a Command that EncodeProgram or EncodeCompact made: the program, or, without one, the
// revision below which nothing can be read any more. The program aliases data. It is for tools that read a log; a
// Command of EncodeTxn, which only the platform's own records are written with, is ErrUnknownFormat to it.
func ExplainCommand(data []byte) (p *Program, compact int64, err error) {
	d := FieldDecoder{Rest: data}
	format, kind := d.Byte(), d.Byte()
	switch {
	case d.Err != nil:
	case format == commandFormat && kind == commandProgram:
		p, d.Err = new(programDecoder).decode(d.Rest)
	case format == commandFormat && kind == commandCompact:
		if compact = d.Int64(); d.Err == nil && len(d.Rest) > 0 {
			d.Fail()
		}
	default:
		d.Err = ErrUnknownFormat
	}
	if d.Err != nil {
		return nil, 0, fmt.Errorf("explain command: %w", d.Err)
	}
	return p, compact, nil
}
