package mvcc

import (
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/cockroachdb/errors/oserror"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// A directory holds
//
//	LOCK       against a second process
//	CURRENT    the format of the directory and the number of the generation that counts
//	<number>/  one Pebble directory a generation: Restore makes the next one
//
// CURRENT is written anew, synced and renamed into place before the first generation exists and when a restored one is
// complete. Whatever it does not name is left over from a crash and removed by clear.
type directory struct {
	fs   vfs.FS
	path string
	lock io.Closer
}

const (
	directoryFormat = 1
	firstGeneration = 1
	currentName     = "CURRENT"
	currentTemp     = "CURRENT.new"
	currentText     = "trivet mvcc format %d generation %d\n"
)

func (d *directory) generation(number uint64) string {
	return d.fs.PathJoin(d.path, strconv.FormatUint(number, 10))
}

// open locks the directory and returns the number of the current generation.
func (d *directory) open() (number uint64, err error) {
	if err := d.fs.MkdirAll(d.path, 0o700); err != nil {
		return 0, err
	}
	if err := d.sync(d.fs.PathDir(d.path)); err != nil {
		return 0, err
	}
	lock, err := d.fs.Lock(d.fs.PathJoin(d.path, "LOCK"))
	if err != nil {
		return 0, fmt.Errorf("lock, another process may have it: %w", err)
	}
	d.lock = lock
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	number, found, err := d.current()
	if err != nil || found {
		return number, err
	}
	if others, err := d.others(0); err != nil {
		return 0, err
	} else if len(others) > 0 {
		return 0, fmt.Errorf("%w: %s is missing beside generation %d", ErrCorrupt, currentName, others[0])
	}
	return firstGeneration, d.setCurrent(firstGeneration)
}

// clear removes all that does not belong to generation number, once that is known to be whole.
func (d *directory) clear(number uint64) error {
	others, err := d.others(number)
	if err != nil {
		return err
	}
	for _, n := range others {
		if err := d.fs.RemoveAll(d.generation(n)); err != nil {
			return fmt.Errorf("remove old generation: %w", err)
		}
	}
	if err := d.fs.Remove(d.fs.PathJoin(d.path, currentTemp)); err != nil && !oserror.IsNotExist(err) {
		return err
	}
	return nil
}

func (d *directory) close() error { return d.lock.Close() }

// current reads CURRENT.
func (d *directory) current() (number uint64, found bool, err error) {
	f, err := d.fs.Open(d.fs.PathJoin(d.path, currentName))
	if oserror.IsNotExist(err) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	text, err := io.ReadAll(io.LimitReader(f, 1<<10))
	if err = errors.Join(err, f.Close()); err != nil {
		return 0, false, fmt.Errorf("read %s: %w", currentName, err)
	}
	var format int
	if n, err := fmt.Sscanf(string(text), currentText, &format, &number); n >= 1 && format != directoryFormat {
		return 0, false, fmt.Errorf("directory of format %d, this program knows %d: %w", format, directoryFormat, command.ErrUnknownFormat)
	} else if err != nil || number == 0 {
		return 0, false, fmt.Errorf("%w: %s says %q", ErrCorrupt, currentName, text)
	}
	return number, true, nil
}

// setCurrent durably names the generation that counts.
func (d *directory) setCurrent(number uint64) error {
	temp := d.fs.PathJoin(d.path, currentTemp)
	f, err := d.fs.Create(temp, vfs.WriteCategoryUnspecified)
	if err != nil {
		return fmt.Errorf("write %s: %w", currentName, err)
	}
	_, err = fmt.Fprintf(f, currentText, directoryFormat, number)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", currentName, err)
	}
	if err := d.fs.Rename(temp, d.fs.PathJoin(d.path, currentName)); err != nil {
		return fmt.Errorf("write %s: %w", currentName, err)
	}
	return d.sync(d.path)
}

// others lists all generations but keep.
func (d *directory) others(keep uint64) ([]uint64, error) {
	names, err := d.fs.List(d.path)
	if err != nil {
		return nil, err
	}
	var found []uint64
	for _, name := range names {
		if n, err := strconv.ParseUint(name, 10, 64); err == nil && n != keep {
			found = append(found, n)
		}
	}
	return found, nil
}

func (d *directory) sync(path string) error {
	f, err := d.fs.OpenDir(path)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("sync directory %s: %w", path, err)
	}
	return nil
}

// adopt durably makes the files in from generation number, which does not count yet.
func (d *directory) adopt(from string, number uint64) error {
	names, err := d.fs.List(from)
	if err != nil {
		return err
	}
	for _, name := range names {
		f, err := d.fs.Open(d.fs.PathJoin(from, name))
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return fmt.Errorf("sync %s: %w", name, err)
		}
	}
	if err := d.sync(from); err != nil {
		return err
	}
	if err := d.fs.RemoveAll(d.generation(number)); err != nil {
		return err
	}
	if err := d.fs.Rename(from, d.generation(number)); err != nil {
		return err
	}
	if err := d.sync(d.path); err != nil {
		return err
	}
	return d.sync(d.fs.PathDir(from))
}
