package qemu

import (
	"context"
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestUnconfirmedDisk attaches a disk that the caller does not confirm after QEMU has opened it. The guest does not
// get the disk, and QEMU closes the disk when it is detached.
func TestUnconfirmedDisk(t *testing.T) {
	l := newLab(t)
	p := l.boot()
	before, sets := l.nodes(p)
	d, files := l.blank("data", Virtio, diskBytes)
	refusal := errors.New("the attachment has ended")
	open := 0
	files.Confirm = func(context.Context) error {
		open = openCopies(t, p.Record().PID, files.Overlay)
		return refusal
	}
	require.ErrorIs(t, p.PlugDisk(l.ctx, d, files), refusal)
	require.Positive(t, open, "QEMU has the disk open when it is confirmed")
	disks, err := p.Disks(l.ctx)
	require.NoError(t, err)
	at := slices.IndexFunc(disks, func(d AttachedDisk) bool { return d.ID == "data" })
	require.False(t, disks[at].Present, "the guest does not get the disk")
	l.remove(p, "data", func(Disk) error { return nil })
	after, setsAfter := l.nodes(p)
	require.ElementsMatch(t, before, after)
	require.Equal(t, sets, setsAfter)
	require.Zero(t, openCopies(t, p.Record().PID, files.Overlay))
}
