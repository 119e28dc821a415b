package billing

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var _ volume.Billing = (*Service)(nil)

// AdmitVolume implements volume.Billing. Like Admit, it first charges the project's unpaid bills, and then reserves the
// price of the first hour. It also makes the bill for this hour, because volumes are charged from their creation on.
func (s *Service) AdmitVolume(tx *store.Tx, v *cloud.Volume) error {
	m := newVolumeMeter(v, tx.Now())
	if err := s.reserve(tx, m, s.terms.Prices.Hour(VolumeUse(v)), "volume"); err != nil {
		return err
	}
	was := *m
	return s.put(tx, &was, m, m.Change(tx.Now(), VolumeUse(v), s.terms)...)
}

func newVolumeMeter(v *cloud.Volume, now cloud.Time) *Meter {
	return &Meter{Org: v.Org, Project: v.Project, VM: cloud.VMID(v.ID), Volume: true, Name: v.Name, Until: now}
}

// VolumeChanged implements volume.Billing. It counts the volume's hours up to now with the size in the meter, and then
// stores the volume's present size in the meter.
func (s *Service) VolumeChanged(tx *store.Tx, v *cloud.Volume) error {
	m, err := meters.Get(tx, string(v.Project), string(v.ID))
	if err != nil || m == nil || m.Use == VolumeUse(v) {
		return err
	}
	was := *m
	return s.put(tx, &was, m, m.Change(tx.Now(), VolumeUse(v), s.terms)...)
}

// VolumeRemoved implements volume.Billing. It counts the volume's hours up to now and deletes the volume's meter. It
// does not delete unpaid bills.
func (s *Service) VolumeRemoved(tx *store.Tx, v *cloud.Volume) error {
	m, err := meters.Get(tx, string(v.Project), string(v.ID))
	if err != nil || m == nil {
		return err
	}
	was := *m
	if err := s.put(tx, &was, m, m.Pass(tx.Now(), s.terms)); err != nil {
		return err
	}
	deleteMeter(tx, m)
	return nil
}

// compareVolumes compares the next page of volumes with their meters, and repairs each mismatch. It does not find
// meters whose volume does not exist. Method compare finds them.
func (s *Service) compareVolumes(ctx context.Context) error {
	var odd []*cloud.Volume
	err := s.opts.Store.Local(func(v *store.View) error {
		volumes, more, err := page(v, volume.Volumes, comparePage, s.volumeFrom)
		if err != nil {
			return err
		}
		s.volumeFrom = nextPosition(volumes, more)
		for _, r := range volumes {
			m, err := meters.Get(v, r.Path...)
			if err != nil {
				return err
			}
			if m == nil || m.Use != VolumeUse(r.Value) {
				odd = append(odd, r.Value)
			}
		}
		return nil
	})
	for _, one := range odd {
		if err != nil {
			break
		}
		_, err = s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			return s.repairVolume(tx, one.Project, cloud.VMID(one.ID))
		})
	}
	if err != nil {
		return fmt.Errorf("compare volumes and meters: %w", err)
	}
	return nil
}

// repairVolume creates, updates or deletes the meter of the volume with this ID, so that the meter matches the volume's
// record. The time in which the volume had no meter is not billed.
func (s *Service) repairVolume(tx *store.Tx, p cloud.ProjectID, id cloud.VMID) error {
	m, err := meters.Get(tx, string(p), string(id))
	if err != nil {
		return err
	}
	v, err := volume.Volumes.Get(tx, string(p), string(id))
	switch {
	case err != nil || v == nil && m == nil:
		return err
	case v == nil:
		deleteMeter(tx, m)
		return nil
	case m == nil:
		m = newVolumeMeter(v, tx.Now())
		if err := s.put(tx, m, m); err != nil {
			return err
		}
	}
	return s.VolumeChanged(tx, v)
}
