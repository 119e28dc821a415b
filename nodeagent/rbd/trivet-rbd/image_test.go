//go:build ceph

package main

import (
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// librbdError is an error as go-ceph returns it.
type librbdError unix.Errno

func (e librbdError) Error() string  { return fmt.Sprint("librbd: ", unix.Errno(e)) }
func (e librbdError) ErrorCode() int { return -int(e) }

// TestRemoveAll deletes several images of one name, as interrupted deletions leave them. It must end with the first
// error, and after maxSameName deletions.
func TestRemoveAll(t *testing.T) {
	for name, c := range map[string]struct {
		images int   // that can be deleted
		then   error // the error of the next deletion
		want   codes.Code
		calls  int
	}{
		"no image":                      {0, librbdError(unix.ENOENT), codes.OK, 1},
		"one image":                     {1, librbdError(unix.ENOENT), codes.OK, 2},
		"two images in the trash":       {3, librbdError(unix.ENOENT), codes.OK, 4},
		"one with clones":               {1, librbdError(unix.EBUSY), codes.FailedPrecondition, 2},
		"one that always exists again":  {1 << 30, nil, codes.Aborted, maxSameName},
		"a cluster that does not reply": {0, librbdError(unix.ETIMEDOUT), codes.Unavailable, 1},
	} {
		calls := 0
		err := removeAll("image", func() error {
			if calls++; calls > c.images {
				return c.then
			}
			return nil
		})
		require.Equal(t, c.want, status.Code(err), "%s: %v", name, err)
		require.Equal(t, c.calls, calls, name)
	}
}

// TestRepeatedCloneWaits calls CloneImage while an earlier call with the same image and snapshot runs. The second call
// must wait for the first one and return its result. A call with another image must not wait.
func TestRepeatedCloneWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clone := func(image string) *rbdv1.CloneImageRequest {
			return &rbdv1.CloneImageRequest{
				Name:   &rbdv1.ImageName{Pool: "rbd", Image: image},
				Parent: &rbdv1.SnapshotName{Image: &rbdv1.ImageName{Pool: "rbd", Image: "base"}, Snapshot: "s"},
			}
		}
		s, first := &server{}, errors.New("the result of the first call")
		begun, release := make(chan struct{}), make(chan struct{})
		go s.clones.Do(cloneKey(clone("a")), func() (any, error) {
			close(begun)
			<-release
			return nil, first
		})
		<-begun
		repeated := make(chan error, 1)
		go func() {
			_, err := s.CloneImage(t.Context(), clone("a"))
			repeated <- err
		}()
		synctest.Wait()
		require.Empty(t, repeated, "the repeated call did not wait")
		_, err := s.CloneImage(t.Context(), clone("b"))
		require.Error(t, err, "the server is not connected to a cluster")
		require.NotErrorIs(t, err, first)
		close(release)
		require.ErrorIs(t, <-repeated, first)
	})
}
