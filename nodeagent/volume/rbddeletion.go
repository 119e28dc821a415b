package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// deletions is the content of a record that lists deleted volumes of a Ceph pool. The list prevents that another host
// makes a deleted volume again: a host that lost its connection before the volume was made may still have a desired
// state that contains the volume, and finds no record of it.
//
// A Ceph pool has 256 such records, because a record has at most maxRecord bytes. Each is for the volumes whose IDs end
// with the same two hexadecimal digits.
type deletions struct {
	Version int `json:"version"`
	// Volumes maps the IDs of the volumes to the times of their deletion, in seconds since 1970, by the clock of the
	// host that deleted the volume.
	Volumes map[string]int64 `json:"volumes"`
}

const (
	deletionsVersion = 1
	// maxDeletions is the maximum number of volumes in a list. A record with this number has about 60 KiB.
	maxDeletions = 1200
	// deletionsPrefix is the prefix of the names of the records. No registered RBD image has such a name.
	deletionsPrefix = "volume-deletions-"
)

// deletionsOf returns the name of the record that contains the deletion of the volume with this ID.
func (p *RBDPool) deletionsOf(id string) *rbdv1.ImageName {
	return p.name(deletionsPrefix + id[len(id)-2:])
}

// readDeletions returns a list of deleted volumes, and the stored text of its record. The text is nil if there is no
// such record.
func (p *RBDPool) readDeletions(ctx context.Context, name *rbdv1.ImageName) (d deletions, text []byte, err error) {
	out, err := p.o.Client.GetRecord(ctx, &rbdv1.GetRecordRequest{Name: name})
	if err != nil {
		return d, nil, rbdError(err)
	}
	if text = out.GetData(); len(text) > 0 {
		if err := json.Unmarshal(text, &d); err != nil {
			return d, nil, fmt.Errorf("read the deleted volumes: %w", err)
		}
		if d.Version != deletionsVersion {
			return d, nil, fmt.Errorf("read the deleted volumes: version %d is unknown to this agent", d.Version)
		}
	}
	if d.Volumes == nil {
		d.Volumes = map[string]int64{}
	}
	return d, text, nil
}

// writeDeletions replaces a list of deleted volumes. The parameter before is the stored text of the list.
// writeDeletions deletes the record if the new list is empty. The error wraps errChanged if another host has changed
// the list.
func (p *RBDPool) writeDeletions(ctx context.Context, name *rbdv1.ImageName, before []byte, d deletions) error {
	var after []byte
	if len(d.Volumes) > 0 {
		d.Version = deletionsVersion
		text, err := json.Marshal(d)
		if err != nil {
			return err
		}
		// No list begins with another list, because of the braces and the newline at the end (see RBDPool.write).
		after = append(text, '\n')
	}
	_, err := p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: name, Before: before, After: after})
	return rbdError(err)
}

// recordDeletion adds a volume to the list of deleted volumes. If the list is full, the oldest entry is removed.
func (p *RBDPool) recordDeletion(ctx context.Context, id string) error {
	name := p.deletionsOf(id)
	return p.change(ctx, func() error {
		d, text, err := p.readDeletions(ctx, name)
		if err != nil {
			return err
		}
		if _, known := d.Volumes[id]; known {
			return nil
		}
		if len(d.Volumes) >= maxDeletions {
			older := func(a, b string) int { return int(d.Volumes[a] - d.Volumes[b]) }
			delete(d.Volumes, slices.MinFunc(slices.Collect(maps.Keys(d.Volumes)), older))
		}
		d.Volumes[id] = time.Now().Unix()
		return p.writeDeletions(ctx, name, text, d)
	})
}

// checkDeleted returns an error that wraps ErrRefused if the volume was deleted. Before that, it removes the RBD image
// that a host with an old desired state may have made.
func (p *RBDPool) checkDeleted(ctx context.Context, id string) error {
	d, _, err := p.readDeletions(ctx, p.deletionsOf(id))
	if _, deleted := d.Volumes[id]; err != nil || !deleted || mutant.On(mutant.RemakeDeleted) {
		return err
	}
	if p.registered == "" && !mutant.On(mutant.KeepLateImage) {
		if err := p.removeLateImage(ctx, id); err != nil {
			return err
		}
	}
	return errDeleted
}

// removeLateImage removes the RBD image of a deleted volume, if there is one.
func (p *RBDPool) removeLateImage(ctx context.Context, id string) error {
	if err := p.removeImports(ctx, id); err != nil {
		return err
	}
	_, err := p.o.Client.RemoveImage(ctx, &rbdv1.RemoveImageRequest{Name: p.name(volumeImage(id))})
	return rbdError(err)
}

// claim makes the record of a volume that has none, and returns the stored text of the record. It then checks again
// whether the volume was deleted, because another host may have made and deleted the volume since the caller called
// checkDeleted. In this case claim removes the record, and the error wraps ErrRefused.
func (p *RBDPool) claim(ctx context.Context, id string, r record) ([]byte, error) {
	text, err := p.write(ctx, id, nil, r)
	if err != nil || mutant.On(mutant.CheckDeletionEarly) {
		return text, err
	}
	if err := p.checkDeleted(ctx, id); err != nil {
		_, removeErr := p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: p.name(p.imageOf(id)), Before: text})
		return nil, errors.Join(err, rbdError(removeErr))
	}
	return text, nil
}

// SweepDeletions removes the RBD images of deleted volumes that hosts with an old desired state have made. It also
// removes the records of deletions that are older than the duration keep, by the clock of this host. After that, a host
// with a desired state from before the deletion can make the volume again. Several hosts may call SweepDeletions at the
// same time.
func (p *RBDPool) SweepDeletions(ctx context.Context, keep time.Duration) error {
	all, err := p.o.Client.ListImages(ctx, &rbdv1.ListImagesRequest{Pool: p.o.Pool})
	if err != nil {
		return fmt.Errorf("remove old records of deleted volumes: %w", rbdError(err))
	}
	images := map[string]bool{}
	for _, name := range all.GetImages() {
		id, _, _ := strings.Cut(strings.TrimPrefix(name, volumeImage("")), ".")
		images[id] = true
	}
	var failed error
	for digits := range 256 {
		name := p.name(fmt.Sprintf("%s%02x", deletionsPrefix, digits))
		err := p.change(ctx, func() error { return p.sweepDeletions(ctx, name, images, keep) })
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("forget the deleted volumes in %s: %w", name.GetImage(), err))
		}
		if ctx.Err() != nil {
			break
		}
	}
	return failed
}

// sweepDeletions executes SweepDeletions for one list of deleted volumes. The parameter images contains the IDs of all
// volumes that have an RBD image.
func (p *RBDPool) sweepDeletions(ctx context.Context, name *rbdv1.ImageName, images map[string]bool, keep time.Duration) error {
	d, text, err := p.readDeletions(ctx, name)
	if err != nil {
		return err
	}
	before := len(d.Volumes)
	for _, id := range slices.Sorted(maps.Keys(d.Volumes)) {
		expired := time.Since(time.Unix(d.Volumes[id], 0)) >= keep
		if !expired && !images[id] {
			continue
		}
		gone, err := p.removeLate(ctx, id)
		if err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
		if expired && gone {
			delete(d.Volumes, id)
		}
	}
	if len(d.Volumes) == before {
		return nil
	}
	return p.writeDeletions(ctx, name, text, d)
}

// removeLate removes the record and the RBD image of a deleted volume that a host with an old desired state began to
// make. If the volume was complete, removeLate changes nothing and returns false, because the host that deletes the
// volume removes both.
func (p *RBDPool) removeLate(ctx context.Context, id string) (gone bool, err error) {
	r, text, err := p.read(ctx, id)
	switch {
	case errors.Is(err, ErrNotFound):
	case err != nil:
		return false, err
	case r.State != creating:
		return false, nil
	default:
		// The record is removed first, so that the other host cannot complete the volume.
		_, err := p.o.Client.SetRecord(ctx, &rbdv1.SetRecordRequest{Name: p.name(volumeImage(id)), Before: text})
		if err != nil {
			return false, rbdError(err)
		}
	}
	return true, p.removeLateImage(ctx, id)
}
