package volume

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/rbddiff"
)

// savedExport is the progress of an export, which a later run of the command continues. It is stored as JSON in the
// file FILE.part.json.
type savedExport struct {
	Volume   string `json:"volume_id"`
	Snapshot string `json:"snapshot_id"`
	Since    string `json:"since_snapshot_id,omitempty"`
	Format   string `json:"format"`
	// Temporary means that the command created the snapshot, and deletes it at the end.
	Temporary bool `json:"temporary,omitempty"`
	// Offset is the end of the last range in the file, in bytes of the volume. Length is the end of this range in a
	// file of the format diff.
	Offset uint64 `json:"offset"`
	Length int64  `json:"length"`
}

func (e *export) statePath() string { return e.path + ".part.json" }

// resume continues a saved export of the same volume and the same snapshots. It returns an error if the incomplete file
// is of another export.
func (e *export) resume() error {
	text, err := os.ReadFile(e.statePath())
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Lstat(e.path + ".part"); err == nil {
			return fmt.Errorf("%s.part exists, but nothing is saved about it: remove it", e.path)
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the saved export: %w", err)
	}
	var saved savedExport
	if err := json.Unmarshal(text, &saved); err != nil {
		return fmt.Errorf("read the saved export %s: %w", e.statePath(), err)
	}
	want := e.state
	if want.Snapshot == "" && saved.Temporary {
		want.Snapshot = saved.Snapshot
	}
	if saved.Volume != want.Volume || saved.Snapshot != want.Snapshot || saved.Since != want.Since || saved.Format != want.Format {
		return fmt.Errorf("%s.part is an incomplete export of another volume or snapshot, or in another format: "+
			"continue that export, or remove %s.part and %s", e.path, e.path, e.statePath())
	}
	e.state = saved
	return nil
}

// open opens the incomplete file, or creates it, and locks it until it is closed. If the file is shorter than the saved
// progress requires, because the file was removed or truncated, the export begins again.
func (e *export) open() (err error) {
	if e.file, err = os.OpenFile(e.path+".part", os.O_RDWR|os.O_CREATE, 0o600); err != nil {
		return fmt.Errorf("make the file: %w", err)
	}
	defer func() {
		if err != nil {
			e.file.Close()
		}
	}()
	if err := unix.Flock(int(e.file.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return fmt.Errorf("another process is exporting to %s", e.path)
	} else if err != nil {
		return fmt.Errorf("lock %s.part: %w", e.path, err)
	}
	info, err := e.file.Stat()
	if err != nil {
		return fmt.Errorf("read the file: %w", err)
	}
	have := e.state.Length
	if e.state.Format == formatRaw {
		have = int64(e.state.Offset)
	}
	if info.Size() < have {
		e.state.Offset, e.state.Length = 0, 0
	}
	if e.state.Offset > 0 {
		e.s.Note("continuing the export of %s", e.name)
	}
	return nil
}

// publish syncs the complete file and gives it its final name. It does not replace another file of this name.
func (e *export) publish() error {
	if err := e.file.Sync(); err != nil {
		return fmt.Errorf("write the file: %w", err)
	}
	err := os.Link(e.path+".part", e.path)
	if err == nil {
		err = os.Remove(e.path + ".part")
	} else if !errors.Is(err, fs.ErrExist) {
		// Some file systems have no hard links, for example FAT.
		if _, existing := os.Lstat(e.path); errors.Is(existing, fs.ErrNotExist) {
			err = os.Rename(e.path+".part", e.path)
		}
	}
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s exists: the complete export is %s.part", e.path, e.path)
	}
	if err != nil {
		return fmt.Errorf("store the file: %w", err)
	}
	return nil
}

// save stores the progress.
func (e *export) save() error {
	text, err := json.Marshal(e.state)
	if err == nil {
		err = atomicfile.WriteFile(e.statePath(), text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("save the progress of the export: %w", err)
	}
	return nil
}

// checkpoint syncs the file and stores the progress.
func (e *export) checkpoint() error {
	if err := e.file.Sync(); err != nil {
		return fmt.Errorf("write the file: %w", err)
	}
	return e.save()
}

// forget removes the saved progress.
func (e *export) forget() { _ = os.Remove(e.statePath()) }

// exportWriter writes ranges to the file of an export.
type exportWriter interface {
	write(rbddiff.Range) error
	end() error
}

// begin returns the writer for a stream with a header. The stream begins at e.state.Offset.
func (e *export) begin(h rbddiff.Header) (exportWriter, error) {
	if e.state.Format == formatRaw {
		return &rawFile{e.file, h.Size}, nil
	}
	if err := e.file.Truncate(e.state.Length); err != nil {
		return nil, fmt.Errorf("write the file: %w", err)
	}
	if _, err := e.file.Seek(e.state.Length, io.SeekStart); err != nil {
		return nil, fmt.Errorf("write the file: %w", err)
	}
	var to io.Writer = e.file
	if e.state.Length > 0 {
		to = &skipHeader{to: e.file}
	}
	w, err := rbddiff.NewWriter(to, h)
	if err != nil {
		return nil, err
	}
	return &diffFile{e, w}, nil
}

// rawFile is the writer for the format raw.
type rawFile struct {
	file *os.File
	size uint64
}

func (f *rawFile) write(r rbddiff.Range) error {
	_, err := f.file.WriteAt(r.Data, int64(r.Offset))
	return err
}

func (f *rawFile) end() error { return f.file.Truncate(int64(f.size)) }

// diffFile is the writer for the format diff.
type diffFile struct {
	e *export
	w *rbddiff.Writer
}

func (f *diffFile) write(r rbddiff.Range) error {
	if err := f.w.Write(r); err != nil {
		return err
	}
	at, err := f.e.file.Seek(0, io.SeekCurrent)
	f.e.state.Length = at
	return err
}

func (f *diffFile) end() error { return f.w.Close() }

// skipHeader is a writer that ignores the first call of Write: the header of a stream that is already in the file.
type skipHeader struct {
	to      io.Writer
	skipped bool
}

func (w *skipHeader) Write(b []byte) (int, error) {
	if !w.skipped {
		w.skipped = true
		return len(b), nil
	}
	return w.to.Write(b)
}
