package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// Peers reads image bytes of other members.
type Peers interface {
	ReadImage(ctx context.Context, member uint64, sha256 string, offset uint64) (io.ReadCloser, error)
}

// maxBytes is the largest image.
const maxBytes = 1 << 40

// lookEvery is how often a member looks for what it should hold without being woken.
const lookEvery = 10 * time.Second

// sweepAge is how long bytes without a record stay: an import writes the bytes first.
const sweepAge = 10 * time.Minute

// claim makes this member the one that imports an image, once at a time.
func (s *Service) claim(id cloud.ImageID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.importing[id] {
		return false
	}
	s.importing[id] = true
	return true
}

func (s *Service) unclaim(id cloud.ImageID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.importing, id)
}

// importFrom copies and examines a source, and says how that went.
func (s *Service) importFrom(i cloud.Image, from *source) {
	ctx, cancel := context.WithTimeout(context.Background(), importTime)
	defer cancel()
	defer s.unclaim(i.ID)
	defer from.Close()
	done, err := s.take(ctx, &i, from)
	if err != nil {
		var bad *refusal
		done.Failure = "the import failed on member " + itoa(s.opts.Self)
		if errors.As(err, &bad) {
			done.Failure = bad.why
		}
		s.opts.Log.Warn("image import failed", "image", i.ID, "err", err)
	}
	done.ID, done.Member = i.ID, s.opts.Self
	if _, err := s.imported(ctx, done); err != nil {
		// The record stays PENDING and Run begins again.
		s.opts.Log.Warn("image import not recorded", "image", i.ID, "err", err)
	}
}

// refusal is what the owner of an image may read about why it is no image.
type refusal struct{ why string }

func (r *refusal) Error() string { return r.why }

// take copies a source into the files and examines the copy: what is read later is what was examined.
func (s *Service) take(ctx context.Context, i *cloud.Image, from *source) (done importDone, err error) {
	if from.size > maxBytes {
		return done, &refusal{fmt.Sprintf("the source is larger than %d bytes", int64(maxBytes))}
	}
	if from.size == 0 {
		return done, &refusal{"the source is empty"}
	}
	p, err := s.opts.Files.begin(from.size)
	if errors.Is(err, errNoRoom) {
		return done, &refusal{fmt.Sprintf("member %d has no room for it", s.opts.Self)}
	}
	if err != nil {
		return done, err
	}
	defer p.drop()
	if err := p.copy(ctx, from, maxBytes); err != nil {
		return done, err
	}
	done.SHA256, done.Size = p.checksum(), uint64(p.size)
	if done.Format, done.Virtual, err = examine(p.file, p.size, i.Format); err != nil {
		return done, err
	}
	return done, p.keep()
}

// examine reads what the bytes are, and refuses what they should not be.
func examine(f *os.File, size int64, declared cloud.ImageFormat) (cloud.ImageFormat, uint64, error) {
	first := make([]byte, qcow2.DetectLength)
	n, err := f.ReadAt(first, 0)
	if err != nil && err != io.EOF {
		return 0, 0, fmt.Errorf("read image: %w", err)
	}
	is := qcow2.Detect(first[:n])
	switch {
	case declared == cloud.FormatQCOW2 && is != qcow2.QCOW2:
		return 0, 0, &refusal{fmt.Sprintf("it was declared QCOW2, but its bytes are %s", is)}
	case declared == cloud.FormatRaw && slices.Contains(disks, is):
		return 0, 0, &refusal{fmt.Sprintf("it was declared RAW, but its bytes are %s", is)}
	case is != qcow2.QCOW2 && slices.Contains(disks, is):
		return 0, 0, &refusal{fmt.Sprintf("images of format %s are not served; convert with qemu-img convert -O qcow2", is)}
	case is != qcow2.QCOW2:
		return cloud.FormatRaw, uint64(size), nil
	}
	info, err := qcow2.Inspect(f, size)
	if errors.Is(err, qcow2.ErrRefused) {
		return 0, 0, &refusal{err.Error()}
	}
	if err != nil {
		return 0, 0, fmt.Errorf("examine image: %w", err)
	}
	return cloud.FormatQCOW2, info.VirtualSize, nil
}

// disks are the formats of virtual disks. A compressed file can be an initrd, so it may well be RAW.
var disks = []qcow2.Format{qcow2.QCOW2, qcow2.QED, qcow2.VMDK, qcow2.VHD, qcow2.VHDX, qcow2.VDI, qcow2.Parallels}

// Run makes this member hold what it should until ctx ends.
func (s *Service) Run(ctx context.Context) {
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		s.follow(ctx)
	}()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		if err := s.look(ctx); err != nil && ctx.Err() == nil {
			s.opts.Log.Warn("images", "err", err)
		}
		select {
		case <-s.wake:
		case <-tick.C:
		case <-ctx.Done():
		}
	}
	<-watching
}

// follow wakes Run whenever an image changes.
func (s *Service) follow(ctx context.Context) {
	for ctx.Err() == nil {
		w := Images.Watch(s.opts.Store, 0)
		for {
			if _, _, err := w.Next(ctx); err != nil {
				break
			}
			select {
			case s.wake <- struct{}{}:
			default:
			}
		}
		w.Close()
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
		}
	}
}

// look compares what this member holds with what the records want.
func (s *Service) look(ctx context.Context) error {
	var all []store.Record[cloud.Image]
	if err := s.opts.Store.Local(func(v *store.View) (err error) {
		all, _, err = Images.List(v, 0)
		return err
	}); err != nil {
		return err
	}
	wanted := map[string]bool{}
	var errs []error
	for _, r := range all {
		i := r.Value
		switch {
		case i.Status == cloud.ImagePending && i.Importer == s.opts.Self:
			s.again(i)
		case i.SHA256 != "":
			wanted[i.SHA256] = true
			errs = append(errs, s.obtain(ctx, i))
		}
	}
	errs = append(errs, s.opts.Files.sweep(wanted, time.Now(), sweepAge))
	return errors.Join(errs...)
}

// again begins an import that this member once began and did not end.
func (s *Service) again(i *cloud.Image) {
	if !s.claim(i.ID) {
		return
	}
	u, err := url.Parse(i.Source)
	if err == nil {
		// Whoever asked was let in then; what counts now is that the file still lies where imports may come from.
		var from *source
		if from, err = s.openFile(i.Org, true, u.Path); err == nil {
			go s.importFrom(*i, from)
			return
		}
	}
	go func() {
		defer s.unclaim(i.ID)
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := s.imported(ctx, importDone{ID: i.ID, Member: s.opts.Self, Failure: "the source is no longer there"}); err != nil {
			s.opts.Log.Warn("image import not recorded", "image", i.ID, "err", err)
		}
	}()
}

// obtain makes this member hold an image, from whoever does.
func (s *Service) obtain(ctx context.Context, i *cloud.Image) error {
	if !s.opts.Files.Has(i.SHA256) {
		if err := s.pull(ctx, i); err != nil {
			return fmt.Errorf("pull image %s: %w", i.ID, err)
		}
	}
	if slices.Contains(i.Holders, s.opts.Self) {
		return nil
	}
	_, err := s.held(ctx, heldAsk{i.ID, s.opts.Self, i.SHA256})
	return err
}

// pull reads an image from its holders, going on with the next where one fails.
func (s *Service) pull(ctx context.Context, i *cloud.Image) error {
	p, err := s.opts.Files.begin(int64(i.SizeBytes))
	if err != nil {
		return err
	}
	defer p.drop()
	err = errors.New("no other member holds it")
	for _, member := range i.Holders {
		if member == s.opts.Self {
			continue
		}
		var r io.ReadCloser
		if r, err = s.opts.Peers.ReadImage(ctx, member, i.SHA256, uint64(p.size)); err != nil {
			continue
		}
		err = p.copy(ctx, r, int64(i.SizeBytes))
		r.Close()
		if err == nil && p.checksum() != i.SHA256 {
			return fmt.Errorf("member %d sent other bytes", member)
		}
		if err == nil {
			return p.keep()
		}
	}
	return err
}
