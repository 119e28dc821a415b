package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// forgetAnswers removes the remembered answers that are over, a few at a time.
func forgetAnswers(s *store.Store) func(context.Context) error {
	return func(ctx context.Context) error {
		for more := true; more; {
			if _, err := s.Update(ctx, func(tx *store.Tx) (err error) {
				more, err = store.ForgetAnswers(tx, 100)
				return err
			}); err != nil {
				return err
			}
		}
		return nil
	}
}

// scrub removes what compaction has made unreadable, in small steps.
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

const (
	adminTokenLife  = 30 * 24 * time.Hour
	adminTokenRenew = 24 * time.Hour
)

// keepAdminToken keeps a token of the administrator in the data directory, for whoever may read that. valid says whether
// one still is: a change of the administrator's password ends all that are older.
func keepAdminToken(ctx context.Context, key *clusterkey.Key, dir string, valid func(context.Context, string) error, now func() time.Time, log *slog.Logger) {
	path := filepath.Join(dir, "admin.token")
	for {
		if err := renewAdminToken(ctx, key, path, valid, now()); err != nil {
			log.Error("admin token", "err", err)
		}
		select {
		case <-time.After(time.Minute):
		case <-ctx.Done():
			return
		}
	}
}

// renewAdminToken writes a new token unless the one that is there is valid and has more than a day to live. Its age is
// the file's. When nobody can tell, for want of a leader, it stays.
func renewAdminToken(ctx context.Context, key *clusterkey.Key, path string, valid func(context.Context, string) error, now time.Time) error {
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read admin token: %w", err)
	}
	if info, err := os.Stat(path); err == nil && len(old) > 0 && now.Sub(info.ModTime()) < adminTokenLife-adminTokenRenew {
		ask, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		if err := valid(ask, strings.TrimSpace(string(old))); !fault.Is(err, fault.Unauthenticated) {
			return nil
		}
	}
	token, err := identity.HostToken(key, cloud.Tenant{}, now, adminTokenLife)
	if err != nil {
		return err
	}
	fresh := path + ".new"
	if err := os.WriteFile(fresh, []byte(token+"\n"), 0o600); err != nil {
		return fmt.Errorf("write admin token: %w", err)
	}
	return os.Rename(fresh, path)
}

// collector shows consensus and the engines to Prometheus.
type collector struct {
	runner  *consensus.Runner
	engines map[uint64]*mvcc.Engine
	names   map[uint64]string
}

var gauges = []struct {
	desc  *prometheus.Desc
	group func(consensus.GroupStatus) float64
	state func(mvcc.Stats) float64
}{
	{desc: gauge("raft_term", "Term of the group."), group: func(g consensus.GroupStatus) float64 { return float64(g.Term) }},
	{desc: gauge("raft_leader", "Member that leads the group, 0 if none is known."), group: func(g consensus.GroupStatus) float64 { return float64(g.Leader) }},
	{desc: gauge("raft_committed_index", "Last committed entry."), group: func(g consensus.GroupStatus) float64 { return float64(g.Commit) }},
	{desc: gauge("raft_applied_index", "Last applied entry."), group: func(g consensus.GroupStatus) float64 { return float64(g.Applied) }},
	{desc: gauge("raft_proposals_waiting", "Proposals under way on this member."), group: func(g consensus.GroupStatus) float64 { return float64(g.Proposals) }},
	{desc: gauge("raft_log_bytes", "Size of the group's log."), group: func(g consensus.GroupStatus) float64 { return float64(g.LogBytes) }},
	{desc: gauge("store_revision", "Newest revision."), state: func(s mvcc.Stats) float64 { return float64(s.Revision) }},
	{desc: gauge("store_compacted_revision", "Oldest revision that can be read."), state: func(s mvcc.Stats) float64 { return float64(s.CompactRevision) }},
	{desc: gauge("store_keys", "Live keys."), state: func(s mvcc.Stats) float64 { return float64(s.Keys) }},
	{desc: gauge("store_disk_bytes", "Size on disk."), state: func(s mvcc.Stats) float64 { return float64(s.DiskBytes) }},
	{desc: gauge("store_unsaved_bytes", "In memory only; the log has it."), state: func(s mvcc.Stats) float64 { return float64(s.UnsavedBytes) }},
	{desc: gauge("store_watchers", "Watchers."), state: func(s mvcc.Stats) float64 { return float64(s.Watchers) }},
	{desc: gauge("store_disk_errors", "Failed background writes since start."), state: func(s mvcc.Stats) float64 { return float64(s.DiskErrors) }},
}

func gauge(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("trivet_"+name, help, []string{"group"}, nil)
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(out chan<- *prometheus.Desc) {
	for _, g := range gauges {
		out <- g.desc
	}
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(out chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	status, err := c.runner.Status(ctx)
	for _, g := range gauges {
		if g.group != nil && err == nil {
			for _, s := range status.Groups {
				out <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.group(s), c.names[s.ID])
			}
		}
		if g.state != nil {
			for id, e := range c.engines {
				out <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.state(e.Stats()), c.names[id])
			}
		}
	}
}
