package live

import (
	"context"
	"fmt"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc/watch"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// excludeHosts evicts or bans random hosts one after the other, and admits each again after a random time, until
// fleet.closing returns true. When it returns, no host is evicted or banned.
func (f *fleet) excludeHosts(ctx context.Context) {
	operator := &tenantClient{f: f, name: "guard", rng: f.source(301)}
	for !f.closing() {
		f.pause(time.Duration(operator.rng.IntN(120)) * time.Second)
		h := f.hosts[operator.rng.IntN(len(f.hosts))]
		id, away := f.nodeOf(h), time.Duration(5+operator.rng.IntN(90))*time.Second
		if id == "" || f.closing() {
			continue
		}
		if operator.rng.IntN(2) == 0 {
			f.banHost(ctx, operator, h, id, away)
		} else if f.audit.placedOn(id) > 1 {
			f.evictHost(ctx, operator, h, id, away)
		}
	}
}

// pause waits for the duration d, or until fleet.closing returns true.
func (f *fleet) pause(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end) && !f.closing(); {
		time.Sleep(time.Second)
	}
}

// banHost bans the key of a host, and removes the ban after the duration away.
func (f *fleet) banHost(ctx context.Context, operator *tenantClient, h *host, id cloud.NodeID, away time.Duration) {
	if err, ok := operator.ask(ctx, "ban "+string(h.name), func(ctx context.Context, p *process, _ [32]byte) error {
		_, err := p.nodes.Ban(ctx, id, "", "")
		return err
	}); err == nil && ok {
		f.count("hosts banned")
	}
	f.pause(away)
	f.insist("unban "+string(h.name), func() error {
		err := operator.call(ctx, "", func(ctx context.Context, p *process) error { return p.nodes.Unban(ctx, id, "") })
		if fault.Is(err, fault.NotFound) {
			return nil
		}
		return err
	})
	h.boot()
	f.uncordon(ctx, operator, h, id)
}

// evictHost evicts a host that has VMs. After the duration away the host joins again with a new token. Its key is the
// same, so it gets the same ID.
//
// evictHost does not retry. If the last VM of the host was deleted before a second call, that call would delete the
// host's record. The simulation does not support this (see checkRemoval).
func (f *fleet) evictHost(ctx context.Context, operator *tenantClient, h *host, id cloud.NodeID, away time.Duration) {
	err := operator.call(ctx, "", func(ctx context.Context, p *process) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_, err := p.nodes.Evict(ctx, id, true)
		return err
	})
	f.trace.Add("evict %s: %v", h.name, err)
	if err == nil {
		f.count("hosts evicted")
	}
	f.pause(away)
	h.stopAgent()
	var token string
	f.insist("make a join token for "+string(h.name), func() error {
		return operator.call(ctx, "", func(ctx context.Context, p *process) (err error) {
			token, _, err = p.nodes.NewToken(ctx, string(h.name), 0)
			return err
		})
	})
	h.rejoin(token)
	f.uncordon(ctx, operator, h, id)
}

// uncordon lets a host that was evicted or banned have VMs again.
func (f *fleet) uncordon(ctx context.Context, operator *tenantClient, h *host, id cloud.NodeID) {
	f.insist("uncordon "+string(h.name), func() error {
		return operator.call(ctx, "", func(ctx context.Context, p *process) error {
			_, err := p.nodes.Cordon(ctx, id, false)
			return err
		})
	})
}

// insist calls try until it succeeds. It reports a violation if that takes more than ten minutes, which is longer than
// all faults.
func (f *fleet) insist(what string, try func() error) {
	if err := within(10*time.Minute, func() error {
		if f.failed() {
			return nil
		}
		return try()
	}); err != nil {
		f.fail("%s: %v", what, err)
	}
}

// rejoin starts an agent that joins the cluster with a new token. It ends an agent that was started meanwhile, because
// that agent may use the old certificate.
func (h *host) rejoin(token string) {
	h.mu.Lock()
	h.token, h.leaf = token, nil
	h.mu.Unlock()
	h.stopAgent()
	h.boot()
}

// identity returns the join token of the host and whether the host has a certificate.
func (h *host) identity() (token string, certified bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.token, h.leaf != nil
}

// exclusion returns the reason of err if it says that the host was evicted or banned, and "" otherwise.
func exclusion(err error) string {
	if f, ok := fault.From(err); ok && (f.Reason == node.ReasonEvicted || f.Reason == node.ReasonBanned) {
		return f.Reason
	}
	return ""
}

// bannedRetry is the interval at which a banned host contacts a member.
const bannedRetry = time.Minute

// excluded ends the agent of a host that was evicted or banned, so that it changes no VMs. An evicted host waits for a
// new token. A banned one tries again after bannedRetry.
func (a *agent) excluded(why string) {
	a.host.f.count("agents that were excluded")
	a.host.f.behind.Go(func() { a.host.endAgent(a) })
	if why == node.ReasonBanned {
		time.AfterFunc(bannedRetry, a.host.boot)
	}
}

// placedOn returns the number of VMs that are placed on a host and are not deleted.
func (a *witness) placedOn(id cloud.NodeID) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.placed[id] {
		if !p.Gone {
			n++
		}
	}
	return n
}

// checkRemoval ends the simulation without a violation if the record of a host is deleted in the events of a revision.
// It returns true in that case. This happens rarely: the last VMs of the host were deleted between the decision of the
// operator and the eviction.
func (a *witness) checkRemoval(events []watch.Event) bool {
	for _, e := range events {
		if e.Type == watch.EventDelete && len(e.KV.Key) > 5 && string(e.KV.Key[:5]) == "node/" {
			a.f.count("runs that ended with the removal of a host")
			a.f.abandon()
			return true
		}
	}
	return false
}

// abandon ends the simulation. Later violations are not recorded.
func (f *fleet) abandon() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.abandoned = true
}

// checkLeases checks that no VM that must not run without a lease has had a process for more than leaseGrace after the
// end of its host's lease.
func (a *witness) checkLeases() error {
	now := time.Now()
	for node := range a.nodes {
		h := a.f.hostOf(node)
		if h == nil {
			continue // the response to its Join has not arrived
		}
		for _, id := range h.unleased(now) {
			since, known := a.unleased[runner{h, id}]
			if !known {
				a.unleased[runner{h, id}] = now
			} else if now.Sub(since) > leaseGrace {
				return fmt.Errorf("VM %s has run on %s for %s without a lease", id, h.name, now.Sub(since))
			}
		}
	}
	for r := range a.unleased {
		if !r.host.runsUnleased(r.vm, now) {
			delete(a.unleased, r)
		}
	}
	return nil
}
