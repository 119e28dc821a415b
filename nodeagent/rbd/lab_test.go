package rbd_test

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// nobody is the user and group ID of the helpers in the tests.
const nobody = 65534

// lab is a Ceph cluster and a client of it.
type lab struct {
	*testing.T
	ceph    *rbdtest.Ceph
	options rbd.Options
	cluster *rbd.Cluster
	client  rbdv1.RbdServiceClient
}

func newLab(t *testing.T) *lab {
	l := &lab{T: t, ceph: rbdtest.Start(t)}
	l.options = rbd.Options{
		Program: rbdtest.Program(t), UID: nobody, GID: nobody, Timeout: 60 * time.Second,
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)),
	}
	l.cluster = rbd.New(l.options, l.ceph.Connect())
	l.client = rbdv1.NewRbdServiceClient(l.cluster)
	t.Cleanup(l.cluster.Close)
	return l
}

// in runs a part of the test.
func (l *lab) in(name string, f func(l *lab)) {
	l.Run(name, func(t *testing.T) {
		inner := *l
		inner.T = t
		f(&inner)
	})
}

// name returns the full name of an image in the cluster's pool.
func name(image string) *rbdv1.ImageName {
	return &rbdv1.ImageName{Pool: rbdtest.Pool, Image: image}
}

// snapshot returns the full name of a snapshot of an image in the cluster's pool.
func snapshot(image, snapshot string) *rbdv1.SnapshotName {
	return &rbdv1.SnapshotName{Image: name(image), Snapshot: snapshot}
}

// get returns the properties of an image.
func (l *lab) get(image string) *rbdv1.Image {
	l.Helper()
	out, err := l.client.GetImage(l.Context(), &rbdv1.GetImageRequest{Name: name(image), Usage: true})
	require.NoError(l, err)
	return out
}

// images returns the names of all images of the pool.
func (l *lab) images() []string {
	l.Helper()
	out, err := l.client.ListImages(l.Context(), &rbdv1.ListImagesRequest{Pool: rbdtest.Pool})
	require.NoError(l, err)
	return out.GetImages()
}

// requireCode requires that err has a gRPC code and contains a text.
func requireCode(t *testing.T, code codes.Code, text string, err error) {
	t.Helper()
	require.Equal(t, code, status.Code(err), "%v", err)
	require.ErrorContains(t, err, text)
}
