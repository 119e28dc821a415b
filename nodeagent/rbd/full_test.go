package rbd_test

import (
	"strings"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// testFullCluster lowers the limit at which the cluster counts as full. Calls that need space must then fail with the
// reason. Changes of records and deletions of snapshots and images must succeed, so that space can be freed.
func testFullCluster(l *lab) {
	ctx := l.Context()
	_, err := l.client.CreateImage(ctx, &rbdv1.CreateImageRequest{Name: name("kept"), Size: 8 * mib})
	require.NoError(l, err)
	record := func(before, after string) error {
		_, err := l.client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: name("kept"), Before: []byte(before), After: []byte(after)})
		return err
	}
	require.NoError(l, record("", "short;"))
	_, err = l.client.CreateSnapshot(ctx, &rbdv1.CreateSnapshotRequest{Name: snapshot("kept", "one"), Protect: true})
	require.NoError(l, err)

	limit := func(ratio string) {
		for _, kind := range []string{"nearfull", "backfillfull", "full"} {
			l.ceph.Run("ceph", "osd", "set-"+kind+"-ratio", ratio)
		}
	}
	full := func() bool { return strings.Contains(l.ceph.Run("ceph", "osd", "pool", "ls", "detail"), ",full") }
	limit("0.000001")
	l.Cleanup(func() { limit("0.95") })
	require.Eventually(l, full, time.Minute, 200*time.Millisecond)

	_, err = l.client.CreateImage(ctx, &rbdv1.CreateImageRequest{Name: name("more"), Size: 8 * mib})
	requireCode(l.T, codes.ResourceExhausted, "create image more", err)
	require.NoError(l, record("short;", strings.Repeat("longer", 1000)), "a record is changed")
	_, err = l.client.RemoveSnapshot(ctx, &rbdv1.RemoveSnapshotRequest{Name: snapshot("kept", "one")})
	require.NoError(l, err)
	_, err = l.client.RemoveImage(ctx, &rbdv1.RemoveImageRequest{Name: name("kept")})
	require.NoError(l, err)
	require.NoError(l, record(strings.Repeat("longer", 1000), ""))
	require.Empty(l, l.images())

	limit("0.95")
	require.Eventually(l, func() bool { return !full() }, time.Minute, 200*time.Millisecond)
}
