package main

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// encrypter implements volume.Encrypter.
type encrypter struct {
	*agent
	slots chan struct{} // semaphore; limits the copies of images, because each takes space on the host's disk
}

// maxEncrypt is the maximum number of images that are encrypted at the same time.
const maxEncrypt = 2

func newEncrypter(a *agent) *encrypter { return &encrypter{a, make(chan struct{}, maxEncrypt)} }

func (e *encrypter) Header(ctx context.Context, id string, key []byte) (*os.File, error) {
	return e.qemu.FormatHeader(ctx, e.homes, id, key)
}

// Encrypt writes the encrypted image to a file without a name in the data directory, so that nothing is left if the
// agent ends.
func (e *encrypter) Encrypt(ctx context.Context, id string, key []byte, image *os.File, format qcow2.Format, size uint64) (*os.File, error) {
	select {
	case e.slots <- struct{}{}:
		defer func() { <-e.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	fd, err := unix.Open(e.config.DataDir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file for the encrypted image: %w", err)
	}
	f := os.NewFile(uintptr(fd), "encrypted image")
	if err := e.qemu.EncryptImage(ctx, e.homes, id, key, image, format, size, f); err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
