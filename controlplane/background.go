package main

import (
	"context"
	"errors"
	"sync"

	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
)

// runBackground starts two kinds of work: loops that run until the member stops, and tasks that run only while this
// member is the leader. It is called after all listeners were opened.
func (m *member) runBackground(ctx context.Context) error {
	tasks := &leader.Tasks{Self: m.config.NodeID, Leadership: m.system, Ready: m.records.Barrier, Log: m.log}
	loops := []func(context.Context){
		m.clock.Run,
		m.space.Run,
		tasks.Run,
		func(ctx context.Context) { m.tenantTLS.runReload(ctx, m.config.Dev) },
		func(ctx context.Context) { runClientURLUpdate(ctx, m.config, m.memberships, m.log) },
		m.runReport,
		func(ctx context.Context) {
			runAdminToken(ctx, m.key, m.config.DataDir, tokenValidator(m.identities), m.clock.Now, m.log)
		},
		func(ctx context.Context) { scrub(ctx, m.engines, m.log) },
	}
	for _, engine := range m.engines {
		loops = append(loops, m.fatal(func(ctx context.Context) error {
			// Building the key index reads every key. This detects damage in keys that requests may not read for a long
			// time.
			if err := engine.AwaitKeyIndex(ctx); errors.Is(err, mvcc.ErrCorrupt) {
				return err
			}
			return nil
		}))
	}
	for _, s := range m.services {
		tasks.List = append(tasks.List, s.tasks...)
		loops = append(loops, s.run...)
	}
	background, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	m.onStop(func() {
		cancel()
		work.Wait()
	})
	for _, loop := range loops {
		work.Go(func() { loop(background) })
	}
	return nil
}

// fatal returns a function that runs f once in the background. If f returns an error before ctx ends, the member stops
// with that error.
func (m *member) fatal(f func(context.Context) error) func(context.Context) {
	return func(ctx context.Context) {
		if err := f(ctx); err != nil && ctx.Err() == nil {
			m.listeners.failed <- err
		}
	}
}
