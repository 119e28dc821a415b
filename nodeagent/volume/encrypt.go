package volume

import (
	"context"
	"fmt"
	"io"
	"os"
)

// maxHeader is the largest length in bytes of the content that Options.Format returns: a LUKS header and the first
// tables of a QCOW2 image.
const maxHeader = 64 << 20

// createEncrypted makes an encrypted volume. It calls Options.Format before it locks the pool, so that other volumes
// can be changed while Format runs.
func (p *Pool) createEncrypted(ctx context.Context, v Volume) error {
	switch {
	case p.o.Format == nil:
		return fmt.Errorf("%w: this host cannot make encrypted volumes", ErrRefused)
	case len(v.Key) == 0:
		return ErrNoKey
	}
	select {
	case p.formatting <- struct{}{}:
		defer func() { <-p.formatting }()
	case <-ctx.Done():
		return ctx.Err()
	}
	// Another call may have made the volume while this one waited.
	if r, err := p.read(v.ID); err == nil && r.State == ready {
		return p.checkComplete(v, r)
	}
	content, err := p.o.Format(ctx, v.ID, v.Size, v.Key)
	if err != nil {
		return err
	}
	defer content.Close()
	return p.makeFile(ctx, v, func(f *os.File, _ record) error {
		n, err := io.Copy(f, io.NewSectionReader(content, 0, maxHeader+1))
		if err == nil && n > maxHeader {
			err = fmt.Errorf("%w: the header of the encrypted volume has more than %d bytes", ErrRefused, maxHeader)
		}
		return err
	})
}
