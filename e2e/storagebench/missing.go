package main

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// errNotMeasured means that the cloud has a service that this benchmark does not measure.
var errNotMeasured = errors.New("not available: this benchmark has no measurement for it yet")

// measureSnapshot will measure a snapshot of a volume in use. It returns an error, so that a run with this part never
// passes for complete.
func measureSnapshot(ctx context.Context, s *site) error {
	const method = "/storage.v1.SnapshotService/ListSnapshots"
	err := s.cloud.Admin.Conn().Invoke(ctx, method, &emptypb.Empty{}, &emptypb.Empty{})
	if status.Code(err) == codes.Unimplemented {
		return fmt.Errorf("not available: the control plane does not serve snapshots: %w", err)
	}
	return errNotMeasured
}

// measureRBD will measure volumes of the driver RBD. It returns an error, so that a run with this part never passes for
// complete.
func measureRBD(context.Context, *site) error { return errNotMeasured }
