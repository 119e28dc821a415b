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

// directory is the directory of an engine. It contains
//
//	LOCK       excludes a second process
//	CURRENT    the directory's format and the number of the current generation
//	<number>/  the Pebble directory of a generation; Restore creates the next one
//
// CURRENT is written to a temporary file, synced and renamed. That happens before the first generation is created, and
// each time a restored generation is complete. Other generations are leftovers of a crash, which clear removes.
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

// generation returns the path of a generation.
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
		return 0, fmt.Errorf("%w: %s is missing, but generation %d exists", ErrCorrupt, currentName, others[0])
	}
	return firstGeneration, d.setCurrent(firstGeneration)
}

// clear removes all generations except the one with this number, which must be complete.
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

// close releases the lock.
func (d *directory) close() error { return d.lock.Close() }

// current reads the file CURRENT. If the file does not exist, found is false.
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
		return 0, false, fmt.Errorf("directory of format %d, this program knows %d: %w",
			format, directoryFormat, command.ErrUnknownFormat)
	} else if err != nil || number == 0 {
		return 0, false, fmt.Errorf("%w: %s contains %q", ErrCorrupt, currentName, text)
	}
	return number, true, nil
}

// setCurrent durably writes number to CURRENT as the current generation.
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

// others returns the numbers of all generations except keep.
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

// sync makes the list of files in the directory at path durable.
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

// adopt durably moves the directory at the path from to the path of the generation number, which is not current yet.
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
