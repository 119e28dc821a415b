package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/datadir"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/controlplane/records/diskspace"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/transport"
)

// electionTicks is the number of ticks without a message from the leader after which a member may start an election.
const electionTicks = 10

// lockWithin is how long the member waits for the lock of its data directory. A member that was killed keeps the lock
// until the last of its threads has ended.
const lockWithin = 10 * time.Second

// recordCacheBytes is the size of the cache for the values of the platform's records that were read most recently.
const recordCacheBytes = 16 << 20

// claimDataDir locks the data directory and loads from it what identifies this member: its ID, its cluster's key and
// its certificates.
func (m *member) claimDataDir(ctx context.Context) error {
	c := &m.config
	unlock, err := datadir.Lock(c.DataDir, lockWithin)
	if err != nil {
		return err
	}
	m.onStop(unlock)
	if m.key, err = clusterKey(ctx, *c, m.log); err != nil {
		return err
	}
	if err := datadir.CheckCluster(c.DataDir, m.key); err != nil {
		return err
	}
	if m.authority, err = m.key.Authority(); err != nil {
		return err
	}
	if c.NodeID, m.joins, err = resolveMemberID(ctx, *c, m.authority, m.log); err != nil {
		return err
	}
	m.disk.setMember(c.NodeID, nil)
	m.clock = clock.New(clock.Options{Log: m.log})
	m.certificate = memberCertificate(m.authority, c.NodeID, m.clock.Now, m.log)
	if m.tenantTLS, err = openTLS(*c, m.certificate, m.authority, m.log); err != nil {
		return err
	}
	m.metrics = newMetrics()
	return nil
}

// openState opens the storage engine of each raft group, and the directory with the image files.
func (m *member) openState(context.Context) (err error) {
	m.engines, m.machines, m.leaseFeed = map[uint64]*mvcc.Engine{}, map[uint64]*store.StateMachine{}, &kv.LeaseFeed{}
	for _, g := range layout.Groups() {
		o := mvcc.Options{
			Logger: m.log.With("engine", g.Name), KeyIndex: true,
			OnCommit: func(took time.Duration) { m.metrics.disk.storeCommit.Observe(took.Seconds()) },
		}
		if g.ID == layout.KVGroup {
			o.OnLeases, o.HashOnCompact = m.leaseFeed.Changed, true
		} else {
			o.ValueCacheBytes = recordCacheBytes
		}
		engine, err := mvcc.Open(m.disk, filepath.Join(m.config.DataDir, g.Name), o)
		if err != nil {
			return err
		}
		m.onStop(func() { engine.Close() })
		// NoIDs turns off proposal IDs for the key-value store, because its writes are never proposed again under the
		// same ID. If the outcome of a write is unknown, the client gets an error that says so.
		machine := store.NewStateMachine(engine, store.StateMachineOptions{NoIDs: g.ID == layout.KVGroup})
		m.onStop(machine.Close)
		m.engines[g.ID], m.machines[g.ID] = engine, machine
	}
	m.files, err = image.OpenFiles(filepath.Join(m.config.DataDir, layout.ImagesDir))
	return err
}

// startConsensus starts raft for each group. Messages to and from other members are exchanged only after servePeers.
func (m *member) startConsensus(context.Context) (err error) {
	c := &m.config
	members, firstIDs := c.InitialMembers(), c.MemberIDs()
	if m.joins {
		members, firstIDs = config.Members{}, nil
	}
	// The two callbacks are called only after servePeers, when the fields that they use are set.
	if m.mesh, err = transport.New(transport.Options{
		Self: c.NodeID, Members: members.Addresses(c.Ports.Peers), Certificate: m.certificate, Authority: m.authority, Log: m.log, Now: m.clock.Now,
		UnknownMember: func(id uint64) { m.memberships.UnknownMember(id) }, Removed: func() { m.runner.Removed() },
	}); err != nil {
		return err
	}
	m.space = diskspace.New(diskspace.Options{Dir: c.DataDir, Self: c.NodeID, Reserve: c.Limits.DiskReserve, Log: m.log})
	m.space.Attach(m.mesh)
	m.mesh.HandleDirect(diskspace.Command, m.space.Answer)
	m.clock.Attach(m.mesh)
	m.mesh.HandleDirect(clock.Command, m.clock.Answer)
	m.mesh.HandleDirect(versionCommand, answerVersion)
	if m.host, err = consensus.Open(consensus.Options{
		ID: c.NodeID, Members: firstIDs, Join: m.joins, Dir: filepath.Join(c.DataDir, layout.RaftDir), Transport: m.mesh, Log: m.log,
		ElectionTicks: electionTicks, FS: m.disk,
		OnLogSync: func(took time.Duration) { m.metrics.disk.logSync.Observe(took.Seconds()) },
	}); err != nil {
		return err
	}
	for _, g := range layout.Groups() {
		o := consensus.GroupOptions{ID: g.ID, Name: g.Name, Machine: m.machines[g.ID], Forward: g.ID == layout.KVGroup}
		if _, err := m.host.AddGroup(o); err != nil {
			return errors.Join(fmt.Errorf("%w: %w", consensus.ErrDamaged, err), m.host.Close())
		}
	}
	m.runner = consensus.Start(m.host, consensus.RunnerOptions{TickInterval: c.Tick})
	m.disk.setMember(c.NodeID, m.runner)
	m.system = store.NewGroup(m.runner, layout.SystemGroup)
	m.onStop(m.system.Close)
	m.kvLead = store.NewGroup(m.runner, layout.KVGroup)
	m.onStop(m.kvLead.Close)
	return nil
}

// openRecords creates the store of the platform's records, the commands that run on the leader, and the list of
// members.
func (m *member) openRecords(context.Context) error {
	c := &m.config
	m.budgets = budget.New(c.Limits.Limits, m.clock.Elapsed)
	m.records = store.New(store.Options{
		Engine: m.engines[layout.SystemGroup], Proposer: m.system, PageKey: m.key.Derive("page-tokens"), Stamp: audit.Stamp, Audited: &m.audited, Spend: m.budgets.Spend,
		Now: m.clock.Now, Elapsed: m.clock.Elapsed,
	})
	m.commands = leader.NewCommands(c.NodeID, m.system, m.mesh)
	m.commands.SetGate(admissionGate(m.budgets, m.space))
	first := firstMembers(*c)
	if m.host.Joined() {
		first = nil
	}
	m.memberships = membership.New(membership.Options{
		Store: m.records, Commands: m.commands, Consensus: m.runner, Peers: m.mesh, Self: c.NodeID, First: first, Cluster: m.key.ClusterID(), Log: m.log,
		Groups: []membership.Group{
			{ID: layout.KVGroup, Name: layout.KVName, Leadership: m.kvLead},
			{ID: layout.SystemGroup, Name: layout.SystemName, Leadership: m.system},
		},
	})
	return nil
}

// admissionGate returns a leader.Gate that refuses commands of callers who exceed their rate limit, and tenants'
// changes while a member's disk is nearly full.
func admissionGate(budgets *budget.Budget, space *diskspace.Monitor) leader.Gate {
	return func(ctx context.Context) error {
		if err := space.Admit(ctx); err != nil {
			return err
		}
		return budgets.Admit(ctx)
	}
}
