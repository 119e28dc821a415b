package cloudinit

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/diskfs/go-diskfs/backend"
	"github.com/diskfs/go-diskfs/filesystem/fat12"
)

const (
	// SeedSize is the size of a seed in bytes. It is constant, so that a changed seed needs no other disk.
	SeedSize = 1 << 20
	// SeedLabel is the label by which cloud-init finds a seed.
	SeedLabel = "cidata"

	sectorSize = 512 // bytes
)

// seedTime is the time of all files in a seed. It is the earliest time that FAT can express.
var seedTime = time.Date(1980, time.January, 1, 0, 0, 0, 0, time.UTC)

// emptyUserData takes the place of empty user data in a seed. cloud-init ignores a seed without the file user-data, and
// the file system's library would allocate a cluster for an empty file, which fsck.vfat reports as damage.
var emptyUserData = []byte("#cloud-config\n{}\n")

// Seed returns a disk image of SeedSize bytes with the files. Equal files give equal images. An empty vendor-data is
// left out, and an empty user-data is replaced with a cloud-config that does nothing. Seed returns an error if the
// files do not fit, which cannot happen with files from Render.
func Seed(files *Files) ([]byte, error) {
	disk := &memoryDisk{content: make([]byte, SeedSize)}
	const reproducible = true // the volume has the serial number 0
	volume, err := fat12.Create(disk, SeedSize, 0, sectorSize, SeedLabel, reproducible)
	if err != nil {
		return nil, fmt.Errorf("make file system of seed: %w", err)
	}
	written := []string{SeedLabel} // the label is a directory entry, which has a time like the entries of files
	for _, f := range files.list() {
		switch {
		case len(f.content) > 0:
		case f.name == UserDataFile:
			f.content = emptyUserData
		default:
			continue
		}
		if err := writeFile(volume, f.name, f.content); err != nil {
			return nil, fmt.Errorf("write %s to seed: %w", f.name, err)
		}
		written = append(written, f.name)
	}
	for _, name := range written {
		if err := volume.Chtimes("/"+name, seedTime, seedTime, seedTime); err != nil {
			return nil, fmt.Errorf("set time of %s in seed: %w", name, err)
		}
	}
	return disk.content, nil
}

func writeFile(volume *fat12.FileSystem, name string, content []byte) error {
	f, err := volume.OpenFile("/"+name, os.O_CREATE|os.O_RDWR)
	if err != nil {
		return err
	}
	if _, err := f.Write(content); err != nil {
		return err
	}
	return f.Close()
}

// memoryDisk is a disk of fixed size in memory, in the form that the file system's library requires. The library uses
// only ReadAt and WriteAt.
type memoryDisk struct{ content []byte }

func (d *memoryDisk) ReadAt(p []byte, offset int64) (int, error) {
	if offset < 0 || offset > int64(len(d.content)) {
		return 0, io.EOF
	}
	n := copy(p, d.content[offset:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (d *memoryDisk) WriteAt(p []byte, offset int64) (int, error) {
	if offset < 0 || offset > int64(len(d.content)) {
		return 0, io.ErrShortWrite
	}
	n := copy(d.content[offset:], p)
	if n < len(p) {
		return n, io.ErrShortWrite
	}
	return n, nil
}

func (d *memoryDisk) Writable() (backend.WritableFile, error) { return d, nil }
func (d *memoryDisk) Close() error                            { return nil }
func (d *memoryDisk) Path() string                            { return "" }

func (d *memoryDisk) Read([]byte) (int, error)       { return 0, errors.ErrUnsupported }
func (d *memoryDisk) Seek(int64, int) (int64, error) { return 0, errors.ErrUnsupported }
func (d *memoryDisk) Stat() (fs.FileInfo, error)     { return nil, errors.ErrUnsupported }
func (d *memoryDisk) Sys() (*os.File, error)         { return nil, errors.ErrUnsupported }
