package mvcc

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Checkpoint writes the state as files into the directory dir, which must not exist. If dir is on the engine's file
// system, most files are hard links. Checkpoint returns the raft index and term of the last command in the checkpoint.
// Apply may run meanwhile. The files are durable and can be given to Restore. After an error, dir does not exist.
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

// inspect returns the state of the checkpoint in dir and leaves the checkpoint unchanged. If verify is true, inspect
// also reads the values that verifyTables does not check.
func (e *Engine) inspect(dir string, verify bool) (state, error) {
	o := e.pebbleOptions()
	o.ReadOnly, o.ErrorIfNotExists, o.CacheSize = true, true, 1<<20
	// Do not count damaged data of a checkpoint as damage of this engine. The caller gets the error.
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

// Restore replaces the state by the checkpoint in dir. It moves dir, which must be on the same file system, into the
// engine's directory. Before that it reads all data, and fails with ErrCorrupt if a checksum does not match. After a
// crash, the engine opens with either the complete old state or the complete new one. Restore must be called by the
// goroutine that calls Apply.
//
// Open snapshots end with ErrRestored. Watchers that have seen newer revisions than the checkpoint has end with
// ErrRestored too; the others continue with the restored history. After an error, the engine continues with the old
// state. The error ErrClosed is an exception: the engine is then closed.
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
		// The file CURRENT may name the old or the new generation now, and only the next Open reads it again. So close
		// the engine.
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
		// Restore has succeeded all the same: the old generation is not used any more, and the next Open removes it.
		e.opts.Logger.Error("mvcc remove replaced generation", "dir", e.dir.path, "err", err)
	}
	return nil
}
