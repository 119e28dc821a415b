package qemu

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// ResizeDisk grows a disk of the VM to size bytes. The guest sees the new size at once. The disk never shrinks.
func (p *Process) ResizeDisk(ctx context.Context, id string, size uint64) error {
	if err := p.resizeDisk(ctx, id, size); err != nil {
		return fmt.Errorf("resize disk %s: %w", id, err)
	}
	return nil
}

func (p *Process) resizeDisk(ctx context.Context, id string, size uint64) error {
	disks, err := p.Disks(ctx)
	if err != nil {
		return err
	}
	at := slices.IndexFunc(disks, func(d AttachedDisk) bool { return d.ID == id })
	switch {
	case at < 0:
		return errors.New("the VM has no such disk")
	case disks[at].Size == size:
		return nil
	case disks[at].Size > size:
		return fmt.Errorf("the disk has %d bytes, and disks cannot be made smaller", disks[at].Size)
	}
	if disks[at].RBD == nil {
		if err := p.raiseFileLimit(size); err != nil {
			return err
		}
	}
	if disks[at].Flattening.Running { // QEMU cannot resize a disk during block-stream. A later FlattenDisk continues.
		if err := p.CancelFlatten(ctx, id); err != nil {
			return err
		}
	}
	err = p.call(ctx, p.work, func(ctx context.Context, conn *qmp.Conn) error {
		return conn.Do(ctx, "block_resize", object{"node-name": disks[at].node(), "size": size}, nil)
	})
	if err != nil {
		return err
	}
	sized := slices.Clone(p.Record().Spec.Disks)
	sized[at].Size = size
	return p.writeDisks(sized)
}
