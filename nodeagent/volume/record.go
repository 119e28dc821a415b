package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mutant"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Volume describes a volume to make.
type Volume struct {
	ID    string      // a UUID
	Size  uint64      // bytes that the guest sees, a multiple of 512
	Image *disk.Image // nil for a blank volume
	// Format is the format of a blank volume; "" means raw. A volume that is encrypted or made from an image is always
	// QCOW2.
	Format qcow2.Format
	// Encrypted means that the volume's file has LUKS encryption. Key is the passphrase. Key is needed only to make the
	// volume, and is not stored.
	Encrypted bool
	Key       []byte
	// Source is the snapshot whose content the new volume gets, or nil. The snapshot must have the volume's image and
	// format, and must not be larger than the volume.
	Source *SnapshotRef
}

// Attachment is the right of one VM to use a volume. The control plane gives each attachment a higher generation than
// all earlier attachments of the volume.
type Attachment struct {
	VM         string `json:"vm"`
	Generation uint64 `json:"generation"` // above 0
}

// state is the state of a volume's files.
type state string

const (
	creating state = "creating" // the file may be missing
	ready    state = "ready"
	deleting state = "deleting" // the file may be missing, and must not be used
)

// record is the content of a volume's .json file.
type record struct {
	Version    int          `json:"version"`
	State      state        `json:"state"`
	Size       uint64       `json:"size"`
	Image      *disk.Image  `json:"image,omitempty"`
	Format     qcow2.Format `json:"format"`
	Encrypted  bool         `json:"encrypted,omitempty"`
	Attachment Attachment   `json:"attachment"` // the last one that Open accepted
	// Host is the name of the host of a shared pool that opened the volume last.
	Host string `json:"host,omitempty"`
	// Flushed is the highest generation whose content is complete: no process has the volume open at this generation.
	Flushed uint64 `json:"flushed"`
	// Detached is the highest generation that Detach ended. The volume cannot be opened at this generation or a lower
	// one.
	Detached uint64 `json:"detached"`
	// Clients are the addresses of the processes that had the RBD image open at the last attachment, as
	// RbdService.GetImage returns them: the newest maxClients. Records of older agents do not have them.
	Clients []string `json:"clients,omitempty"`
	// Standby is the attachment of the target of a migration to which the source has not handed an RBD volume over, or
	// nil. Former are the addresses of the process of the source, after the target has activated the volume.
	Standby *standby `json:"standby,omitempty"`
	Former  []string `json:"former,omitempty"`
	// Activated is the generation of the last attachment that Activate began, since the last Open with a new generation,
	// or 0.
	Activated uint64 `json:"activated,omitempty"`
	// Flattened means that the volume was made from an image, and that it is independent of the image. Image is then
	// nil.
	Flattened bool `json:"flattened,omitempty"`
	// Snapshots are the snapshots of an RBD volume. A snapshot of a volume in a directory has a record of its own.
	Snapshots []rbdSnapshot `json:"snapshots,omitempty"`
	// Header is the length in bytes of the LUKS header at the beginning of the RBD image of an encrypted volume. The
	// image has Header bytes more than the guest sees. Header is 0 for other volumes.
	Header uint64 `json:"header,omitempty"`
	// Source is the snapshot of which an RBD volume is a clone. Flatten sets it to nil.
	Source *SnapshotRef `json:"source,omitempty"`
	// Volume is the ID of a registered volume (see RBDPool.Registered). It is empty for other volumes.
	Volume string `json:"volume,omitempty"`
}

const (
	recordVersion = 1
	// recordVersion2 is the version of the record of an RBD volume that has Snapshots, Source or Header. An agent that
	// does not know these fields would remove them.
	recordVersion2 = 2
	// recordVersion3 is the version of the record of an RBD volume that has Standby, Former or Activated.
	recordVersion3 = 3
)

// checkVersion returns an error if this agent does not know the version of the record.
func (r *record) checkVersion() error {
	if r.Version != recordVersion && r.Version != recordVersion2 && r.Version != recordVersion3 {
		return fmt.Errorf("read record: version %d is unknown to this agent", r.Version)
	}
	return nil
}

// maxRecord is the largest accepted length of a record, in bytes.
const maxRecord = 64 << 10

func (r record) fileName(id string) string { return id + "." + string(r.Format) }

// format returns the format of the file of a new volume.
func (v Volume) format() qcow2.Format {
	if v.Image != nil || v.Format == qcow2.QCOW2 || v.Encrypted {
		return qcow2.QCOW2
	}
	return qcow2.Raw
}

// matches returns nil if r describes the volume v, apart from its size, which may have grown since.
func (r record) matches(v Volume) error {
	switch {
	case r.State == deleting:
		return fmt.Errorf("%w: the volume is being deleted", ErrRefused)
	case r.Size < v.Size && r.State == creating, r.Size == v.Size:
	case r.Size < v.Size:
		return fmt.Errorf("%w: the volume exists with %d bytes, not %d", ErrRefused, r.Size, v.Size)
	}
	if r.Encrypted != v.Encrypted {
		return fmt.Errorf("%w: the volume exists, and only one of the existing and the required volume is encrypted", ErrRefused)
	}
	if r.Flattened {
		return nil // The volume's image and format have changed since the volume was made.
	}
	if r.Format != v.format() || (r.Image == nil) != (v.Image == nil) || r.Image != nil && *r.Image != *v.Image {
		return fmt.Errorf("%w: the volume exists with another image or format", ErrRefused)
	}
	return nil
}

// admit returns nil if the volume may be opened for the attachment a. The error wraps ErrStale if the volume was opened
// for a later attachment, or if a was detached or belongs to another VM.
func (r record) admit(a Attachment) error {
	last := r.Attachment
	switch {
	case a.Generation == 0 || a.VM == "":
		return fmt.Errorf("%w: the attachment has no generation or no VM", ErrRefused)
	case mutant.On(mutant.OpenStaleVolume):
	case a.Generation < last.Generation:
		return fmt.Errorf("%w: generation %d is older than %d, which VM %s has", ErrStale, a.Generation, last.Generation, last.VM)
	case a.Generation <= r.Detached:
		return fmt.Errorf("%w: generation %d was detached", ErrStale, a.Generation)
	case a.Generation == last.Generation && a.VM != last.VM:
		return fmt.Errorf("%w: generation %d belongs to VM %s", ErrStale, a.Generation, last.VM)
	}
	return nil
}

// read reads the record of a volume. The error wraps ErrNotFound if there is none.
func (p *Pool) read(id string) (record, error) {
	f, err := p.openFile(id+".json", unix.O_RDONLY)
	if errors.Is(err, fs.ErrNotExist) {
		return record{}, ErrNotFound
	}
	if err != nil {
		return record{}, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return record{}, err
	}
	if len(text) == 0 { // see claimRecord
		return record{}, ErrNotFound
	}
	var r record
	if err := json.Unmarshal(text, &r); err != nil {
		return record{}, fmt.Errorf("read record: %w", err)
	}
	if err := r.checkVersion(); err != nil {
		return record{}, err
	}
	return r, nil
}

// write replaces the record of a volume atomically and syncs it.
func (p *Pool) write(id string, r record) error {
	r.Version = recordVersion
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return p.replace(id+".json", append(text, '\n'))
}

// replace replaces a record atomically and syncs it. The caller must have locked the pool.
func (p *Pool) replace(name string, text []byte) error {
	var lost error
	err := atomicfile.Write(p.path(name), 0o600, func(f *os.File) error {
		if _, err := f.Write(text); err != nil {
			return err
		}
		// confirmLock is called after the temporary file exists. If another host gets the lock after the confirmation,
		// it then removes the file before it reads the record (see removeLate).
		lost = p.confirmLock()
		return lost
	})
	if lost != nil {
		return lost
	}
	if err != nil {
		return fmt.Errorf("write record: %w", plainSpace(err))
	}
	return nil
}

// plainSpace replaces the error of a full file system by an error whose text tenants understand.
func plainSpace(err error) error {
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("the storage pool is full: %w", unix.ENOSPC)
	}
	return err
}
