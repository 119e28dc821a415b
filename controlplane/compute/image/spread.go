package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// Peers reads and stores image files of other members.
type Peers interface {
	// ReadImage reads a file from an offset to the end. The returned reader must return an error if it receives nothing
	// for some time, because the other member may hang.
	ReadImage(ctx context.Context, member uint64, sha256 string, offset uint64) (io.ReadCloser, error)
	// StorePart stores a part of an image upload, and returns when the other member has synced it to its disk.
	StorePart(ctx context.Context, member uint64, sha256 string, part []byte) error
}

const (
	// reconcileInterval is the interval at which Run compares this member's files with the records. Run also does so
	// when an image record changes.
	reconcileInterval = 10 * time.Second
	// sweepAge is the minimum age of a file without a record that sweep removes. A younger file may belong to an import
	// that has written the file, but not yet its checksum to the record.
	sweepAge = 10 * time.Minute
	// sweepInterval is the interval at which Run removes files without a record.
	sweepInterval = time.Minute
	// sweepTime is the maximum time for reading the records before files are removed.
	sweepTime = 10 * time.Second
	// maxPulls is the maximum number of concurrent pulls on a member.
	maxPulls = 2
)

// Run imports and pulls the images that this member should have according to the records, until ctx ends. It returns
// when all work that it started has ended.
func (s *Service) Run(ctx context.Context) {
	s.jobs.open(ctx)
	defer s.jobs.close()
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		s.watchImages(ctx)
	}()
	defer func() { <-watching }()
	tick := time.NewTicker(reconcileInterval)
	defer tick.Stop()
	var swept time.Time
	for ctx.Err() == nil {
		if err := s.reconcile(); err != nil {
			s.opts.Log.Warn("images", "err", err)
		}
		if err := s.startScrub(); err != nil {
			s.opts.Log.Warn("verify image files", "err", err)
		}
		if now := time.Now(); now.Sub(swept) >= sweepInterval {
			swept = now
			if err := s.sweep(ctx); err != nil && ctx.Err() == nil {
				s.opts.Log.Warn("remove old image files", "err", err)
			}
		}
		select {
		case <-s.wake:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
}

// wakeUp makes Run check the records now.
func (s *Service) wakeUp() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// watchImages calls wakeUp whenever an image record changes, until ctx ends.
func (s *Service) watchImages(ctx context.Context) {
	for ctx.Err() == nil {
		w := Images.WatchPaths(s.opts.Store, 0)
		s.wakeUp() // records may have changed before the watch began
		for {
			if _, _, err := w.Next(ctx); err != nil {
				break
			}
			s.wakeUp()
		}
		w.Close()
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// reconcile compares this member's files with the image records, and starts the missing imports and pulls.
func (s *Service) reconcile() error {
	var all []store.Record[cloud.Image]
	if err := s.opts.Store.Local(func(v *store.View) (err error) {
		all, _, err = Images.List(v, 0)
		return err
	}); err != nil {
		return err
	}
	var errs []error
	for _, r := range all {
		i := r.Value
		switch {
		case i.Uploading():
		case i.Status == cloud.ImagePending && i.Importer == s.opts.Self:
			s.restartImport(i)
		case i.SHA256 != "":
			errs = append(errs, s.startPull(i))
		}
	}
	return errors.Join(errs...)
}

// sweep removes old files that belong to no image and to no part of an upload. It removes nothing if it cannot read the
// newest records: the older records of a member that is cut off may lack a part that the cluster has acknowledged.
func (s *Service) sweep(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, sweepTime)
	defer cancel()
	wanted := map[string]bool{}
	if err := s.opts.Store.View(ctx, func(v *store.View) error {
		all, _, err := Images.List(v, 0)
		if err != nil {
			return err
		}
		for _, r := range all {
			i := r.Value
			if i.SHA256 != "" {
				wanted[i.SHA256] = true
			}
			if !needsParts(i) {
				continue
			}
			list, _, err := parts.List(v, 0, i.Upload.ID)
			if err != nil {
				return err
			}
			for _, p := range list {
				wanted[p.Value.SHA256] = true
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return s.opts.Files.sweep(wanted, time.Now(), sweepAge)
}

// startPull starts to copy an image from other members in the background. It does nothing if this member has the file
// and is already listed in the record's holders.
func (s *Service) startPull(i *cloud.Image) error {
	has, err := s.opts.Files.has(i.SHA256)
	if err != nil || has && slices.Contains(i.Holders, s.opts.Self) {
		return err
	}
	s.jobs.start("hold "+i.SHA256, s.pulls, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, importTime)
		defer cancel()
		if err := s.pullAndRecord(ctx, i); err != nil {
			return fmt.Errorf("image %s: %w", i.ID, err)
		}
		return nil
	})
	return nil
}

// pullAndRecord copies an image from other members if this member does not have it, and adds this member to the holders
// in the image's record. If the pull fails and the parts of the image's upload still exist, pullAndRecord makes the
// image from these parts, which a majority of the members has. If the record already lists this member although the
// file is missing, pullAndRecord first removes this member from the holders.
func (s *Service) pullAndRecord(ctx context.Context, i *cloud.Image) error {
	has, err := s.opts.Files.keep(i.SHA256)
	if err != nil {
		return err
	}
	ask := holderRequest{i.ID, s.opts.Self, i.SHA256}
	if !has {
		if slices.Contains(i.Holders, s.opts.Self) {
			s.opts.Log.Warn("the file of an image is missing; pulling it again", "image", i.ID)
			if _, err := removeHolderCommand.Call(ctx, s.opts.Commands, ask); err != nil {
				return err
			}
		}
		if err := s.pull(ctx, i); err != nil {
			if ctx.Err() != nil || !needsParts(i) {
				return err
			}
			if joined := s.joinAgain(ctx, i); joined != nil {
				return errors.Join(err, joined)
			}
		}
	}
	if _, err = addHolderCommand.Call(ctx, s.opts.Commands, ask); err != nil {
		return err
	}
	return s.opts.Store.Barrier(ctx)
}

// errWrongBytes means that another member sent bytes that do not match the image's checksum or size.
var errWrongBytes = errors.New("it sent bytes with another checksum")

// pull copies an image from its holders, the members that have it. If one holder fails, pull continues with the next
// one at the same offset. If the checksum is wrong, pull discards the bytes. If they came from several holders, it then
// reads the whole image from the last of them; if that fails too, or if they came from one holder, it continues with
// the next one.
func (s *Service) pull(ctx context.Context, i *cloud.Image) error {
	p, err := s.opts.Files.begin(int64(i.SizeBytes))
	if err != nil {
		return err
	}
	defer p.discard()
	err = errors.New("no other member holds it")
	for _, member := range i.Holders {
		if member == s.opts.Self {
			continue
		}
		shared := p.size > 0
		err = s.read(ctx, member, i, p)
		if errors.Is(err, errWrongBytes) && shared {
			if err = p.reset(); err == nil {
				err = s.read(ctx, member, i, p)
			}
		}
		switch {
		case err == nil:
			return p.commit()
		case errors.Is(err, errWrongBytes):
			s.opts.Log.Warn("a member sent bytes with another checksum", "image", i.ID, "member", member)
			if err := p.reset(); err != nil {
				return err
			}
		case ctx.Err() != nil || !errors.Is(err, errSource):
			return err
		}
	}
	return err
}

// read reads the rest of an image from one member and appends it to p. It returns nil if the image is then complete and
// its checksum is correct. After an error that wraps errSource, p keeps the bytes read so far.
func (s *Service) read(ctx context.Context, member uint64, i *cloud.Image, p *part) error {
	r, err := s.opts.Peers.ReadImage(ctx, member, i.SHA256, uint64(p.size))
	if err != nil {
		return fmt.Errorf("%w: %w", errSource, err)
	}
	defer r.Close()
	switch err := p.copy(ctx, r, int64(i.SizeBytes)); {
	case errors.Is(err, errTooLong):
		return fmt.Errorf("member %d: %w", member, errWrongBytes)
	case err != nil:
		return err
	case p.size < int64(i.SizeBytes):
		return fmt.Errorf("%w: member %d: %w", errSource, member, io.ErrUnexpectedEOF)
	case p.checksum() != i.SHA256 && !mutant.On(mutant.SkipImageDigest):
		return fmt.Errorf("member %d: %w", member, errWrongBytes)
	}
	return nil
}
