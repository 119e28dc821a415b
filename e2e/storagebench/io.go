package main

import (
	"context"
	"fmt"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
)

const (
	randomBlock     = 4 << 10
	sequentialBlock = 256 << 10
	// flushedShare is how many random reads there are for each random write, because each write waits for the disk.
	flushedShare = 5
)

// loadOf returns the arguments of diskload for a device and a mode.
func (b *bench) loadOf(device, mode string) []any {
	span := b.size.span << 20
	count := b.size.passes * span / sequentialBlock
	block := sequentialBlock
	switch mode {
	case "randread":
		block, count = randomBlock, b.size.randoms
	case "randwrite":
		block, count = randomBlock, b.size.randoms/flushedShare
	}
	return []any{device, mode, block, count, span}
}

// measureIO measures I/O on the disks of the first pair of guests.
func measureIO(ctx context.Context, s *site) error {
	p, err := s.pair(ctx, 0)
	if err != nil {
		return err
	}
	s.results.Note("randread cpu", "the emulation of the guest takes most of the CPU")
	return s.measureLoads(ctx, p, "vda", "")
}

// measureLoads measures I/O on a device of a pair of guests. prefix begins the IDs of the lines. It first writes all of
// the span that is used, so that no later write allocates space.
func (s *site) measureLoads(ctx context.Context, p *pair, device, prefix string) error {
	for _, m := range []*machine{p.ours, p.hand} {
		if _, err := m.load(ctx, s.loadOf(device, "write")...); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	for _, mode := range []string{"randread", "randwrite", "read", "write"} {
		turn := func(m *machine, isPeer bool) error {
			l, err := m.load(ctx, s.loadOf(device, mode)...)
			if err != nil {
				return err
			}
			rate := l.operations / l.elapsed.Seconds()
			if mode == "read" || mode == "write" {
				rate = l.bytes / l.elapsed.Seconds() / 1e6
			}
			s.results.Add(prefix+mode+" rate", isPeer, rate)
			s.results.Add(prefix+mode+" cpu", isPeer, float64(l.cpu.Microseconds())/l.operations)
			return nil
		}
		if err := s.InTurn(ctx, s.rounds,
			func(int) error { return turn(p.ours, false) },
			func(int) error { return turn(p.hand, true) },
		); err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
		f := s.results.Of(prefix + mode + " cpu")
		report.Say("%s%s: %.1f µs of CPU, by hand %.1f µs", prefix, mode, figure.Median(f.Ours), figure.Median(f.Peer))
	}
	return nil
}
