package volume

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Billing charges for volumes. Its methods are called within the transaction that changes a volume. They may read and
// write only through tx. If a method returns an error, the transaction is not committed and the API caller gets the
// error.
type Billing interface {
	// AdmitVolume is called when v is created, after all other checks. If it returns an error, v is not created.
	AdmitVolume(tx *store.Tx, v *cloud.Volume) error
	// VolumeChanged is called when an API call has resized, updated or flattened v. It returns an error only if billing
	// records cannot be read or written, never to refuse the change.
	VolumeChanged(tx *store.Tx, v *cloud.Volume) error
	// VolumeRemoved is called when v is deleted. It returns an error only if billing records cannot be read or written,
	// never to refuse the deletion.
	VolumeRemoved(tx *store.Tx, v *cloud.Volume) error
}

// noBilling implements Billing for volumes that are free of charge.
type noBilling struct{}

func (noBilling) AdmitVolume(*store.Tx, *cloud.Volume) error   { return nil }
func (noBilling) VolumeChanged(*store.Tx, *cloud.Volume) error { return nil }
func (noBilling) VolumeRemoved(*store.Tx, *cloud.Volume) error { return nil }
