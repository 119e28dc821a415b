package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ErrDamaged is returned when the stored log differs from what was written.
var ErrDamaged = errors.New("the member's log is damaged")

// Engine is the durable store of a host: the logs of all groups and the data-directory IDs, in one Pebble directory.
// Commit and Write make one batch durable with one fsync.
type Engine struct {
	db    *pebble.DB
	log   *pebbleLogger
	quiet bool // no background work; see OpenEngine
	fresh int  // estimate of the bytes in Pebble's memtable; used by Write only
}

const (
	memTableBytes = 64 << 20
	// flushBytes is the memtable size from which Write starts a flush after a truncation. Such a flush does not write
	// the truncated entries to a table. When Pebble flushes by itself, because the memtable is full, more of the
	// entries are still needed and are written.
	flushBytes = memTableBytes / 2
)

// OpenEngine opens the store at dir, or creates it. With quiet set, Pebble starts no compactions and collects no table
// statistics, so that a simulation replays exactly. The error is ErrDamaged if the store is corrupt.
func OpenEngine(fs vfs.FS, dir string, quiet bool, log *slog.Logger) (*Engine, error) {
	e := &Engine{log: &pebbleLogger{log: log}, quiet: quiet}
	opts := &pebble.Options{
		FS:                          fs,
		FormatMajorVersion:          pebble.FormatTableFormatV6,
		CacheSize:                   8 << 20,
		MemTableSize:                memTableBytes,
		MemTableStopWritesThreshold: 2,
		DisableAutomaticCompactions: quiet,
		DisableTableStats:           quiet,
		Logger:                      e.log,
	}
	if quiet {
		opts.MemTableSize = 4 << 20
	}
	db, err := pebble.Open(dir, opts)
	if err != nil {
		return nil, fmt.Errorf("open the log in %s: %w", dir, wrapDamage(err))
	}
	e.db = db
	if err := e.checkLayout(); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	return e, nil
}

// wrapDamage adds ErrDamaged to errors that Pebble returns for corrupt files. Pebble returns no error for a torn record
// at the end of its write-ahead log: a record that was not synced before a crash.
func wrapDamage(err error) error {
	for _, is := range []error{record.ErrInvalidChunk, record.ErrZeroedChunk, record.ErrUnexpectedEOF} {
		if errors.Is(err, is) {
			return fmt.Errorf("%w: %w", ErrDamaged, err)
		}
	}
	if pebble.IsCorruptionError(err) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}

// checkLayout stores the layout version in a new store. In an existing store it checks the version, and converts layout
// 1.
func (e *Engine) checkLayout() error {
	v, err := e.get([]byte(keyFormat))
	if err != nil {
		return err
	}
	if v == nil {
		b := e.db.NewBatch()
		defer b.Close()
		if err := b.Set([]byte(keyFormat), binary.AppendUvarint(nil, layoutVersion), nil); err != nil {
			return err
		}
		if err := e.Commit(b); err != nil {
			return err
		}
		// Pebble creates the first log file of a directory in its oldest format, which cannot distinguish damage in the
		// middle from the end of the file: a flipped bit would silently drop all later records. A flush begins a file
		// in the new format.
		if err := e.db.Flush(); err != nil {
			return fmt.Errorf("begin the log: %w", err)
		}
		return nil
	}
	n, size := binary.Uvarint(v)
	if size > 0 && n == 1 {
		return e.fromLayout1()
	}
	if size <= 0 || n != layoutVersion {
		return fmt.Errorf("the log has layout %d, this program knows %d only: start the version that wrote it", n, layoutVersion)
	}
	return nil
}

// fromLayout1 converts the stored begin of each log to layout 2, which adds a membership and the position of the state
// machine.
func (e *Engine) fromLayout1() error {
	b := e.db.NewBatch()
	defer b.Close()
	it, err := e.db.NewIter(&pebble.IterOptions{LowerBound: []byte{keyGroup}, UpperBound: []byte{keyGroup + 1}})
	if err != nil {
		return fmt.Errorf("read the log engine: %w", err)
	}
	defer it.Close()
	for ok := it.First(); ok; ok = it.Next() {
		key := it.Key()
		if len(key) != 10 || key[9] != kindTrunc && key[9] != kindMarker {
			continue
		}
		p, err := raftconf.ParseLogStart1(it.Value())
		if err == nil {
			err = putBegin(b, slices.Clone(key), p)
		}
		if err != nil {
			return fmt.Errorf("rewrite the log's layout: %w", err)
		}
	}
	if err := it.Error(); err != nil {
		return fmt.Errorf("read the log engine: %w", err)
	}
	if err := b.Set([]byte(keyFormat), binary.AppendUvarint(nil, layoutVersion), nil); err != nil {
		return err
	}
	return e.Commit(b)
}

// get returns a copy of the value of a key, nil if the key does not exist.
func (e *Engine) get(key []byte) ([]byte, error) {
	v, closer, err := e.db.Get(key)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the log engine: %w", err)
	}
	v = slices.Clone(v)
	if v == nil {
		v = []byte{}
	}
	return v, closer.Close()
}

// Commit makes the batch durable with one fsync. After an error the engine must not be used any more, because a failed
// fsync cannot be repeated and the content of the disk is unknown.
func (e *Engine) Commit(b *pebble.Batch) (err error) {
	defer func() {
		// Pebble panics when it cannot write a record to its write-ahead log.
		if r := recover(); r != nil {
			err = fmt.Errorf("write the log: %v", r)
		}
	}()
	opts := pebble.Sync
	if mutant.On(mutant.SkipLogSync) {
		opts = pebble.NoSync
	}
	if err := b.Commit(opts); err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	return e.Err()
}

// NewBatch returns an empty batch for Commit or Write.
func (e *Engine) NewBatch() *pebble.Batch { return e.db.NewBatch() }

// Write makes the batch durable and closes it. truncated must be set if the batch truncates a log: Write then may start
// a flush of Pebble's memtable. Only one goroutine at a time may call Write.
func (e *Engine) Write(b *pebble.Batch, truncated bool) error {
	e.fresh += b.Len()
	if err := e.Commit(b); err != nil {
		return err
	}
	if err := b.Close(); err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	if truncated {
		return e.tidy()
	}
	return nil
}

// tidy starts a flush of Pebble's memtable if it has at least flushBytes. It does not wait for the flush.
func (e *Engine) tidy() (err error) {
	if e.quiet || e.fresh < flushBytes {
		return nil
	}
	e.fresh = 0
	defer func() {
		if r := recover(); r != nil { // see Commit
			err = fmt.Errorf("write out the log: %v", r)
		}
	}()
	if _, err := e.db.AsyncFlush(); err != nil {
		return fmt.Errorf("write out the log: %w", err)
	}
	return nil
}

// Err returns the first error that Pebble reported as fatal, including errors of its background work; nil if there is
// none.
func (e *Engine) Err() error {
	if p := e.log.fatal.Load(); p != nil {
		return fmt.Errorf("write the log: %w", *p)
	}
	return nil
}

// Close closes the store. Batches must not be used any more.
func (e *Engine) Close() (err error) {
	defer func() {
		// After a failed write Pebble's Close may panic.
		if r := recover(); r != nil {
			err = fmt.Errorf("close the log: %v", r)
		}
	}()
	if err := e.db.Close(); err != nil {
		return fmt.Errorf("close the log: %w", err)
	}
	return nil
}
