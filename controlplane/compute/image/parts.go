package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mutant"
)

// slowPart is how long spreadPart waits for the answer of a member before it also sends the part to another member.
const slowPart = 5 * time.Second

// spreadPart stores a part on this member and on as many others as are needed for a majority. It returns the IDs of the
// members that have synced the part to disk. It returns Unavailable if no majority stores the part.
func (s *Service) spreadPart(ctx context.Context, sum string, body []byte) ([]uint64, error) {
	if err := s.opts.Files.StorePart(ctx, sum, bytes.NewReader(body)); err != nil {
		return nil, err
	}
	holders := []uint64{s.opts.Self}
	members := s.opts.Members()
	others := slices.DeleteFunc(slices.Clone(members), func(m uint64) bool { return m == s.opts.Self })
	needed := len(members)/2 + 1
	if mutant.On(mutant.AckPartEarly) {
		needed = 1
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type result struct {
		member uint64
		err    error
	}
	results := make(chan result, len(others)) // buffered, so that all goroutines end
	running := 0
	start := func() {
		if len(others) == 0 {
			return
		}
		m := others[0]
		others = others[1:]
		running++
		go func() { results <- result{m, s.opts.Peers.StorePart(ctx, m, sum, body)} }()
	}
	// Parts with different checksums start with different members, so that all members store about as many parts.
	if len(others) > 0 && sum[0]%2 == 1 {
		slices.Reverse(others)
	}
	for range needed - 1 {
		start()
	}
	slow := time.NewTicker(slowPart)
	defer slow.Stop()
	var errs []error
	for len(holders) < needed {
		if running == 0 {
			return nil, fault.New(fault.Unavailable, "only %d of %d members could store the part: fewer than a majority", len(holders), len(members)).
				Because(errors.Join(errs...)).MayRetry()
		}
		select {
		case r := <-results:
			running--
			if r.err == nil {
				holders = append(holders, r.member)
				continue
			}
			errs = append(errs, fmt.Errorf("member %d: %w", r.member, r.err))
			start()
		case <-slow.C:
			start()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return holders, nil
}

// openParts returns a source that joins the parts of a completed upload.
func (s *Service) openParts(ctx context.Context, i *cloud.Image) (*source, error) {
	var list []NumberedPart
	if err := s.opts.Store.View(ctx, func(v *store.View) (err error) {
		list, _, err = listParts(v, i.Upload.ID, 0, 0)
		return err
	}); err != nil {
		return nil, err
	}
	if len(list) != int(i.Upload.Parts) {
		return nil, fmt.Errorf("%d parts are recorded, %d were completed", len(list), i.Upload.Parts)
	}
	return &source{&partsReader{ctx: ctx, s: s, left: list}, int64(i.Upload.Size)}, nil
}

// needsParts reports whether the parts of an image's upload must be kept. They must be kept until a majority of the
// members has the joined image, because a single member with the image can fail.
func needsParts(i *cloud.Image) bool {
	return i.Upload != nil &&
		(i.Status == cloud.ImagePending || i.Status == cloud.ImageUploading && !mutant.On(mutant.DropPartsEarly))
}

// joinAgain joins the parts of an upload to this member's file of the image, in the same way as the importer did. It
// returns an error if the SHA-256 of the result is not the image's. The image's record does not have the format that
// the caller declared, so joinAgain tries the possible formats in turn.
func (s *Service) joinAgain(ctx context.Context, i *cloud.Image) error {
	declared := []cloud.ImageFormat{cloud.FormatUnspecified}
	if i.Format == cloud.FormatQCOW2 {
		declared = append(declared, cloud.FormatVHD) // a fixed VHD is converted only if the declared format is VHD
	}
	for _, format := range declared {
		from, err := s.openParts(ctx, i)
		if err != nil {
			return fmt.Errorf("join the parts again: %w", err)
		}
		again := *i
		again.Format = format
		done, err := s.copySource(ctx, &again, from)
		if err != nil {
			return fmt.Errorf("join the parts again: %w", err)
		}
		if done.SHA256 == i.SHA256 {
			return nil
		}
	}
	return fmt.Errorf("join the parts again: %w", errWrongBytes)
}

// partsReader reads the parts of an upload one after another. Each part is verified before its first byte is returned.
type partsReader struct {
	ctx  context.Context
	s    *Service
	left []NumberedPart
	rest []byte
}

func (r *partsReader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		if len(r.left) == 0 {
			return 0, io.EOF
		}
		body, err := r.s.readPart(r.ctx, &r.left[0].Part)
		if err != nil {
			return 0, fmt.Errorf("part %d: %w", r.left[0].Number, err)
		}
		r.left, r.rest = r.left[1:], body
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// Close implements io.Closer. It has nothing to release.
func (r *partsReader) Close() error { return nil }

// readPart returns the bytes of a part, from this member's file or from another holder's, and verifies them.
func (s *Service) readPart(ctx context.Context, p *Part) ([]byte, error) {
	var errs []error
	own, err := s.opts.Files.Open(p.SHA256)
	if err == nil {
		var body []byte
		if body, err = readVerified(own, p); err == nil {
			return body, nil
		}
	}
	errs = append(errs, err)
	for _, member := range p.Holders {
		if member == s.opts.Self {
			continue
		}
		r, err := s.opts.Peers.ReadImage(ctx, member, p.SHA256, 0)
		if err == nil {
			var body []byte
			if body, err = readVerified(r, p); err == nil {
				return body, nil
			}
		}
		errs = append(errs, fmt.Errorf("member %d: %w", member, err))
	}
	return nil, errors.Join(errs...)
}

// readVerified reads a part from r to its end, and closes r. It returns an error if the bytes are not those of the
// part.
func readVerified(r io.ReadCloser, p *Part) ([]byte, error) {
	defer r.Close()
	body, err := io.ReadAll(io.LimitReader(r, int64(p.Size)+1))
	if err != nil {
		return nil, err
	}
	if uint64(len(body)) != p.Size || checksum(body) != p.SHA256 {
		return nil, errWrongBytes
	}
	return body, nil
}

// maxOldParts is the maximum number of records of parts that deleteOldParts deletes in one transaction.
const maxOldParts = 1000

// deleteOldParts deletes the records of parts whose image does not exist or no longer needs its parts (see needsParts).
// The upload session of such an image accepts no parts, so no new records are written meanwhile.
func (s *Service) deleteOldParts(ctx context.Context) error {
	needed := map[string]bool{}
	var old [][]string
	err := s.opts.Store.Local(func(v *store.View) error {
		all, _, err := Images.List(v, 0)
		if err != nil {
			return err
		}
		for _, r := range all {
			if needsParts(r.Value) {
				needed[r.Value.Upload.ID] = true
			}
		}
		list, _, err := parts.List(v, 0)
		for _, p := range list {
			if !needed[p.Path[0]] {
				old = append(old, p.Path)
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(old, maxOldParts) {
		if _, err := s.opts.Store.Update(ctx, func(tx *store.Tx) error {
			for _, path := range batch {
				parts.Delete(tx, path...)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	return nil
}
