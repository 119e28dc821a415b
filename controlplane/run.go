package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/controlplane/money/billing"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/controlplane/records/diskspace"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/transport"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// member is one member of the control plane. The builders that run lists fill the fields from the bottom layer up: each
// builder uses only what the builders before it have set, and registers with onStop how its part is stopped.
type member struct {
	config config.Config
	log    *slog.Logger
	disk   *supervisor
	// opened, if set, is called with every listener that was opened.
	opened func(boundListener)
	// stops holds the functions that onStop registered, stopErr the error of transferring the leadership.
	stops   []func()
	stopErr error

	// Set by claimDataDir.
	key         *clusterkey.Key
	authority   *mtls.Authority
	joins       bool // the member joins a cluster, or did when its data directory was new
	clock       *clock.Clock
	certificate mtls.Source
	tenantTLS   *tenantTLS
	metrics     *metrics

	// Set by openState.
	engines   map[uint64]*mvcc.Engine
	machines  map[uint64]*store.StateMachine
	leaseFeed *kv.LeaseFeed
	files     *image.Files

	// Set by startConsensus.
	mesh   *transport.Transport
	space  *diskspace.Monitor
	host   *consensus.Host
	runner *consensus.Runner
	system *store.Group
	kvLead *store.Group

	// Set by openRecords.
	budgets     *budget.Budget
	records     *store.Store
	commands    *leader.Commands
	memberships *membership.Service

	// Set by the builders of the services.
	audits     *audit.Service
	identities *identity.Service
	images     *image.Service
	nodes      *node.Service
	vms        *vm.Service
	credits    *credit.Service
	bills      *billing.Service
	joinTokens *jointoken.Service
	kvRaft     *kv.Raft
	keys       *kv.Service
	etcd       *etcdrpc.Server // on the port that all gRPC services share
	etcdPorts  *etcdrpc.Server // on the ports for etcd's clients
	backups    *backupWriter
	services   []service

	// Set by servePeers and serveClients.
	peers     *listenerSet
	listeners *listenerSet
}

// run runs a member until ctx ends or the member cannot continue. It stops what it started in reverse order before it
// returns. If the disk has failed it does not return; see supervisor. opened, if set, is called with every listener
// that was opened.
func run(ctx context.Context, c config.Config, disk *supervisor, opened func(boundListener)) (err error) {
	m := &member{config: c, log: newLog(c), disk: disk, opened: opened}
	defer func() { err = errors.Join(err, m.stop()) }()
	for _, build := range []func(context.Context) error{
		m.claimDataDir,   // the lock, the cluster key, this member's ID and certificates
		m.openState,      // a storage engine for each raft group, and the image files
		m.startConsensus, // the transport between members, and raft
		m.openRecords,    // the platform's records, leader commands, and the list of members
		m.newAccounts,
		m.newCompute,
		m.newKV,
		m.newCluster,
		m.listServices,
		m.servePeers,    // from here on the member takes part in raft
		m.serveClients,  // agents, tenants and operators
		m.runBackground, // leader tasks and the services' loops
	} {
		if err := build(ctx); err != nil {
			return err
		}
	}
	m.logStart()
	return m.wait(ctx)
}

// onStop registers f to be called when the member stops, before the functions that were registered earlier.
func (m *member) onStop(f func()) { m.stops = append(m.stops, f) }

// stop calls the registered functions, the last one first. It returns the error of transferring the leadership.
func (m *member) stop() error {
	for _, f := range slices.Backward(m.stops) {
		f()
	}
	return m.stopErr
}

// logStart logs the address of the member, and settings that are unsafe outside of tests.
func (m *member) logStart() {
	if m.config.Dev {
		m.log.Warn("DEV: every caller who can reach this address is the administrator of project default")
	}
	if m.config.KV.EtcdTrustLoopback {
		m.log.Error("INSECURE: kv.etcd_trust_loopback lets every process of this host change the members of the cluster", "addresses", m.config.KV.EtcdListen)
	}
	warnAboutPlaintext(m.config, m.log)
	m.log.Info("serving", "member", m.config.NodeID, "address", m.config.Listen, "cluster", m.authority.Cluster(), "version", version())
}

// wait returns nil when ctx ends, or the error because of which the member cannot continue.
func (m *member) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		m.log.Info("stopping")
		return nil
	case err := <-m.listeners.failed:
		return err
	case err := <-m.peers.failed:
		return err
	case <-m.runner.Done():
		return m.runner.Err()
	}
}

// newLog returns the logger of the process. It writes JSON under systemd unless the configuration names a format.
func newLog(c config.Config) *slog.Logger {
	json := c.LogFormat == "json" || c.LogFormat == "auto" && os.Getenv("JOURNAL_STREAM") != ""
	if json {
		return slog.New(slog.NewJSONHandler(os.Stderr, nil))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}
