package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/qcow2"
	"github.com/trivet-cloud/trivet/shared/vdisk"
)

// converted lists, for each format that is converted to QCOW2, the formats that its bytes may have. A fixed VHD has
// only a footer, and is therefore detected as Raw: it is converted only if it was declared VHD.
var converted = map[cloud.ImageFormat][]qcow2.Format{
	cloud.FormatUnspecified: {qcow2.VMDK, qcow2.VHD, qcow2.VHDX},
	cloud.FormatVMDK:        {qcow2.VMDK},
	cloud.FormatVHD:         {qcow2.VHD, qcow2.VHDX, qcow2.Raw},
}

// Limits of conversions. No other work of the image service takes as much processor time for each byte of its source. A
// conversion also keeps the tables of the source in memory: at most about 500 MiB (see package vdisk).
const (
	// maxConversions is the maximum number of concurrent conversions on a member. Further conversions wait. The waiting
	// time is part of importTime, the time limit of an import.
	maxConversions = 1
	// convertTime is the maximum duration of a conversion.
	convertTime = 10 * time.Minute
	// maxConverted is the maximum number of bytes of data in a converted image. A source with compressed data can be
	// about 1000 times smaller than the converted image.
	maxConverted = 256 << 30
)

// convert converts an image of another hypervisor to QCOW2. It returns a part with the converted image, which the
// caller discards. It returns p itself, unchanged, in two cases: the format needs no conversion, or it is a format that
// examine refuses.
func (s *Service) convert(ctx context.Context, p *part, declared cloud.ImageFormat) (*part, error) {
	is, err := detect(contextReaderAt{ctx, p.file})
	if err != nil {
		return p, err
	}
	if !slices.Contains(converted[declared], is) {
		return p, nil
	}
	select {
	case s.conversions <- struct{}{}:
		defer func() { <-s.conversions }()
	case <-ctx.Done():
		return p, ctx.Err()
	}
	limited, cancel := context.WithTimeout(ctx, s.convertTime)
	defer cancel()
	out, err := s.runConversion(limited, p, is)
	if err != nil && ctx.Err() == nil && errors.Is(limited.Err(), context.DeadlineExceeded) {
		const text = "its conversion to QCOW2 took longer than %v; convert it with qemu-img convert -O qcow2"
		return p, &userError{fmt.Sprintf(text, s.convertTime)}
	}
	return out, err
}

// runConversion converts the image p, whose bytes have the format is, to QCOW2. It returns an error when ctx ends.
func (s *Service) runConversion(ctx context.Context, p *part, is qcow2.Format) (*part, error) {
	disk, err := vdisk.Open(contextReaderAt{ctx, p.file}, p.size, is, vdisk.Options{MaxData: maxConverted})
	if errors.Is(err, vdisk.ErrRefused) {
		return p, &userError{err.Error()}
	}
	if err != nil {
		return p, fmt.Errorf("convert image: %w", err)
	}
	out, err := s.opts.Files.begin(qcow2.MaxLength(disk.Size(), disk.Units(qcow2.WriterCluster)))
	if errors.Is(err, errNoSpace) {
		return p, &userError{fmt.Sprintf("member %d has not enough disk space to convert it", s.opts.Self)}
	}
	if err != nil {
		return p, err
	}
	if err := out.fill(ctx, out.file, disk.Size(), disk.Read); err != nil {
		out.discard()
		return p, err
	}
	return out, nil
}

// fill writes a disk of size bytes to the empty part, in format QCOW2. The parameter to writes to the part's file. The
// function read calls its parameter with the data of the disk, at rising offsets.
func (p *part) fill(ctx context.Context, to io.WriterAt, size uint64, read func(write func(uint64, []byte) error) error) error {
	w, err := qcow2.NewWriter(to, size)
	if err != nil {
		return fmt.Errorf("convert image: %w", err)
	}
	err = read(w.Write)
	if errors.Is(err, vdisk.ErrRefused) {
		return &userError{err.Error()}
	}
	if err != nil {
		return fmt.Errorf("convert image: %w", err)
	}
	if p.size, err = w.Close(); err != nil {
		return fmt.Errorf("convert image: %w", err)
	}
	// The header is written last, so the checksum cannot be computed while writing.
	if _, err := io.Copy(p.sum, io.NewSectionReader(contextReaderAt{ctx, p.file}, 0, p.size)); err != nil {
		return fmt.Errorf("read converted image: %w", err)
	}
	return nil
}

// detect returns the format that the first bytes of an image indicate.
func detect(f io.ReaderAt) (qcow2.Format, error) {
	first := make([]byte, qcow2.DetectLength)
	n, err := f.ReadAt(first, 0)
	if err != nil && err != io.EOF {
		return "", fmt.Errorf("read image: %w", err)
	}
	return qcow2.Detect(first[:n]), nil
}
