package raftlog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/trivet-cloud/trivet/controlplane/engine/consensus/raftconf"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// ErrDamaged is returned when the disk does not contain what was written to the log.
var ErrDamaged = errors.New("the member's log is damaged")

// Engine is the durable store of a host, in one Pebble directory: the logs of all groups, and the data-directory IDs.
// Commit and Write make one batch durable with one fsync.
type Engine struct {
	db    *pebble.DB
	log   *pebbleLogger
	quiet bool // no background work; see OpenEngine
	fresh int  // estimate of the bytes in Pebble's memtable; used by Write only

	// OnSync, if not nil, is called by Write with the time that the batch and its fsync took.
	OnSync func(time.Duration)
}

const (
	memTableBytes = 64 << 20
	// flushBytes is the memtable size at which Write starts a flush, if the batch has truncated a log. At that moment
	// many entries in the memtable have just been truncated, and the flush does not write them to a table. Pebble's own
	// flush, when the memtable is full, would find fewer truncated entries and so write more.
	flushBytes = memTableBytes / 2
)

// OpenEngine opens the store in the directory dir, or creates it. If quiet is true, Pebble starts no compactions and
// collects no table statistics, so that a simulation is reproducible. The error is ErrDamaged if the store is corrupt.
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

// wrapDamage adds ErrDamaged to an error of Pebble if the error means that a file is corrupt. A torn record at the end
// of the write-ahead log is not an error for Pebble: it was never synced, so Pebble drops it.
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

// checkLayout checks the layout version of the store. In a new store it stores the current version. A store of layout 1
// is converted to the current layout; another version is an error.
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
		// Pebble writes the first log file of a new directory in its oldest format. In that format, damage in the
		// middle looks like the end of the file, so one flipped bit would silently drop all later records. The flush
		// makes Pebble begin a new file in the current format.
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

// fromLayout1 converts the stored LogStart of each log to layout 2, which adds the position of the state machine and
// the data-directory IDs.
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

// get returns a copy of the value of a key. It returns nil if the key does not exist.
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

// Commit makes the batch durable with one fsync. After an error the engine must not be used any more: a failed fsync
// cannot be repeated, and the content of the disk is unknown.
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

// Write makes the batch durable and closes it. The parameter truncated must be true if the batch truncates a log; Write
// may then start a flush of Pebble's memtable. Concurrent calls are not allowed.
func (e *Engine) Write(b *pebble.Batch, truncated bool) error {
	e.fresh += b.Len()
	began := time.Now()
	if err := e.Commit(b); err != nil {
		return err
	}
	if e.OnSync != nil {
		e.OnSync(time.Since(began))
	}
	if err := b.Close(); err != nil {
		return fmt.Errorf("write the log: %w", err)
	}
	if truncated {
		return e.tidy()
	}
	return nil
}

// tidy starts a flush of Pebble's memtable if the memtable has at least flushBytes bytes. It does not wait for the end
// of the flush.
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

// Err returns the first fatal error that Pebble has reported, also from its background work. It returns nil if there
// was none.
func (e *Engine) Err() error {
	if p := e.log.fatal.Load(); p != nil {
		return fmt.Errorf("write the log: %w", *p)
	}
	return nil
}

// Close closes the store. Batches that are still open must not be used any more.
func (e *Engine) Close() (err error) {
	defer func() {
		// Pebble's Close may panic after a failed write.
		if r := recover(); r != nil {
			err = fmt.Errorf("close the log: %v", r)
		}
	}()
	if err := e.db.Close(); err != nil {
		return fmt.Errorf("close the log: %w", err)
	}
	return nil
}
