package command

import "fmt"

// Explain decodes the Data of a Command, for tools that read a log. For data from EncodeProgram it returns the program,
// which aliases data. For data from EncodeCompact it returns a nil program and the revision to compact at. For data
// from EncodeTxn, with which only the platform's own records are written, it fails with ErrUnknownFormat.
func Explain(data []byte) (p *Program, compact int64, err error) {
	if len(data) == 0 {
		return nil, 0, fmt.Errorf("explain command: %w", ErrMalformed)
	}
	var d Decoder
	kind, err := d.Decode(data)
	if err == nil && kind == KindTxn {
		err = ErrUnknownFormat
	}
	if err != nil {
		return nil, 0, fmt.Errorf("explain command: %w", err)
	}
	return d.Program, d.Compact, nil
}
