package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
)

// scrub deletes the data of compacted revisions from each engine every five seconds, in steps of about 1000 changes,
// until ctx ends.
func scrub(ctx context.Context, engines map[uint64]*mvcc.Engine, log *slog.Logger) {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		for id, e := range engines {
			for {
				done, err := e.Scrub(ctx, 1000)
				if err != nil && ctx.Err() == nil {
					log.Warn("scrub", "group", id, "err", err)
				}
				if done || err != nil {
					break
				}
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}
