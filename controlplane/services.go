package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/cluster/operator"
	"github.com/trivet-cloud/trivet/controlplane/compute/console"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/image/websource"
	"github.com/trivet-cloud/trivet/controlplane/compute/instancetype"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/snapshot"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/controlplane/money/billing"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/version"
)

// service lists what one service adds to the servers and to the background work of a member. All fields are optional.
type service struct {
	// rpc registers the service's methods on the gRPC port that all services share.
	rpc func(grpc.ServiceRegistrar)
	// agentRPC registers the service's methods for agents of hosts and for joining members, on the port for agents.
	agentRPC func(grpc.ServiceRegistrar)
	// rest describes the service's REST API, which has its own port.
	rest *restAPI
	// tasks run only on the leader, each in its own loop.
	tasks []leader.Task
	// run lists functions that run on every member until their context ends.
	run []func(context.Context)
}

// restAPI is a REST API that is served on its own port.
type restAPI struct {
	// name is the name of the listener, and the name of the API in metrics and logs.
	name string
	port uint16
	// options holds the settings that differ between the REST APIs. newREST sets the other fields of rest.Options.
	options rest.Options
	routes  func(*rest.Server)
	// metrics is true for the API whose port also serves /metrics to callers on loopback.
	metrics bool
}

// listServices lists the services of a member. To add a service, create it in one of the builders below (newAccounts
// and so on) and list it here. The listeners of REST APIs are opened in this order.
func (m *member) listServices(context.Context) error {
	ports := m.config.Ports
	tenantREST := func(s fault.Service) rest.Options {
		return rest.Options{Service: s, Verifier: m.identities, Audit: m.audits}
	}
	m.services = []service{
		{ // cleanup of the platform's records
			tasks: []leader.Task{
				{Name: "forget answers", Every: time.Minute, Run: pruneAnswers(m.records)},
				{Name: "compact", Every: compactEvery, Run: m.newCompactor().compact},
			},
		},
		{ // the members of the cluster
			tasks: []leader.Task{{Name: "reconcile members", Every: membership.ReconcileEvery, Run: m.memberships.Run}},
			run:   []func(context.Context){m.memberships.ResolveUnknownMembers, m.fatal(m.followMembers), m.fatal(m.joinCluster)},
		},
		{ // users, orgs, projects and tokens
			rpc: m.identities.Register,
			rest: &restAPI{
				name: "identity", port: ports.Identity, options: rest.Options{Service: fault.Identity, Verifier: m.identities, Audit: m.audits, Hosts: m.config.CredentialFreeHosts()},
				routes: func(s *rest.Server) { m.identities.Routes(s, slices.Contains(m.config.REST.Open, "identity")) },
			},
			tasks: []leader.Task{
				{Name: "bootstrap", Every: time.Minute, Run: m.identities.Bootstrap},
				{Name: "tend keys", Every: time.Minute, Run: m.identities.Tend},
			},
		},
		{ // the audit
			tasks: []leader.Task{{Name: "prune the audit", Every: audit.PruneEvery, Run: m.audits.Prune}},
			run:   []func(context.Context){m.audits.Run},
		},
		{ // IDs of deleted projects
			tasks: []leader.Task{{Name: "free IDs of deleted projects", Every: time.Hour, Run: m.pruneDeletedProjects}},
		},
		{ // credit of projects
			rpc:   m.credits.Register,
			rest:  &restAPI{name: "credit", port: ports.Credit, options: tenantREST(fault.Credit), routes: m.credits.Routes},
			tasks: []leader.Task{{Name: "expire reservations", Every: credit.SweepEvery, Run: m.credits.Sweep}},
		},
		{ // charging of projects for their VMs and volumes
			tasks: []leader.Task{{Name: "bill", Every: m.bills.Every(), Run: m.bills.Run}},
		},
		{ // disk images
			rpc:   m.images.Register,
			tasks: []leader.Task{{Name: "settle images", Every: image.SettleEvery, Run: m.images.Settle}},
			run:   []func(context.Context){m.images.Run},
		},
		{ // hosts, and tokens with which they join
			rpc: m.nodes.Register, agentRPC: m.nodes.RegisterAgents,
			tasks: []leader.Task{
				{Name: "follow nodes", Every: time.Second, Run: m.nodes.Follow},
				{Name: "expire join tokens", Every: 10 * time.Minute, Run: m.nodes.Expire},
			},
			run: []func(context.Context){m.nodes.Guard},
		},
		{ // virtual machines
			rpc:  m.vms.Register,
			rest: &restAPI{name: "vm", port: ports.VM, options: tenantREST(fault.VM), routes: m.computeRoutes, metrics: true},
			tasks: []leader.Task{
				{Name: "follow vms", Every: time.Second, Run: m.vms.Follow},
				{Name: "settle vms", Every: vm.SettleEvery, Run: m.vms.Settle},
				{Name: "recover vms of lost hosts", Every: vm.RecoverEvery, Run: m.vms.Recover},
				{Name: "step live migrations", Every: vm.MigrateEvery, Run: m.vms.StepMigrations},
				{Name: "drain hosts", Every: vm.DrainEvery, Run: m.vms.StepDrains},
			},
		},
		{rpc: m.instanceTypes.Register}, // its REST API is on the listener for VMs
		{ // consoles of VMs; their REST API is on the listener for VMs
			rpc:   m.consoles.Register,
			tasks: []leader.Task{{Name: "expire console tickets", Every: console.ExpireEvery, Run: m.consoles.Expire}},
			run:   []func(context.Context){m.consoles.Run},
		},
		{ // volumes, snapshots and storage classes; their REST API is on the listener for VMs
			rpc: func(g grpc.ServiceRegistrar) {
				m.volumes.Register(g)
				m.storageClasses.Register(g)
				m.snapshots.Register(g)
			},
			tasks: []leader.Task{
				{Name: "create the first storage class", Every: time.Minute, Run: m.storageClasses.Bootstrap},
				{Name: "place volumes", Every: volume.PlaceEvery, Run: m.placeVolumes},
				{Name: "apply changes of storage classes", Every: volume.ApplyClassesEvery, Run: m.volumes.ApplyClasses},
				{Name: "create scheduled snapshots", Every: snapshot.ScheduleEvery, Run: m.snapshots.RunSchedules},
			},
		},
		{ // networks
			rpc:  m.networks.Register,
			rest: &restAPI{name: "network", port: ports.Network, options: tenantREST(fault.Network), routes: m.networks.Routes},
			tasks: []leader.Task{
				{Name: "free rested addresses", Every: network.FreeEvery, Run: m.networks.FreeRested},
				{Name: "follow networks", Every: time.Second, Run: m.networkFeed.Follow},
				{Name: "rotate encryption keys", Every: network.RotateEvery, Run: m.networkFeed.RotateKeys},
				{Name: "assign NAT gateways", Every: network.AssignEvery, Run: m.assignGateways},
			},
		},
		{ // the key-value store, whose REST API has its own server
			rpc: m.etcd.Register,
			run: []func(context.Context){m.keys.Run, m.etcd.Run, m.etcdPorts.Run},
		},
		{ // join tokens for members
			agentRPC: m.joinTokens.Register,
			tasks:    []leader.Task{{Name: "expire invitations", Every: 10 * time.Minute, Run: m.joinTokens.Expire}},
		},
		{rpc: m.operators.Register}, // its REST API is on the listener for VMs
	}
	return nil
}

// newAccounts creates the audit and identity services.
func (m *member) newAccounts(context.Context) error {
	m.audits = audit.New(audit.Options{
		Store: m.records, Commands: m.commands, Log: m.log.With("service", "audit"), Audited: &m.audited,
	})
	m.identities = identity.New(identity.Options{
		Store: m.records, Commands: m.commands, Key: m.key, Log: m.log, Audit: m.audits, Issuer: m.config.IssuerURL(), Providers: m.config.Identity.Providers,
		Holds:  []func(store.Reader, cloud.Tenant) error{vm.CheckNoVMs, volume.CheckNoVolumes, image.CheckNoImages, network.CheckNone, credit.Holds(walletProject)},
		Forget: []func(*store.Tx, cloud.Tenant) error{network.ForgetProject},
		Vacant: []func(store.Reader, cloud.ProjectID) error{credit.Vacant}, Dev: m.config.Dev, Skew: m.clock.Skew,
	})
	return nil
}

// newNetwork creates the network service, and the feed that sends hosts the state of their VPCs.
func (m *member) newNetwork(context.Context) error {
	m.networks = network.New(network.Options{Store: m.records, Commands: m.commands, Log: m.log.With("service", "network")})
	m.networkFeed = network.NewFeed(network.FeedOptions{
		Store: m.records, Listeners: m.memberships.Listeners(m.config.Ports.Agents), Metrics: m.metrics.registry,
		Key: m.key.DeriveForGeneration("underlay-encryption"),
	})
	return nil
}

// newCompute creates the services for images, hosts and VMs. It also creates those for credit and billing, because VMs
// and billing depend on each other.
func (m *member) newCompute(context.Context) error {
	var web *websource.Client
	if https := &m.config.Images.HTTPS; !https.Disabled {
		allow, err := https.Prefixes()
		if err != nil {
			return err
		}
		web = image.NewWeb(allow)
	}
	m.images = image.New(image.Options{
		Store: m.records, Commands: m.commands, Files: m.files, Self: m.config.NodeID, Members: m.memberships.IDs, Peers: m.mesh,
		ImportDirs: importDirs(m.config), Web: web, Snapshots: snapshotSource{m}, Log: m.log,
	})
	m.nodes = node.New(node.Options{
		Store: m.records, Commands: m.commands, Leadership: m.system, Self: m.config.NodeID, Listeners: m.memberships.Listeners(m.config.Ports.Agents),
		Authority: m.authority, Log: m.log, Now: m.clock.Now, Steady: m.clock.Steady,
	})
	m.credits = credit.New(credit.Options{
		Store: m.records, Commands: m.commands, Log: m.log.With("service", "credit"), Project: walletProject, Metrics: m.metrics.registry,
	})
	m.bills = newBilling(m.config.Billing, m.records, m.credits, m.log)
	m.instanceTypes = instancetype.New(m.records, m.commands)
	m.storageClasses = storageclass.New(m.records, m.commands, m.key)
	volumes := volume.Options{Store: m.records, Commands: m.commands, Key: m.key, Log: m.log.With("service", "volume")}
	if m.config.Billing.Enabled {
		volumes.Billing = m.bills
	}
	m.volumes = volume.New(volumes)
	options := vm.Options{Store: m.records, Commands: m.commands, Nodes: m.nodes, Volumes: m.volumes, Log: m.log}
	if m.config.Billing.Enabled {
		options.Billing = m.bills
	}
	m.vms = vm.New(options)
	m.consoles = console.New(console.Options{
		Store: m.records, Commands: m.commands, VMs: m.vms, Hosts: m.nodes, Verifier: m.identities,
		OpenStream: m.streamOpener(m.identities), Audit: m.audits, Log: m.log,
	})
	m.bills.Attach(m.vms)
	m.metrics.registry.MustRegister(
		volume.NewCollector(m.records), image.NewCollector(m.records), vm.NewCapacityCollector(m.vms),
	)
	m.metrics.names.MustRegister(
		vm.NewInventoryCollector(m.vms), vm.NewDrainCollector(m.vms), tenant.NewQuotaCollector(m.records, m.nodes.Leads),
		credit.NewWalletCollector(m.records, m.nodes.Leads), billing.NewUnpaidCollector(m.bills, m.nodes.Leads),
	)
	m.snapshots = snapshot.New(m.records, m.commands, m.volumes, m.readSnapshot)
	m.nodes.Attach(m.vms, m.files)
	m.nodes.AttachVolumes(m.volumes)
	m.nodes.AttachNetworks(m.networkFeed)
	return nil
}

// computeRoutes registers the REST APIs of VMs, images, volumes, snapshots, storage classes, instance types, hosts and
// operators, which share a listener.
func (m *member) computeRoutes(s *rest.Server) {
	m.vms.Routes(s)
	m.consoles.Routes(s)
	m.images.Routes(s)
	m.volumes.Routes(s)
	m.snapshots.Routes(s)
	m.storageClasses.Routes(s)
	m.instanceTypes.Routes(s)
	m.nodes.Routes(s)
	m.operators.Routes(s)
}

// assignGateways chooses the hosts of NAT gateways according to the state of all hosts.
func (m *member) assignGateways(ctx context.Context) error {
	var states []network.HostState
	for _, c := range m.nodes.Fleet() {
		states = append(states, network.HostState{ID: c.Node.ID, State: c.State, Unresponsive: m.nodes.Unresponsive(c.Node.ID)})
	}
	return m.networkFeed.AssignGateways(ctx, states)
}

// placeVolumes calls volume.Service.Place with the records and states of all hosts.
func (m *member) placeVolumes(ctx context.Context) error {
	var fleet []volume.HostState
	for _, c := range m.nodes.Fleet() {
		fleet = append(fleet, volume.HostState{
			Node: c.Node, Ready: c.State == cloud.NodeReady,
			Awaited: c.State == cloud.NodeNotReady && c.Node.Declared != cloud.NodeNotReady && !m.nodes.Unresponsive(c.Node.ID),
		})
	}
	return m.volumes.Place(ctx, fleet)
}

// newBilling creates the service that charges projects for their VMs and volumes. It charges nothing unless billing is
// enabled.
func newBilling(b config.Billing, records *store.Store, credits *credit.Service, log *slog.Logger) *billing.Service {
	log = log.With("service", "billing")
	if b.Enabled && b.TestHour != 0 {
		log.Warn("TEST: an hour is charged for every "+b.TestHour.String(), "setting", "billing.test_hour")
	}
	return billing.New(billing.Options{Store: records, Credits: credits, Log: log, Rules: b.Rules()})
}

// newKV creates the key-value store and the two servers of etcd's API: one for the port that all services share, and
// one for the ports for etcd's clients.
func (m *member) newKV(context.Context) error {
	c := &m.config
	m.kvRaft = kv.NewRaft(m.runner, layout.KVGroup, c.NodeID, m.kvLead)
	m.keys = kv.New(kv.Options{
		Engine: m.engines[layout.KVGroup], Consensus: m.kvRaft, Leases: m.leaseFeed, Transport: m.mesh,
		Tokens: users.NewTokens(m.key.Derive("kv-tokens"), c.KV.TokenTTL), Self: c.NodeID, Cluster: m.key.ClusterID(),
		Transfer: func(ctx context.Context, to uint64) error { return m.memberships.Transfer(ctx, to, layout.KVGroup) },
		Members:  m.snapshotMembers, Election: electionTicks * c.Tick, Quota: c.KV.Quota, Full: m.space.Full,
		CompactAge: c.KV.CompactAge, CorruptCheck: cmp.Or(c.KV.CorruptCheck, -1), BcryptCost: c.KV.BcryptCost,
		Log: m.log.With("service", "kv"), Now: m.clock.Now,
		Limits: kv.Limits{RequestBytes: c.KV.MaxRequestBytes, TxnOps: c.KV.MaxTxnOps, Progress: c.KV.WatchProgress},
	})
	options := etcdrpc.Options{
		Service: m.keys, Members: m.memberships, Verifier: m.identities, Open: c.KV.Open, CommonName: c.KV.EtcdClientCA != "", Dir: c.DataDir,
		Log: m.log.With("service", "kv"), StrictReconfig: c.KV.StrictReconfig, Audit: m.audits,
	}
	m.etcd = etcdrpc.New(options)
	options.TrustLoopback, options.CountWith = c.KV.EtcdTrustLoopback, m.etcd
	m.etcdPorts = etcdrpc.New(options)
	return nil
}

// newCluster creates the services for operators: join tokens for members, backups, and operator.v1.
func (m *member) newCluster(context.Context) error {
	m.joinTokens = jointoken.New(jointoken.Options{Store: m.records, Commands: m.commands, Key: m.key, Log: m.log})
	m.backups = newBackupWriter(m.config, m.key, m.engines, m.runner, m.log)
	m.operators = operator.New(operator.Options{
		Version: version.Version(), Versions: m.versions, Cluster: m.authority.Cluster(), Members: m.memberships, Runner: m.runner, Commands: m.commands,
		Groups: operatorGroups(m.engines), ElectionTicks: electionTicks, Nodes: m.nodes, Invites: m.joinTokens, VMs: m.vms,
		Disks: m.space.Members, Backup: m.backups.write,
	})
	return nil
}

// operatorGroups returns the name and a function for the revision of each raft group, by group ID, as package operator
// requires them.
func operatorGroups(engines map[uint64]*mvcc.Engine) map[uint64]operator.Group {
	out := map[uint64]operator.Group{}
	for _, g := range layout.Groups() {
		out[g.ID] = operator.Group{Name: g.Name, Revision: engines[g.ID].Revision}
	}
	return out
}

// followMembers connects to members that are added to the cluster, and disconnects from those that are removed. It
// returns when ctx ends or on an error.
func (m *member) followMembers(ctx context.Context) error {
	if err := m.memberships.Follow(ctx); err != nil {
		return fmt.Errorf("follow the members: %w", err)
	}
	return nil
}

// pruneDeletedProjects makes the IDs of deleted projects available for new projects some time after the deletion.
func (m *member) pruneDeletedProjects(ctx context.Context) error {
	return tenant.PruneDeleted(ctx, m.records)
}

// snapshotMembers returns the members of the cluster as they are written into etcd snapshot files.
func (m *member) snapshotMembers(ctx context.Context) ([]snapfile.Member, error) {
	all, err := m.memberships.List(ctx, true)
	if err != nil {
		return nil, err
	}
	out := make([]snapfile.Member, 0, len(all))
	for _, m := range all {
		if m.Proven() {
			out = append(out, snapfile.Member{
				ID: m.ID, Name: m.Name, PeerURLs: []string{m.RaftAddr}, ClientURLs: m.ClientURLs, Learner: !m.Votes(),
			})
		}
	}
	return out, nil
}

// importDirs returns the directories from which images may be imported. If none are configured, it creates the default
// one.
func importDirs(c config.Config) []image.ImportDir {
	if len(c.Images.ImportDirs) > 0 {
		return c.Images.ImportDirs
	}
	dir := filepath.Join(c.DataDir, layout.ImportDir)
	os.MkdirAll(dir, 0o700)
	return []image.ImportDir{{Path: dir}}
}

// walletProject returns the project with the given ID as package credit needs it. It reads the records of package
// tenant and implements credit.Lookup.
func walletProject(r store.Reader, id cloud.ProjectID) (credit.Project, error) {
	p, err := tenant.Projects.Get(r, string(id))
	if err != nil || p == nil {
		return credit.Project{}, err
	}
	return credit.Project{Exists: p.DeletedAt == 0, Org: p.Org, Incarnation: p.Incarnation}, nil
}
