package rbd_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// importBytes creates an image from bytes.
func (l *lab) importBytes(image string, size uint64, data []byte) error {
	return rbd.Import(l.bounded(), l.client, name(image), size, bytes.NewReader(data))
}

// bounded returns a context for a stream.
func (l *lab) bounded() context.Context {
	ctx, cancel := context.WithTimeout(l.Context(), 2*time.Minute)
	l.Cleanup(cancel)
	return ctx
}

func (l *lab) snapshot(image, name string) {
	l.Helper()
	_, err := l.client.CreateSnapshot(l.Context(), &rbdv1.CreateSnapshotRequest{Name: snapshot(image, name)})
	require.NoError(l, err)
}

func (l *lab) remove(images ...string) {
	l.Helper()
	for _, image := range images {
		_, err := l.client.RemoveImage(l.Context(), &rbdv1.RemoveImageRequest{Name: name(image)})
		require.NoError(l, err)
	}
}

// readAll returns the bytes of an image.
func (l *lab) readAll(image string) []byte {
	l.Helper()
	l.snapshot(image, "read")
	data, _ := l.export(image, "read", "", make([]byte, l.get(image).GetSize()))
	_, err := l.client.RemoveSnapshot(l.Context(), &rbdv1.RemoveSnapshotRequest{Name: snapshot(image, "read")})
	require.NoError(l, err)
	return data
}

// export applies what ExportImage sends to data. It returns data, and how many bytes were sent.
func (l *lab) export(image, name, from string, data []byte) (result []byte, sent int) {
	l.Helper()
	stream, err := l.client.ExportImage(l.bounded(), &rbdv1.ExportImageRequest{Snapshot: snapshot(image, name), FromSnapshot: from})
	require.NoError(l, err)
	for {
		e, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return data, sent
		}
		require.NoError(l, err)
		copy(data[e.GetOffset():], e.GetData())
		clear(data[e.GetOffset() : e.GetOffset()+e.GetZeros()])
		sent += len(e.GetData())
	}
}

// qemuName returns the name of an image for QEMU's programs, as the cluster's administrator.
func (l *lab) qemuName(image string) string {
	return "rbd:rbd/" + image + ":conf=" + l.ceph.Conf
}
