// Package health checks the backends of service IPs from inside of the network namespaces of VPCs. A [Checker] checks
// the targets of each namespace, and returns which of them are healthy.
//
// # Decisions
//
//   - A check opens a TCP connection, or sends a GET request, from the gateway's address. The security groups of the
//     backend do not apply to a check, because its packets are not forwarded. Only the host of the backend can check
//     the backend: the gateway's address exists on every host, so answers to a check by another host would end at the
//     backend's host.
//   - A target has no verdict at first. The first success makes the target healthy. The number of consecutive failures
//     in its health check makes it unhealthy. This number applies at the beginning too, so that a lost packet after a
//     restart of the agent does not take a backend out of service.
//   - A check fails if it takes longer than its interval, and after five seconds at the latest.
//   - The socket is made on a thread in the namespace. No thread is occupied while a check waits for the target.
//   - The checks of a namespace that run at a time are limited, so that targets of one tenant that do not answer delay
//     only that tenant's checks.
//   - A redirection is a success. The check does not follow it, because it could lead to any address that the namespace
//     reaches.
//
// The package does not know VPCs, services or the control plane.
package health

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// maxTimeout limits the time of one check.
	maxTimeout = 5 * time.Second
	// maxConcurrent is the number of checks that run at a time, and maxPerNamespace that of one namespace.
	maxConcurrent   = 256
	maxPerNamespace = 16
	// logInterval is the shortest time between two log lines about targets of one namespace. Tenants decide how often
	// their targets fail.
	logInterval = time.Minute
)

// Target is a backend that is checked. Targets are the same if all fields are equal.
type Target struct {
	// Address is the backend's address and port.
	Address netip.AddrPort
	// Source is the address of the namespace from which the backend is checked.
	Source netip.Addr
	Check  cloud.HealthCheck
}

// Checker checks targets. Its methods may be called concurrently.
type Checker struct {
	log     *slog.Logger
	changed func(namespace string)
	probe   func(ctx context.Context, namespace string, t *Target) error
	slots   chan struct{} // has an element for each check in progress
	ctx     context.Context
	cancel  context.CancelFunc
	done    sync.WaitGroup

	mu      sync.Mutex // guards running, the tallies, shares and logged
	running map[string]map[Target]*checked
	// shares has a channel for each namespace in running, with an element for each of its checks in progress.
	shares map[string]chan struct{}
	// logged has the time of the last log line about a target of each namespace in running.
	logged map[string]time.Time
}

// checked has the results of the checks of a target, and the function that ends the checks.
type checked struct {
	tally
	stop context.CancelFunc
}

// New returns a Checker without targets. The Checker calls changed whenever the verdict of a target in a namespace
// changes; changed must not block and must not call the Checker. It logs the error of the check that makes a target
// unhealthy, for each namespace at most once in logInterval.
func New(log *slog.Logger, changed func(namespace string)) *Checker {
	c := &Checker{
		log: log, changed: changed, probe: probe, slots: make(chan struct{}, maxConcurrent),
		running: map[string]map[Target]*checked{}, shares: map[string]chan struct{}{}, logged: map[string]time.Time{},
	}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	return c
}

// Close ends all checks and waits for them.
func (c *Checker) Close() {
	c.mu.Lock()
	c.cancel() // Set starts nothing afterwards
	c.mu.Unlock()
	c.done.Wait()
}

// Set replaces the targets in the network namespace whose path is namespace. A target that the namespace had before
// keeps its verdict. After Close, Set does nothing.
func (c *Checker) Set(namespace string, targets []Target) {
	c.mu.Lock()
	defer c.mu.Unlock()
	had := c.running[namespace]
	if len(had) == 0 && len(targets) == 0 || c.ctx.Err() != nil {
		return
	}
	share := c.shares[namespace]
	if share == nil {
		share = make(chan struct{}, maxPerNamespace)
		c.shares[namespace] = share
	}
	now := map[Target]*checked{}
	for _, t := range targets {
		switch {
		case now[t] != nil:
		case had[t] != nil:
			now[t] = had[t]
		default:
			ctx, stop := context.WithCancel(c.ctx)
			one := &checked{stop: stop}
			now[t] = one
			c.done.Go(func() { c.run(ctx, namespace, share, t, one) })
		}
	}
	for t, one := range had {
		if now[t] == nil {
			one.stop()
		}
	}
	c.running[namespace] = now
	if len(now) == 0 {
		delete(c.running, namespace)
		delete(c.shares, namespace)
		delete(c.logged, namespace)
	}
}

// Verdict returns whether a target in a namespace is healthy. It returns known false if the target has no verdict yet
// or is not one of the namespace's.
func (c *Checker) Verdict(namespace string, t Target) (healthy, known bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	one := c.running[namespace][t]
	if one == nil {
		return false, false
	}
	return one.healthy, one.known
}

// run checks a target at its interval until ctx ends. share has an element for each check in progress of the namespace.
func (c *Checker) run(ctx context.Context, namespace string, share chan struct{}, t Target, one *checked) {
	interval := time.Duration(t.Check.IntervalSeconds) * time.Second
	for {
		failure, ran := c.check(ctx, namespace, share, &t, interval)
		if !ran {
			return
		}
		c.mu.Lock()
		changed := one.add(failure == nil, &t.Check)
		logs := changed && failure != nil && time.Since(c.logged[namespace]) >= logInterval
		if logs && c.running[namespace] != nil {
			c.logged[namespace] = time.Now()
		}
		c.mu.Unlock()
		if logs {
			c.log.Info("a backend of a service IP is unhealthy", "namespace", namespace, "backend", t.Address, "err", failure)
		}
		if changed {
			c.changed(namespace)
		}
		// The random part spreads the checks of targets that were set at the same time.
		pause := interval - interval/20 + rand.N(interval/10)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// check checks a target once, and returns the error of the check. ran is false if ctx ended before the result.
func (c *Checker) check(
	ctx context.Context, namespace string, share chan struct{}, t *Target, interval time.Duration,
) (failure error, ran bool) {
	for _, limit := range []chan struct{}{share, c.slots} {
		select {
		case limit <- struct{}{}:
			defer func() { <-limit }()
		case <-ctx.Done():
			return ctx.Err(), false
		}
	}
	limited, cancel := context.WithTimeout(ctx, min(interval, maxTimeout))
	defer cancel()
	failure = c.probe(limited, namespace, t)
	return failure, ctx.Err() == nil
}

// tally has the verdict about a target, and the number of consecutive results that contradict the verdict.
type tally struct {
	known, healthy bool
	against        uint32 // results since the last one that agrees with the verdict
}

// add adds a result, and returns true if the result changed the verdict.
func (y *tally) add(ok bool, c *cloud.HealthCheck) (changed bool) {
	if y.known && ok == y.healthy {
		y.against = 0
		return false
	}
	y.against++
	threshold := c.Unhealthy
	if ok {
		threshold = c.Healthy
		if !y.known {
			threshold = 1
		}
	}
	if y.against < threshold {
		return false
	}
	*y = tally{known: true, healthy: ok}
	return true
}
