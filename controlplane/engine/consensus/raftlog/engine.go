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

// ErrDamaged is returned when the log does not hold what was written to it.
var ErrDamaged = errors.New("the member's log is damaged")

// Engine is the one durable store of a host: every group's log and the births, in one Pebble directory. Each commit is
// one batch and one fsync.
type Engine struct {
	db    *pebble.DB
	log   *pebbleLogger
	quiet bool // nothing is written but what is asked for
	fresh int  // about how many bytes the memtable has; of the log's thread
}

const (
	memTableBytes = 64 << 20
	// flushBytes is how much has to be in the memtable for a flush to be worth it when the log was cut. What was cut then is
	// not written again; when Pebble flushes, because the memtable is full, it finds more that is still needed.
	flushBytes = memTableBytes / 2
)

// OpenEngine opens or makes the store at dir. With quiet set the engine does no background work of its own choice
// (compactions, table statistics), which a simulation needs to replay.
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

// wrapDamage marks what Pebble finds corrupt when it opens. Records that were not synced and end in the middle are none of
// that: it takes them for the end.
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
		// Pebble makes the first log file of a directory before it has raised the format, hence without what tells damage in
		// the middle from the end (a flipped bit would quietly cut off all that follows). The next one has it.
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

// fromLayout1 rewrites what layout 2 says more about: where logs begin.
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

// get returns a copy of the value, nil if there is none.
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

// Commit makes the batch durable. After an error nothing may be acknowledged any more, not even later: what the disk
// holds is not known (a failed fsync cannot be repeated).
func (e *Engine) Commit(b *pebble.Batch) (err error) {
	defer func() {
		// Pebble panics when its write-ahead log cannot take a record.
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

// NewBatch returns an empty batch for commit and write.
func (e *Engine) NewBatch() *pebble.Batch { return e.db.NewBatch() }

// Write makes the batch durable and closes it. truncated says that the batch shortens a log; write then may begin to
// flush Pebble's memtable. Only one goroutine at a time may call write.
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

// tidy writes the memtable out when that is worth it, just after a log was cut. It does not wait for the end. It belongs
// to the log's thread.
func (e *Engine) tidy() (err error) {
	if e.quiet || e.fresh < flushBytes {
		return nil
	}
	e.fresh = 0
	defer func() {
		if r := recover(); r != nil { // as in commit
			err = fmt.Errorf("write out the log: %v", r)
		}
	}()
	if _, err := e.db.AsyncFlush(); err != nil {
		return fmt.Errorf("write out the log: %w", err)
	}
	return nil
}

// Err returns the first error that Pebble called fatal, also of its background work.
func (e *Engine) Err() error {
	if p := e.log.fatal.Load(); p != nil {
		return fmt.Errorf("write the log: %w", *p)
	}
	return nil
}

func (e *Engine) Close() (err error) {
	defer func() {
		// After a failed write Pebble may not be able to close in order.
		if r := recover(); r != nil {
			err = fmt.Errorf("close the log: %v", r)
		}
	}()
	if err := e.db.Close(); err != nil {
		return fmt.Errorf("close the log: %w", err)
	}
	return nil
}
