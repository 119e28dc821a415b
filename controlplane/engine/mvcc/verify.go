package mvcc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/sstable"
	sstblock "github.com/cockroachdb/pebble/v2/sstable/block"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// ErrCorrupt means that stored data does not match its checksum or cannot be decoded.
var ErrCorrupt = errors.New("stored data is corrupt")

// markCorrupt wraps an error with which Pebble reports corrupt data, so that it matches ErrCorrupt. It returns other
// errors unchanged.
func markCorrupt(err error) error {
	if err != nil && pebble.IsCorruptionError(err) && !errors.Is(err, ErrCorrupt) {
		return fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	return err
}

// Damage returns how often data with a wrong checksum was found since Open, by readers and by Pebble's background work.
func (e *Engine) Damage() int64 { return e.damage.Load() }

// verifyTables reads all Pebble tables (*.sst) in dir and verifies their checksums.
func verifyTables(fs vfs.FS, dir string, o *pebble.Options) error {
	o.EnsureDefaults()
	names, err := fs.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".sst") {
			continue
		}
		if err := verifyTable(fs, fs.PathJoin(dir, name), o); err != nil {
			return fmt.Errorf("verify %s: %w", name, markCorrupt(err))
		}
	}
	return nil
}

// verifyValues reads the values that are stored outside of tables (*.blob), if there are any, so that Pebble verifies
// them.
func verifyValues(fs vfs.FS, dir string, db *pebble.DB) (err error) {
	names, err := fs.List(dir)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(names, func(name string) bool { return strings.HasSuffix(name, ".blob") }) {
		return nil
	}
	it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{tableKeys}, UpperBound: []byte{tableKeys + 1}})
	if err != nil {
		return fmt.Errorf("verify values: %w", err)
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for ok := it.First(); ok; ok = it.Next() {
		if _, err := it.ValueAndErr(); err != nil {
			return fmt.Errorf("verify values: %w", markCorrupt(err))
		}
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("verify values: %w", markCorrupt(err))
	}
	return nil
}

// verifyTable verifies the checksums of one table.
func verifyTable(fs vfs.FS, path string, o *pebble.Options) (err error) {
	f, err := fs.Open(path, vfs.SequentialReadsOption)
	if err != nil {
		return err
	}
	readable, err := sstable.NewSimpleReadable(f)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	r, err := sstable.NewReader(context.Background(), readable, o.MakeReaderOptions())
	if err != nil {
		return errors.Join(err, readable.Close())
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	if err := r.ValidateBlockChecksums(); err != nil {
		return err
	}
	// ValidateBlockChecksums does not verify the blocks that hold the values of old versions. Verify them here.
	l, err := r.Layout()
	if err != nil {
		return err
	}
	for _, h := range append(l.ValueBlock, l.ValueIndex) {
		if h.Length == 0 {
			continue
		}
		b := make([]byte, h.Length+sstblock.TrailerLen)
		if _, err := f.ReadAt(b, int64(h.Offset)); err != nil {
			return err
		}
		if err := sstblock.ValidateChecksum(sstblock.ChecksumTypeCRC32c, b, h); err != nil {
			return err
		}
	}
	return nil
}
