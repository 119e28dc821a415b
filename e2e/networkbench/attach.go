package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/bench/report"
)

// measureAttach measures how long it takes to make a namespace and attach it to a port: with the agent's code, and with
// the calls of ip(8) and bridge(8) that make the same devices, addresses, routes and entries.
func measureAttach(ctx context.Context, b *bench) (err error) {
	s, err := newSite(ctx, "a")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	h := s.hosts[0]
	vpc := newVPC("attach", 100)
	addPorts(&vpc, firstPort, b.size.attached, 10)
	if err := h.apply(ctx, vpc); err != nil {
		return err
	}
	plain, err := newPlainBridge(ctx, "plain")
	if err != nil {
		return err
	}
	ours := func(number int) (string, error) { return h.attach(ctx, vpc, number) }
	byHand := func(number int) (string, error) { return plain.attach(ctx, number) }
	turn := func(attach func(number int) (string, error), isPeer bool) error {
		var took []float64
		var names []string
		for i := range b.size.attached {
			began := time.Now()
			name, err := attach(firstPort + i)
			if err != nil {
				return err
			}
			took = append(took, milliseconds(time.Since(began)))
			names = append(names, name)
		}
		b.results.Add("attach p50", isPeer, figure.Median(took))
		b.results.Add("attach p99", isPeer, figure.Quantile(took, 0.99))
		if !isPeer {
			b.results.Ours("attach spread", figure.Quantile(took, 0.99)/figure.Median(took))
		}
		report.Say("attach, peer %v: p50 %.1f ms, p99 %.1f ms", isPeer, figure.Median(took), figure.Quantile(took, 0.99))
		// When a namespace is deleted, the kernel deletes the veth pair in it.
		for _, name := range names {
			err = errors.Join(err, netns.DeleteNamed(name))
		}
		return errors.Join(err, awaitNoPorts(ctx, h.name+"-attach", plain.name))
	}
	b.results.Note("attach p50", fmt.Sprintf("%d ports in a round, to a VPC with as many ports", b.size.attached))
	return b.InTurn(ctx, b.rounds,
		func(int) error { return turn(ours, false) },
		func(int) error { return turn(byHand, true) },
	)
}
