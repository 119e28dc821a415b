package volume

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ApplyClassesEvery is the interval at which ApplyClasses runs.
const ApplyClassesEvery = time.Second

// ApplyClasses applies changes of storage classes to the volumes of the classes: it writes the new limits into the
// records of the volumes, and sends the new Ceph monitors, users and keys to the hosts that have RBD images, also of
// deleted volumes. ApplyClasses changes at most maxPlaced volumes in a transaction. If a call is interrupted, the next
// call begins again with the first volume of the class. Package leader runs ApplyClasses on the leader.
func (s *Service) ApplyClasses(ctx context.Context) error {
	var changes []storageclass.Change
	deleted := map[string][][]string{} // the paths of the Bound records of deleted volumes, by class
	err := s.store.Local(func(r *store.View) (err error) {
		if changes, err = storageclass.Unapplied(r); err != nil || len(changes) == 0 {
			return err
		}
		bound, _, err := node.BoundVolumes.List(r, 0)
		for _, b := range bound {
			if b.Value.Gone && b.Value.Class != "" {
				deleted[b.Value.Class] = append(deleted[b.Value.Class], b.Path)
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	var errs []error
	for _, c := range changes {
		errs = append(errs, s.applyClass(ctx, c, deleted[c.Class.Name]))
	}
	return errors.Join(errs...)
}

// applyClass applies a change of a class. deleted has the paths of the Bound records of the deleted volumes of the
// class.
func (s *Service) applyClass(ctx context.Context, c storageclass.Change, deleted [][]string) error {
	name := c.Class.Name
	for paths := range slices.Chunk(c.Volumes, maxPlaced) {
		if _, err := s.store.Update(ctx, func(tx *store.Tx) error { return applyToVolumes(tx, name, paths) }); err != nil {
			return err
		}
	}
	for paths := range slices.Chunk(deleted, maxPlaced) {
		_, err := s.store.Update(ctx, func(tx *store.Tx) error {
			for _, path := range paths {
				if err := resend(tx, path); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	_, err := s.store.Update(ctx, func(tx *store.Tx) error { return storageclass.SetApplied(tx, name, c.Class.Changes) })
	return err
}

// applyToVolumes applies the present record of a class to the volumes with the given paths.
func applyToVolumes(tx *store.Tx, class string, paths [][]string) error {
	c, err := storageclass.Classes.Get(tx, class)
	if err != nil || c == nil {
		return err
	}
	for _, path := range paths {
		v, err := Volumes.Get(tx, path...)
		if err != nil {
			return err
		}
		if v == nil || v.Class != class {
			continue
		}
		generation := v.Generation
		if v.SetClassLimits(c.Limits) {
			save(tx, v, generation)
		}
		if v.Generation == generation && c.Driver == cloud.DriverRBD && v.Node != "" {
			if err := resend(tx, []string{string(v.Node), string(v.ID)}); err != nil {
				return err
			}
		}
	}
	return nil
}

// resend writes the Bound record with the given path again, without a change. The leader watches these records, and
// therefore sends the desired state of the volume to its host again. The generation is the same, and the Ceph pool is
// the present one of the class.
func resend(tx *store.Tx, path []string) error {
	b, err := node.BoundVolumes.Get(tx, path...)
	if err != nil || b == nil || mutant.On(mutant.KeepClassKey) {
		return err
	}
	node.BoundVolumes.Put(tx, b, path...)
	return nil
}
