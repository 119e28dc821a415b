package image

import (
	"context"
	"crypto/sha512"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/image/websource"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

const (
	// maxBytes is the maximum size of an image file, in bytes.
	maxBytes = 1 << 40
	// importTime is the maximum duration of one import or pull. It is also how long an image may stay PENDING after its
	// creation, or UPLOADING after its last change, before it becomes ERROR.
	importTime = 30 * time.Minute
	// recordTime is the maximum time for sending the result of an import to the leader and waiting until it is stored.
	recordTime = time.Minute
	// maxImports is the maximum number of concurrent imports on a member.
	maxImports = 4
	// maxFetches is the maximum number of concurrent imports of https sources on a member. Imports of https sources
	// have a semaphore of their own, so that slow servers do not delay other imports.
	maxFetches = 4
	// maxImportsOf and maxFetchesOf are the parts of maxImports and maxFetches that one org can use. Slow conversions
	// or slow servers of one org therefore do not block the imports of other orgs.
	maxImportsOf = maxImports / 2
	maxFetchesOf = maxFetches / 2
)

// beginImport imports an image from an open source in the background. If all import slots are taken, it closes the
// source, and Run starts the import later because the image is PENDING.
func (s *Service) beginImport(i cloud.Image, from *source) {
	if !s.startImport(&i, func(ctx context.Context) error { return s.importFrom(ctx, i, from) }) {
		from.Close()
	}
}

// startImport starts a job that imports an image, and returns whether the job was started. It starts no job in the
// cases in which backgroundJobs.start starts none, and if the org of the image has the maximum number of imports. The
// context of the job ends when the image is no longer PENDING, for example because it was deleted.
func (s *Service) startImport(i *cloud.Image, run func(context.Context) error) bool {
	slots, limit := s.imports, s.importsOf
	if isWeb(i) {
		slots, limit = s.fetches, s.fetchesOf
	}
	if !limit.take(i.Org) {
		return false
	}
	started := s.jobs.start("import "+string(i.ID), slots, func(ctx context.Context) error {
		defer limit.give(i.Org)
		return s.whilePending(ctx, i.ID, run)
	})
	if !started {
		limit.give(i.Org)
	}
	return started
}

// whilePending calls run with a context that ends when the image is no longer PENDING. If the image is no longer
// PENDING when run returns, whilePending returns nil. Otherwise it returns the error of run.
func (s *Service) whilePending(ctx context.Context, id cloud.ImageID, run func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	ended := false // the image is no longer PENDING
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		notPending := func(i *cloud.Image) (bool, error) { return i == nil || i.Status != cloud.ImagePending, nil }
		_, err := store.Await(ctx, s.opts.Store, Images, notPending, string(id))
		if ended = err == nil; ended {
			cancel()
		}
	}()
	err := run(ctx)
	cancel()
	<-watched
	if ended {
		return nil
	}
	return err
}

// restartImport starts the import of a PENDING image, from its source URL or from the parts of its completed upload.
func (s *Service) restartImport(i *cloud.Image) {
	s.startImport(i, func(ctx context.Context) error {
		switch {
		case isWeb(i):
			return s.fetch(ctx, *i)
		case isSnapshot(i):
			return s.importSnapshot(ctx, *i)
		case i.Upload != nil:
			from, err := s.openParts(ctx, i)
			if err != nil {
				return err
			}
			return s.importFrom(ctx, *i, from)
		}
		// The caller was authorized when the import was requested. Check only that the file is still in an import
		// directory. The argument true skips the check that org may use the directory.
		if u, err := url.Parse(i.Source); err == nil {
			if from, err := s.openFile(i.Org, true, u.Path); err == nil {
				return s.importFrom(ctx, *i, from)
			}
		}
		return s.record(ctx, importResult{ID: i.ID, Failure: "the source no longer exists"})
	})
}

// isWeb reports whether an image is imported from an https source.
func isWeb(i *cloud.Image) bool { return strings.HasPrefix(i.Source, "https:") }

// fetch imports an image from its https source.
func (s *Service) fetch(ctx context.Context, i cloud.Image) error {
	if s.opts.Web == nil {
		return s.record(ctx, importResult{ID: i.ID, Failure: "this cloud does not fetch images from https sources"})
	}
	limited, cancel := context.WithTimeout(ctx, importTime)
	defer cancel()
	body, err := s.opts.Web.Open(limited, i.Source)
	if err == nil {
		return s.importFrom(ctx, i, &source{body, body.Size()})
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return s.recordFailure(ctx, i.ID, err)
}

// importFrom copies and examines the source of an image, and stores the result in the image's record. If ctx ends, the
// image stays PENDING and the next Run starts the import again. If a part of an upload cannot be read, the image also
// stays PENDING, and the import starts again after a pause.
func (s *Service) importFrom(ctx context.Context, i cloud.Image, from *source) error {
	defer from.Close()
	limited, cancel := context.WithTimeout(ctx, importTime)
	defer cancel()
	done, err := s.copySource(limited, &i, from)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if i.Upload != nil && errors.Is(err, errSource) {
		return fmt.Errorf("join the parts of image %s: %w", i.ID, err)
	}
	if err != nil {
		return s.recordFailure(ctx, i.ID, err)
	}
	done.ID = i.ID
	return s.record(ctx, done)
}

// recordFailure logs the error of an import and sets the image to ERROR. The reason in the record contains only details
// that the owner of the image may see.
func (s *Service) recordFailure(ctx context.Context, id cloud.ImageID, err error) error {
	s.opts.Log.Warn("image import failed", "image", id, "err", err)
	var bad *userError
	var web *websource.Error
	why := "the import failed on member " + itoa(s.opts.Self)
	switch {
	case errors.As(err, &bad):
		why = bad.text
	case errors.As(err, &web):
		why = "the source cannot be fetched: " + web.Error()
	case errors.Is(err, context.DeadlineExceeded):
		why = fmt.Sprintf("the import took longer than %d minutes", int(importTime.Minutes()))
	}
	return s.record(ctx, importResult{ID: id, Failure: why})
}

// record sends the result of an import to the leader, which stores it in the image's record. It waits until this member
// has received the changed record. Otherwise reconcile would see a PENDING image and start the import again.
func (s *Service) record(ctx context.Context, done importResult) error {
	ctx, cancel := context.WithTimeout(ctx, recordTime)
	defer cancel()
	done.Member = s.opts.Self
	if _, err := finishImportCommand.Call(ctx, s.opts.Commands, done); err != nil {
		return fmt.Errorf("record import: %w", err)
	}
	return s.opts.Store.Barrier(ctx)
}

// userError is an error whose text may be shown to the owner of the image, in metadata trivet/error.
type userError struct{ text string }

func (r *userError) Error() string { return r.text }

// copySource copies a source into s.opts.Files. It then converts and examines the copy, not the source, because the
// source may change. The result contains the checksum, the sizes and the format of the stored file. The checksums in
// the metadata are those of the source, which differs from the stored file if the image was converted.
func (s *Service) copySource(ctx context.Context, i *cloud.Image, from *source) (done importResult, err error) {
	if from.size > maxBytes {
		return done, &userError{fmt.Sprintf("the source is larger than %d bytes", int64(maxBytes))}
	}
	if from.size == 0 {
		return done, &userError{"the source is empty"}
	}
	p, err := s.opts.Files.begin(from.size)
	if errors.Is(err, errNoSpace) {
		return done, &userError{fmt.Sprintf("member %d does not have enough disk space for the image", s.opts.Self)}
	}
	if err != nil {
		return done, err
	}
	defer p.discard()
	var bytes io.Reader = from
	long, wantLong := sha512.New(), i.Metadata[cloud.SourceSHA512]
	if wantLong != "" {
		bytes = io.TeeReader(from, long)
	}
	if err := p.copy(ctx, bytes, from.size); err != nil && !errors.Is(err, errTooLong) {
		return done, err
	} else if err != nil || p.size != from.size {
		return done, &userError{"the source changed while it was read"}
	}
	if want := i.Metadata[cloud.SourceSHA256]; want != "" && !strings.EqualFold(want, p.checksum()) {
		return done, &userError{fmt.Sprintf("its SHA-256 is %s, but %s is %s", p.checksum(), cloud.SourceSHA256, want)}
	}
	if wantLong != "" && !strings.EqualFold(wantLong, hex.EncodeToString(long.Sum(nil))) {
		return done, &userError{"its SHA-512 is not the one in " + cloud.SourceSHA512}
	}
	stored, err := s.convert(ctx, p, i.Format)
	if err != nil {
		return done, err
	}
	declared := i.Format
	if stored != p {
		defer stored.discard()
		declared, done.Source = cloud.FormatQCOW2, p.checksum()
	}
	if done.Format, done.Virtual, err = examine(contextReaderAt{ctx, stored.file}, stored.size, declared); err != nil {
		return done, err
	}
	done.SHA256, done.Size = stored.checksum(), uint64(stored.size)
	return done, stored.commit()
}

// contextReaderAt is an io.ReaderAt whose reads fail after ctx has ended.
type contextReaderAt struct {
	ctx context.Context
	io.ReaderAt
}

func (u contextReaderAt) ReadAt(b []byte, at int64) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, err
	}
	return u.ReaderAt.ReadAt(b, at)
}

// examine detects the format of the image f, which is size bytes long, and returns it with the virtual disk size in
// bytes. It returns a userError if the format differs from the declared one or is not supported.
func examine(f io.ReaderAt, size int64, declared cloud.ImageFormat) (cloud.ImageFormat, uint64, error) {
	is, err := detect(f)
	if err != nil {
		return 0, 0, err
	}
	switch {
	case declared == cloud.FormatQCOW2 && is != qcow2.QCOW2:
		return 0, 0, &userError{fmt.Sprintf("it was declared QCOW2, but its bytes are %s", is)}
	case declared == cloud.FormatRaw && slices.Contains(diskFormats, is):
		return 0, 0, &userError{fmt.Sprintf("it was declared RAW, but its bytes are %s", is)}
	case declared == cloud.FormatVMDK:
		return 0, 0, &userError{fmt.Sprintf("it was declared VMDK, but its bytes are %s", is)}
	case declared == cloud.FormatVHD:
		return 0, 0, &userError{fmt.Sprintf("it was declared VHD, but its bytes are %s", is)}
	case is != qcow2.QCOW2 && slices.Contains(diskFormats, is):
		return 0, 0, &userError{fmt.Sprintf("images of format %s are not served; convert with qemu-img convert -O qcow2", is)}
	case is != qcow2.QCOW2:
		return cloud.FormatRaw, uint64(size), nil
	}
	info, err := qcow2.Inspect(f, size)
	if errors.Is(err, qcow2.ErrRefused) {
		return 0, 0, &userError{err.Error()}
	}
	if err != nil {
		return 0, 0, fmt.Errorf("examine image: %w", err)
	}
	return cloud.FormatQCOW2, info.VirtualSize, nil
}

// diskFormats lists the formats of virtual disks that Detect can find. An image declared RAW must not have one.
// Compressed files are not listed, because a compressed initrd is a valid RAW image.
var diskFormats = []qcow2.Format{qcow2.QCOW2, qcow2.QED, qcow2.VMDK, qcow2.VHD, qcow2.VHDX, qcow2.VDI, qcow2.Parallels}
