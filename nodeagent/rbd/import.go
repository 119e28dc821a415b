package rbd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// extentSize is the number of bytes that Import sends in a message. It is the size of an RBD object.
const extentSize = 4 << 20

// Import creates an image with the given size and the bytes of r. If r has fewer bytes, the rest of the image is zero.
// Blocks of zeros are not sent and take no space in the cluster. The context needs a deadline. Errors of the cluster
// are those of ImportImage.
func Import(ctx context.Context, client rbdv1.RbdServiceClient, name *rbdv1.ImageName, size uint64, r io.Reader) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream if reading r fails
	stream, err := client.ImportImage(ctx)
	if err != nil {
		return err
	}
	first := &rbdv1.CreateImageRequest{Name: name, Size: size}
	if err := stream.Send(&rbdv1.ImportImageRequest{Image: first}); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	data, zeros := make([]byte, extentSize), make([]byte, extentSize)
	for offset := uint64(0); ; {
		n, readErr := io.ReadFull(r, data)
		if readErr != nil && !errors.Is(readErr, io.EOF) && !errors.Is(readErr, io.ErrUnexpectedEOF) {
			return fmt.Errorf("read at offset %d: %w", offset, readErr)
		}
		if !bytes.Equal(data[:n], zeros[:n]) {
			extent := &rbdv1.Extent{Offset: offset, Data: data[:n]}
			err := stream.Send(&rbdv1.ImportImageRequest{Extent: extent})
			if errors.Is(err, io.EOF) {
				break // the helper ended the call, and CloseAndRecv returns why
			}
			if err != nil {
				return err
			}
		}
		offset += uint64(n)
		if readErr != nil {
			break
		}
	}
	_, err = stream.CloseAndRecv()
	return err
}
