package volume

import (
	"context"
	"errors"
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
	if err := p.checkFormat(v.Key); err != nil {
		return err
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
		_, err := copyHeader(f, content)
		return err
	})
}

// checkFormat returns an error if Options.Format cannot be called with the key.
func (p *Pool) checkFormat(key []byte) error {
	switch {
	case p.o.Format == nil:
		return fmt.Errorf("%w: this host cannot make encrypted volumes", ErrRefused)
	case len(key) == 0:
		return ErrNoKey
	}
	return nil
}

// copyHeader writes the content that Options.Format returned to the empty file f, and returns its length.
func copyHeader(f, content *os.File) (int64, error) {
	n, err := io.Copy(f, io.NewSectionReader(content, 0, maxHeader+1))
	if err == nil && n > maxHeader {
		err = fmt.Errorf("%w: the header of the encrypted volume has more than %d bytes", ErrRefused, maxHeader)
	}
	return n, err
}

// formatTarget makes Target an empty encrypted QCOW2 image with the key of the volume, and returns its length. The
// caller must not have locked the pool, because Options.Format takes seconds. The error wraps ErrNotNow if the control
// plane has not sent the key yet.
func (c *SnapshotCopy) formatTarget(ctx context.Context, key []byte) (int64, error) {
	p := c.pool
	if err := p.checkFormat(key); errors.Is(err, ErrNoKey) {
		return 0, fmt.Errorf("%w: %w", ErrNotNow, err)
	} else if err != nil {
		return 0, err
	}
	select {
	case p.formatting <- struct{}{}:
		defer func() { <-p.formatting }()
	case <-ctx.Done():
		return 0, ctx.Err()
	}
	content, err := p.o.Format(ctx, c.ref.ID, c.record.Size, key)
	if err != nil {
		return 0, err
	}
	defer content.Close()
	return copyHeader(c.target, content)
}
