package mvcc

import (
	"context"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/command"
)

// Checkpoint writes the state as files into dir, which must not exist. On the engine's file system, most files are hard
// links. It returns the position of exactly that state; Apply may run meanwhile. The files are durable and can be given
// to Restore. After an error, dir does not exist.
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

// inspect returns the state of the checkpoint in dir without changing the checkpoint. With verify, it also reads the
// values that verifyTables does not check.
func (e *Engine) inspect(dir string, verify bool) (state, error) {
	o := e.pebbleOptions()
	o.ReadOnly, o.ErrorIfNotExists, o.CacheSize = true, true, 1<<20
	// Damaged data of a checkpoint does not count as damage of this engine: only the caller gets the error.
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

// Restore replaces the state by the checkpoint in dir. It moves dir into the engine's directory, on the same file
// system. Before that it reads all data, and fails with ErrCorrupt if a checksum does not match. After a crash, either
// the old state or the new one is complete. It must be called by the goroutine that calls Apply.
//
// Open snapshots end with ErrRestored. Watchers continue with the restored history; those that have seen newer
// revisions than it has end with ErrRestored. After an error, the engine continues with the old state, unless the error
// is ErrClosed.
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
		// CURRENT may name either generation now. Only the next Open can tell which one.
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
		// Nothing depends on the old generation: the next Open removes it.
		e.opts.Logger.Error("mvcc remove replaced generation", "dir", e.dir.path, "err", err)
	}
	return nil
}
