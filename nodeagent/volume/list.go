package volume

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Status describes a volume of a pool.
type Status struct {
	ID         string
	Size       uint64 // bytes that the guest sees
	Allocated  uint64 // bytes that the volume's file occupies
	Image      *disk.Image
	Encrypted  bool
	Attachment Attachment // the last attachment that Open accepted
	Flushed    uint64     // the highest generation whose content is complete
	Flattened  bool       // made from an image, and made independent of the image since
	// Clone is true if the volume was made from a snapshot of an RBD volume and still shares content with the snapshot.
	// Flatten makes it false.
	Clone  bool
	Format qcow2.Format
	// Error says why the volume cannot be used, or is "".
	Error string
}

// Listing is the content of a pool.
type Listing struct {
	Volumes []Status // sorted by id
	// Unknown are the names of files that belong to no volume, sorted. The package never changes them.
	Unknown []string
}

// List returns the content of the pool. A volume that is being made or deleted is not included. If the record or file
// of a volume cannot be read, Error of its Status is set.
func (p *Pool) List() (Listing, error) {
	entries, err := os.ReadDir(p.path(""))
	if err != nil {
		return Listing{}, fmt.Errorf("list storage pool %s: %w", p.o.Name, err)
	}
	var out Listing
	known := map[string]bool{markerName: true, lockName: true, "lost+found": true}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok || !validID.MatchString(id) {
			continue
		}
		known[e.Name()] = true
		r, err := p.read(id)
		if errors.Is(err, ErrNotFound) {
			continue // The volume was deleted after the directory was read.
		}
		if err != nil {
			known[id+".raw"], known[id+".qcow2"] = true, true
			out.Volumes = append(out.Volumes, Status{ID: id, Error: err.Error()})
			continue
		}
		known[r.fileName(id)] = true
		known[rawName(id)] = true // The file may be the unfinished file of Flatten.
		if r.State == ready {
			out.Volumes = append(out.Volumes, p.status(id, r))
		}
	}
	for _, e := range entries {
		if _, ok := parseSnapshotFile(e.Name()); ok {
			continue
		}
		if id, ok := strings.CutSuffix(e.Name(), deletedSuffix); ok && validID.MatchString(id) {
			continue
		}
		if !known[e.Name()] && !strings.HasPrefix(e.Name(), ".") { // a dot means a write in progress
			out.Unknown = append(out.Unknown, e.Name())
		}
	}
	slices.SortFunc(out.Volumes, func(a, b Status) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
}

// Status returns the description of one volume. The error wraps [ErrNotFound] if the pool does not have it.
func (p *Pool) Status(id string) (Status, error) {
	if err := checkID(id); err != nil {
		return Status{}, err
	}
	r, err := p.read(id)
	if err == nil && r.State != ready {
		err = ErrNotFound
	}
	if err != nil {
		return Status{}, fmt.Errorf("read volume %s: %w", id, err)
	}
	return p.status(id, r), nil
}

func (p *Pool) status(id string, r record) Status {
	s := Status{ID: id, Size: r.Size, Image: r.Image, Encrypted: r.Encrypted, Attachment: r.Attachment, Flushed: r.Flushed,
		Flattened: r.Flattened, Format: r.Format}
	f, err := p.openFile(r.fileName(id), unix.O_RDONLY)
	if err != nil {
		s.Error = missing(err).Error()
		return s
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err == nil {
		s.Allocated = uint64(st.Blocks) * 512
	}
	return s
}
