package mvcc

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Checkpoint writes the state as files into dir, which must not exist and should be on the engine's file system: most
// files are then hard links. It returns the position of exactly that state; Apply may go on meanwhile. The files are
// durable, and are what Restore takes. On an error dir does not exist.
func (e *Engine) Checkpoint(ctx context.Context, dir string) (command.Position, error) {
	gen := e.published.Load().gen
	if err := gen.acquire(); err != nil {
		return command.Position{}, err
	}
	defer gen.release()
	if err := gen.flush(ctx); err != nil {
		return command.Position{}, err
	}
	if err := gen.db.Checkpoint(dir); err != nil {
		return command.Position{}, fmt.Errorf("checkpoint into %s: %w", dir, err)
	}
	s, err := e.inspect(dir, false)
	if err != nil {
		return command.Position{}, errors.Join(fmt.Errorf("read back checkpoint %s: %w", dir, err), e.dir.fs.RemoveAll(dir))
	}
	return s.applied, nil
}

// inspect reads the state of a checkpoint without changing it; with verify, also what verifyTables does not.
func (e *Engine) inspect(dir string, verify bool) (state, error) {
	o := e.pebbleOptions()
	o.ReadOnly, o.ErrorIfNotExists, o.CacheSize = true, true, 1<<20
	// Damage to what others sent is not this engine's: whoever asked is told.
	o.EventListener.DataCorruption = func(pebble.DataCorruptionInfo) {}
	db, err := pebble.Open(dir, o)
	if err != nil {
		return state{}, err
	}
	s, err := loadState(db)
	if err == nil && verify {
		err = verifyValues(e.dir.fs, dir, db)
	}
	err = errors.Join(err, db.Close())
	return s, errors.Join(err, e.dir.fs.RemoveAll(e.dir.fs.PathJoin(dir, "LOCK")))
}

// Restore replaces the whole state by the checkpoint in dir, whose directory it takes over and which must be on the
// engine's file system. It reads all of it first, and refuses with ErrCorrupt what does not match its checksums. A crash
// leaves the old state or the new one, whole. It belongs to the goroutine that applies.
//
// Snapshots that are open end with ErrRestored. Watchers read on from the restored history; those that had already seen
// more than it holds end with ErrRestored. On an error the engine goes on with the old state, unless it says that the
// engine is closed.
func (e *Engine) Restore(dir string) error {
	e.closing.Lock()
	defer e.closing.Unlock()
	if e.closed {
		return ErrClosed
	}
	if _, err := e.dir.fs.Stat(dir); err != nil {
		return fmt.Errorf("restore from %s: %w", dir, err)
	}
	if err := verifyTables(e.dir.fs, dir, e.pebbleOptions()); err != nil {
		return fmt.Errorf("restore from %s: %w", dir, err)
	}
	if _, err := e.inspect(dir, true); err != nil {
		return fmt.Errorf("restore from %s: %w", dir, markCorrupt(err))
	}
	old := e.published.Load().gen
	number := old.number + 1
	if err := e.dir.adopt(dir, number); err != nil {
		return fmt.Errorf("restore from %s: %w", dir, err)
	}
	gen, err := e.openGeneration(number)
	if err != nil {
		return errors.Join(fmt.Errorf("restore from %s: %w", dir, err), e.dir.fs.RemoveAll(e.dir.generation(number)))
	}
	if err := e.dir.setCurrent(number); err != nil {
		// CURRENT may name either now: only opening again tells.
		e.closed = true
		e.hub.Close()
		err = errors.Join(fmt.Errorf("restore from %s: %w, %w", dir, err, ErrClosed),
			gen.retire(ErrClosed), old.retire(ErrClosed))
		e.builders.Wait()
		return errors.Join(err, e.dir.close())
	}
	e.failed = nil
	e.install(gen)
	e.hub.Restore(gen.loaded.revision)
	if e.opts.OnLeases != nil {
		e.opts.OnLeases(LeaseChanges{All: true})
	}
	err = old.retire(ErrRestored)
	e.builders.Wait()
	e.startIndexBuild(gen)
	if err := errors.Join(err, e.dir.fs.RemoveAll(e.dir.generation(old.number))); err != nil {
		// The next open removes it: nothing depends on it any more.
		e.opts.Logger.Error("mvcc remove replaced generation", "dir", e.dir.path, "err", err)
	}
	return nil
}
