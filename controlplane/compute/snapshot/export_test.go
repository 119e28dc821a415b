package snapshot

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestExport checks which snapshots Export reads from the host, and which it refuses.
func TestExport(t *testing.T) {
	w := newWorld(t)
	data, logs := w.volume("data", 2), w.volume("logs", 2)
	take := func(of cloud.VolumeID, name string, at cloud.Time) cloud.Snapshot {
		s, err := w.create(of, name)
		require.NoError(t, err)
		report := complete
		report.TakenAt = at
		w.report(s, report)
		return s
	}
	older, newer, foreign := take(data, "older", 1000), take(data, "newer", 2000), take(logs, "foreign", 500)
	pending, err := w.create(data, "pending")
	require.NoError(t, err)
	var got string
	export := func(of cloud.Tenant, id, since cloud.SnapshotID, offset uint64) error {
		got = ""
		return w.snapshots.Export(t.Context(), of, id, since, offset, func(b []byte) error { got += string(b); return nil })
	}
	require.NoError(t, export(acme, newer.ID, "", 0))
	require.Equal(t, "content", got)
	require.NoError(t, export(acme, newer.ID, older.ID, 2<<30))
	require.Len(t, w.reads, 2)
	last := w.reads[1]
	require.Equal(t, []any{acme, data, w.host, newer.ID, older.ID, uint64(2 << 30)},
		[]any{last.Tenant, last.Volume.ID, last.Volume.Node, last.Snapshot, last.Since, last.Offset})
	for name, c := range map[string]struct {
		err  error
		kind fault.Kind
	}{
		"another project":   {export(other, newer.ID, "", 0), fault.NotFound},
		"no snapshot":       {export(acme, cloud.SnapshotID(vm), "", 0), fault.NotFound},
		"no UUID":           {export(acme, "x", "", 0), fault.InvalidArgument},
		"pending":           {export(acme, pending.ID, "", 0), fault.FailedPrecondition},
		"since pending":     {export(acme, newer.ID, pending.ID, 0), fault.FailedPrecondition},
		"since newer":       {export(acme, older.ID, newer.ID, 0), fault.InvalidArgument},
		"since itself":      {export(acme, newer.ID, newer.ID, 0), fault.InvalidArgument},
		"since no snapshot": {export(acme, newer.ID, cloud.SnapshotID(vm), 0), fault.NotFound},
		"other volume":      {export(acme, newer.ID, foreign.ID, 0), fault.InvalidArgument},
		"beyond the end":    {export(acme, newer.ID, "", 2<<30+1), fault.OutOfRange},
	} {
		require.True(t, fault.Is(c.err, c.kind), "%s: %v", name, c.err)
	}
	w.Update(func(tx *store.Tx) error {
		v, err := volume.Lookup(tx, acme, data)
		v.Encrypted = true
		volume.Volumes.Put(tx, v, string(v.Project), string(v.ID))
		return err
	})
	err = export(acme, newer.ID, "", 0)
	require.True(t, fault.Is(err, fault.FailedPrecondition), "an encrypted snapshot was exported: %v", err)
	require.ErrorContains(t, err, "make a volume from the snapshot")
	require.Error(t, w.snapshots.Check(t.Context(), acme, newer.ID), "an image was made from an encrypted snapshot")
	require.Len(t, w.reads, 2, "a refused call reads nothing")
}
