package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"sync/atomic"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/cluster/operator"
	"github.com/trivet-cloud/trivet/controlplane/compute/console"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/instancetype"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/snapshot"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/controlplane/money/billing"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/controlplane/records/diskspace"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/transport"
	"github.com/trivet-cloud/trivet/shared/mtls"
	"github.com/trivet-cloud/trivet/shared/version"
)

// member is one member of the control plane. Its fields are set by the builders, the functions that run lists. Each
// builder uses only what earlier builders have set, and calls onStop with the function that stops its part.
type member struct {
	config config.Config
	log    *slog.Logger
	disk   *supervisor
	// opened, if set, is called with each listener after it was opened. Tests use it to learn the addresses.
	opened func(boundListener)
	// stops holds the functions that were passed to onStop. stopErr is the error of the attempt to transfer the
	// leadership when the member stopped.
	stops   []func()
	stopErr error

	// Fields that claimDataDir sets:
	key         *clusterkey.Key
	authority   *mtls.Authority
	joins       bool // whether the member joins, or at its first start joined, an existing cluster
	clock       *clock.Clock
	certificate mtls.Source
	tenantTLS   *tenantTLS
	metrics     *metrics

	// Fields that openState sets:
	engines   map[uint64]*mvcc.Engine
	machines  map[uint64]*store.StateMachine
	leaseFeed *kv.LeaseFeed
	files     *image.Files

	// Fields that startConsensus sets:
	mesh   *transport.Transport
	space  *diskspace.Monitor
	host   *consensus.Host
	runner *consensus.Runner
	system *store.Group
	kvLead *store.Group

	// Fields that openRecords sets:
	budgets     *budget.Budget
	records     *store.Store
	commands    *leader.Commands
	memberships *membership.Service

	// Fields that the builders of the services set:
	audits         *audit.Service
	audited        atomic.Uint64 // the audit records of successful changes that this member has committed
	identities     *identity.Service
	images         *image.Service
	nodes          *node.Service
	vms            *vm.Service
	consoles       *console.Service
	volumes        *volume.Service
	snapshots      *snapshot.Service
	storageClasses *storageclass.Service
	instanceTypes  *instancetype.Service
	credits        *credit.Service
	bills          *billing.Service
	networks       *network.Service
	networkFeed    *network.Feed
	joinTokens     *jointoken.Service
	operators      *operator.Service
	kvRaft         *kv.Raft
	keys           *kv.Service
	etcd           *etcdrpc.Server // serves etcd's API on the port that all gRPC services share
	etcdPorts      *etcdrpc.Server // serves etcd's API on the ports for etcd's clients
	backups        *backupWriter
	services       []service

	// Field that serveClients sets:
	streams *rpc.Streams // counts the open streams of tenants in gRPC and REST

	// Fields that servePeers and serveClients set:
	peers     *listenerSet
	listeners *listenerSet
}

// run runs a member until ctx ends or the member cannot continue. Before it returns, it stops what it has started, in
// reverse order. If the disk has failed, run never returns; the supervisor ends the process. If opened is not nil, run
// calls it with each listener after opening the listener.
func run(ctx context.Context, c config.Config, disk *supervisor, opened func(boundListener)) (err error) {
	m := &member{config: c, log: newLog(c), disk: disk, opened: opened}
	defer func() { err = errors.Join(err, m.stop()) }()
	for _, build := range []func(context.Context) error{
		m.claimDataDir,   // locks the data directory; loads the cluster key, this member's ID and certificates
		m.openState,      // opens a storage engine for each raft group, and the image files
		m.startConsensus, // starts the transport between members, and raft
		m.openRecords,    // opens the platform's records, leader commands, and the list of members
		m.newAccounts,
		m.newNetwork,
		m.newCompute,
		m.newKV,
		m.newCluster,
		m.listServices,
		m.servePeers,    // from now on the member takes part in raft
		m.serveClients,  // opens the ports for agents, tenants and operators
		m.runBackground, // starts the tasks of the leader and the services' loops
	} {
		if err := build(ctx); err != nil {
			return err
		}
	}
	m.logStart()
	return m.wait(ctx)
}

// onStop registers a function that is called when the member stops. Functions are called in the reverse order of their
// registration.
func (m *member) onStop(f func()) { m.stops = append(m.stops, f) }

// stop calls the functions that were passed to onStop, the last one first. It returns m.stopErr.
func (m *member) stop() error {
	for _, f := range slices.Backward(m.stops) {
		f()
	}
	return m.stopErr
}

// logStart logs the address of the member and the settings that are unsafe outside of tests.
func (m *member) logStart() {
	if m.config.Dev {
		m.log.Warn("DEV: every caller who can reach this address is the administrator of project default")
	}
	if m.config.KV.EtcdTrustLoopback {
		m.log.Error("INSECURE: kv.etcd_trust_loopback lets every process of this host change the members of the cluster", "addresses", m.config.KV.EtcdListen)
	}
	warnAboutPlaintext(m.config, m.log)
	m.log.Info("serving", "member", m.config.NodeID, "address", m.config.Listen, "cluster", m.authority.Cluster(), "version", version.Version())
}

// wait blocks until the member has to stop. If ctx ends, it returns nil. If the member cannot continue, it returns the
// reason as an error.
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

// newLog returns the logger of the process. It writes JSON if the configuration requires it, or by default under
// systemd.
func newLog(c config.Config) *slog.Logger {
	json := c.LogFormat == "json" || c.LogFormat == "auto" && os.Getenv("JOURNAL_STREAM") != ""
	if json {
		return slog.New(slog.NewJSONHandler(os.Stderr, nil))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}
