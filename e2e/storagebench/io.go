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

// loadOf returns the arguments of diskload for a mode.
func (b *bench) loadOf(mode string) []any {
	span := b.size.span << 20
	count := b.size.passes * span / sequentialBlock
	block := sequentialBlock
	switch mode {
	case "randread":
		block, count = randomBlock, b.size.randoms
	case "randwrite":
		block, count = randomBlock, b.size.randoms/flushedShare
	}
	return []any{"vda", mode, block, count, span}
}

// measureIO measures I/O on the disks of the first pair of guests. It first writes all of the span that is used, so
// that no later write allocates space.
func measureIO(ctx context.Context, s *site) error {
	p, err := s.pair(ctx, 0)
	if err != nil {
		return err
	}
	for _, m := range []*machine{p.ours, p.hand} {
		if _, err := m.load(ctx, s.loadOf("write")...); err != nil {
			return fmt.Errorf("fill: %w", err)
		}
	}
	for _, mode := range []string{"randread", "randwrite", "read", "write"} {
		turn := func(m *machine, isPeer bool) error {
			l, err := m.load(ctx, s.loadOf(mode)...)
			if err != nil {
				return err
			}
			rate := l.operations / l.elapsed.Seconds()
			if mode == "read" || mode == "write" {
				rate = l.bytes / l.elapsed.Seconds() / 1e6
			}
			s.results.Add(mode+" rate", isPeer, rate)
			s.results.Add(mode+" cpu", isPeer, float64(l.cpu.Microseconds())/l.operations)
			return nil
		}
		if err := s.InTurn(ctx, s.rounds,
			func(int) error { return turn(p.ours, false) },
			func(int) error { return turn(p.hand, true) },
		); err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
		f := s.results.Of(mode + " cpu")
		report.Say("%s: %.1f µs of CPU, by hand %.1f µs", mode, figure.Median(f.Ours), figure.Median(f.Peer))
	}
	s.results.Note("randread cpu", "the emulation of the guest takes most of the CPU")
	return nil
}
