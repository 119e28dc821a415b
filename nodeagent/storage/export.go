package storage

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// exporter is implemented by pools that can read snapshots.
type exporter interface {
	ExportSnapshot(ctx context.Context, e volume.Export, w io.Writer) error
}

// ExportSnapshot writes the content of a snapshot of an assigned volume to w, in the format of package rbddiff (see
// [volume.Pool.ExportSnapshot]).
func (s *Storage) ExportSnapshot(ctx context.Context, id cloud.VolumeID, e volume.Export, w io.Writer) error {
	want := s.desired(id)
	if want == nil {
		return errors.New("the volume is not assigned to this host")
	}
	p, err := s.poolOf(want)
	if err != nil {
		return err
	}
	source, ok := p.(exporter)
	if !ok {
		return fmt.Errorf("snapshots of volumes in %s cannot be exported", poolText(want))
	}
	return source.ExportSnapshot(ctx, e, w)
}
