package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// ErrNoSnapshot means that the pool has no record of a snapshot.
var ErrNoSnapshot = errors.New("the pool has no such snapshot")

// SnapshotState is the state of a snapshot's file.
type SnapshotState string

const (
	// Copying means that the copy is in progress, or was interrupted. The file may be missing.
	Copying  SnapshotState = "copying"
	Complete SnapshotState = "complete"
	Failed   SnapshotState = "failed" // The snapshot has no file.
)

// SnapshotRef names a snapshot of a volume. Volume and ID are UUIDs.
type SnapshotRef struct {
	Volume string `json:"volume"`
	ID     string `json:"id"`
}

// Snapshot is the content of a snapshot's .json file.
type Snapshot struct {
	Version int           `json:"version"`
	State   SnapshotState `json:"state"`
	Error   string        `json:"error,omitempty"` // why the state is Failed
	// Size is the size in bytes that a guest sees. Format is the format of the snapshot's file. Image is the backing
	// image of the file, or nil.
	Size   uint64       `json:"size"`
	Format qcow2.Format `json:"format"`
	Image  *disk.Image  `json:"image,omitempty"`
	// Encrypted means that the file has LUKS encryption. The key of the snapshot's volume is the passphrase.
	Encrypted bool `json:"encrypted,omitempty"`
	// TakenAt is the instant of the content, in Unix milliseconds. Consistency is the argument of
	// [SnapshotCopy.Finish]; this package does not interpret it. TakenAt is 0 and Consistency is "" until the state is
	// Complete.
	TakenAt     int64  `json:"taken_at,omitempty"`
	Consistency string `json:"consistency,omitempty"`
	// Stored is the number of bytes that the file occupied when it was complete.
	Stored uint64 `json:"stored,omitempty"`
}

func (r SnapshotRef) record() string { return r.Volume + "." + r.ID + ".snapshot.json" }

func (r SnapshotRef) file(f qcow2.Format) string {
	return r.Volume + "." + r.ID + ".snapshot." + string(f)
}

func (r SnapshotRef) check() error { return errors.Join(checkID(r.Volume), checkID(r.ID)) }

var snapshotFile = regexp.MustCompile(`^([0-9a-f-]{36})\.([0-9a-f-]{36})\.snapshot\.(json|raw|qcow2)$`)

// Snapshot returns the record of a snapshot. The error wraps [ErrNoSnapshot] if the pool has none. If the file of a
// complete snapshot is missing, the error wraps [ErrRefused].
func (p *Pool) Snapshot(ref SnapshotRef) (Snapshot, error) {
	s, err := p.readSnapshot(ref)
	if err == nil && s.State == Complete {
		var f *os.File
		if f, err = p.openFile(ref.file(s.Format), unix.O_RDONLY); err == nil {
			err = f.Close()
		} else if errors.Is(err, fs.ErrNotExist) {
			err = fmt.Errorf("%w: the snapshot's file is missing from the pool", ErrRefused)
		}
	}
	if err != nil {
		return s, fmt.Errorf("read snapshot %s: %w", ref.ID, err)
	}
	return s, nil
}

func (p *Pool) readSnapshot(ref SnapshotRef) (s Snapshot, err error) {
	if err := ref.check(); err != nil {
		return s, err
	}
	f, err := p.openFile(ref.record(), unix.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return s, ErrNoSnapshot
	}
	if err != nil {
		return s, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("read record: %w", err)
	}
	if s.Version != recordVersion {
		return s, fmt.Errorf("read record: version %d is unknown to this agent", s.Version)
	}
	return s, nil
}

// writeSnapshot replaces the record of a snapshot atomically and syncs it.
func (p *Pool) writeSnapshot(ref SnapshotRef, s Snapshot) error {
	s.Version = recordVersion
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	return p.replace(ref.record(), append(text, '\n'))
}

// FailSnapshot records that a snapshot has failed, with the reason, and removes an incomplete copy. It must not be
// called while a [SnapshotCopy] of the snapshot is open. A complete snapshot is not changed.
func (p *Pool) FailSnapshot(ctx context.Context, ref SnapshotRef, reason string) error {
	err := p.change(ctx, func() error {
		s, err := p.readSnapshot(ref)
		if err != nil && !errors.Is(err, ErrNoSnapshot) {
			return err
		}
		if s.State == Complete || s.State == Failed {
			return nil
		}
		return p.failSnapshot(ref, s, reason)
	})
	if err != nil {
		return fmt.Errorf("end snapshot %s: %w", ref.ID, err)
	}
	return nil
}

// failSnapshot removes the copy of a snapshot, and then writes the state Failed to the record. The copy is removed
// first, because a full pool may have no space for the new record.
func (p *Pool) failSnapshot(ref SnapshotRef, s Snapshot, reason string) error {
	if err := p.removeCopy(ref); err != nil {
		return err
	}
	s.State, s.Error, s.TakenAt, s.Consistency, s.Stored = Failed, reason, 0, "", 0
	return p.writeSnapshot(ref, s)
}

// removeCopy removes the files of a snapshot except for its record.
func (p *Pool) removeCopy(ref SnapshotRef) error {
	for _, format := range []qcow2.Format{qcow2.Raw, qcow2.QCOW2} {
		if err := os.Remove(p.path(ref.file(format))); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return p.dir.Sync()
}

// DeleteSnapshot removes a snapshot and its content. It must not be called while a [SnapshotCopy] of the snapshot is
// open. A missing snapshot is no error.
func (p *Pool) DeleteSnapshot(ctx context.Context, ref SnapshotRef) error {
	err := ref.check()
	if err == nil {
		err = p.change(ctx, func() error { return p.deleteSnapshot(ref) })
	}
	if err != nil {
		return fmt.Errorf("delete snapshot %s: %w", ref.ID, err)
	}
	return nil
}

// deleteSnapshot removes the files of a snapshot. It removes the record last: after an interruption, the record still
// exists, and the next call of DeleteSnapshot removes the rest.
func (p *Pool) deleteSnapshot(ref SnapshotRef) error {
	if _, err := os.Lstat(p.path(ref.record())); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err := p.removeCopy(ref); err != nil {
		return err
	}
	if err := os.Remove(p.path(ref.record())); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return p.dir.Sync()
}

// deleteSnapshots removes all snapshots of a volume that is being deleted.
func (p *Pool) deleteSnapshots(volume string) error {
	refs, err := p.snapshots()
	if err != nil {
		return err
	}
	for _, ref := range refs {
		if ref.Volume != volume {
			continue
		}
		if err := p.deleteSnapshot(ref); err != nil {
			return err
		}
	}
	return nil
}

// snapshots returns all snapshots that have a record in the pool.
func (p *Pool) snapshots() (out []SnapshotRef, err error) {
	entries, err := os.ReadDir(p.path(""))
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if ref, ok := parseSnapshotFile(e.Name()); ok && strings.HasSuffix(e.Name(), ".json") {
			out = append(out, ref)
		}
	}
	return out, nil
}

// parseSnapshotFile returns the snapshot to which a file belongs. It returns false if name is not the name of a
// snapshot's file.
func parseSnapshotFile(name string) (SnapshotRef, bool) {
	found := snapshotFile.FindStringSubmatch(name)
	if found == nil || slices.ContainsFunc(found[1:3], func(id string) bool { return !validID.MatchString(id) }) {
		return SnapshotRef{}, false
	}
	return SnapshotRef{found[1], found[2]}, true
}
