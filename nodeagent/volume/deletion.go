package volume

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/shared/mutant"
)

// A shared pool has an empty file <volume id>.deleted for each deleted volume. Such a file prevents that another host
// makes the volume again: a host that lost its connection before the volume was made may still have a desired state
// that contains the volume, and finds no record of it.

// errDeleted means that the volume was deleted. It wraps ErrRefused.
var errDeleted = fmt.Errorf("%w: the volume was deleted", ErrRefused)

// deletedSuffix is the suffix of the name of a file that records a deletion.
const deletedSuffix = ".deleted"

// recordDeletion records that a volume of a shared pool was deleted. If the file system is full, recordDeletion records
// nothing and returns nil, so that the volume can be deleted. The caller must have locked the pool.
func (p *Pool) recordDeletion(id string) error {
	if !p.o.Shared {
		return nil
	}
	f, err := p.openFile(id+deletedSuffix, unix.O_RDWR|unix.O_CREAT)
	switch {
	case errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT):
		return nil
	case err != nil:
		return err
	}
	return errors.Join(f.Close(), p.dir.Sync())
}

// checkDeleted returns an error that wraps ErrRefused if the volume was deleted. The caller must have locked the pool.
func (p *Pool) checkDeleted(id string) error {
	if !p.o.Shared || mutant.On(mutant.RemakeDeleted) {
		return nil
	}
	_, err := os.Lstat(p.path(id + deletedSuffix))
	switch {
	case err == nil:
		return errDeleted
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return err
}

// ForgetDeletions removes the records of deletions that are older than the duration keep, by the clock of this host.
// After that, a host with a desired state from before the deletion can make the volume again. ForgetDeletions does
// nothing if the pool is not shared.
func (p *Pool) ForgetDeletions(ctx context.Context, keep time.Duration) error {
	if !p.o.Shared {
		return nil
	}
	if err := p.forgetDeletions(ctx, keep); err != nil {
		return fmt.Errorf("remove old records of deleted volumes of storage pool %s: %w", p.o.Name, err)
	}
	return nil
}

func (p *Pool) forgetDeletions(ctx context.Context, keep time.Duration) error {
	entries, err := os.ReadDir(p.path(""))
	if err != nil {
		return err
	}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), deletedSuffix)
		if !ok || !validID.MatchString(id) {
			continue
		}
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) || err == nil && time.Since(info.ModTime()) < keep {
			continue
		}
		if err == nil {
			err = p.change(ctx, func() error { return p.removeFile(e.Name()) })
		}
		if err != nil {
			return err
		}
	}
	return nil
}
