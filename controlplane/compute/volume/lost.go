package volume

import (
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Immovable returns "" if a VM with these volumes can move to another host after its host is lost. Otherwise it returns
// the reason, as the predicate of a sentence whose subject is the VM.
func Immovable(r store.Reader, t cloud.Tenant, ids []cloud.VolumeID) (string, error) {
	for _, id := range ids {
		v, err := Lookup(r, t, id)
		if err != nil {
			return "", err
		}
		if !v.Movable() {
			return fmt.Sprintf("has the volume %s, which only its host can use", v.Name), nil
		}
	}
	return "", nil
}

// EndLostAttachments records that the host of a VM is fenced, for each of the VM's volumes. All of them must be Movable.
// Place moves the volumes to other hosts, which end the attachments (see cloud.Volume.EndLostAttachment).
func EndLostAttachments(tx *store.Tx, t cloud.Tenant, vm cloud.VMID, ids []cloud.VolumeID) error {
	for _, id := range ids {
		v, err := Lookup(tx, t, id)
		if err != nil {
			return err
		}
		if v.VM != vm {
			continue
		}
		generation := v.Generation
		v.EndLostAttachment()
		save(tx, v, generation)
	}
	return nil
}

// Waiting returns the reason why a VM cannot be placed on a new host yet, or "": the attachment of one of its volumes on
// the lost host is not ended. The reason is the predicate of a sentence whose subject is the VM.
func Waiting(r store.Reader, t cloud.Tenant, ids []cloud.VolumeID) (string, error) {
	for _, id := range ids {
		v, err := Lookup(r, t, id)
		if err != nil {
			return "", err
		}
		if v.Flushed() {
			continue
		}
		why := fmt.Sprintf("waits until another host has ended the attachment of volume %s on the VM's former host", v.Name)
		if v.LastError != "" {
			why += ": " + v.LastError
		}
		return why, nil
	}
	return "", nil
}
