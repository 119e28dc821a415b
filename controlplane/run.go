package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/cluster/operator"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/controlplane/kv/etcdrpc"
	"github.com/trivet-cloud/trivet/controlplane/kv/snapfile"
	"github.com/trivet-cloud/trivet/controlplane/kv/users"
	"github.com/trivet-cloud/trivet/controlplane/money/credit"
	"github.com/trivet-cloud/trivet/controlplane/records/budget"
	"github.com/trivet-cloud/trivet/controlplane/records/diskspace"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/transport"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// The raft groups: the platform's records, and users' keys.
const (
	systemGroup = 1
	kvGroup     = 2
)

// stopTime is how long handing the leadership over may take.
const stopTime = 3 * time.Second

// electionTicks without a word from the leader start an election.
const electionTicks = 10

// run is the member, from bottom to top, until ctx ends or it cannot go on. It may not return when the floor has failed.
// opened, when set, is told of each listener.
func run(ctx context.Context, c Config, floor *floor, opened func(door)) (err error) {
	log := newLog(c)
	unlock, err := lock(c.DataDir)
	if err != nil {
		return err
	}
	defer unlock()
	key, err := clusterKey(ctx, c, log)
	if err != nil {
		return err
	}
	if err := ofCluster(c.DataDir, key); err != nil {
		return err
	}
	authority, err := key.Authority()
	if err != nil {
		return err
	}
	var joins bool
	if c.NodeID, joins, err = whoAmI(ctx, c, authority, log); err != nil {
		return err
	}
	floor.holds(c.NodeID, nil)
	members := c.members()
	if joins {
		members = Members{}
	}
	clk := clock.New(clock.Options{Log: log})
	certificate := leaf(authority, c.NodeID, clk.Now)
	tenants, err := openTLS(c, certificate, authority, log)
	if err != nil {
		return err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	// State, and the agreement on it.
	engines := map[uint64]*mvcc.Engine{}
	machines := map[uint64]*store.Machine{}
	names := map[uint64]string{systemGroup: "system", kvGroup: "kv"}
	leaseFeed := &kv.LeaseFeed{}
	for id, name := range names {
		o := mvcc.Options{Logger: log.With("engine", name), CountIndex: true}
		if id == kvGroup {
			o.OnLeases, o.RememberHashes = leaseFeed.Changed, true
		}
		engine, err := mvcc.Open(floor, filepath.Join(c.DataDir, name), o)
		if err != nil {
			return err
		}
		defer engine.Close()
		// Users' keys are never proposed twice under one id: their clients are told when an outcome is not known.
		machine := store.NewMachine(engine, store.MachineOptions{NoIDs: id == kvGroup})
		defer machine.Close()
		engines[id], machines[id] = engine, machine
	}
	files, err := image.OpenFiles(filepath.Join(c.DataDir, "images"))
	if err != nil {
		return err
	}
	var runner *consensus.Runner
	var memberships *membership.Service
	mesh, err := transport.New(transport.Options{
		Self: c.NodeID, Members: members.addresses(c.Ports.Peers), Certificate: certificate, Authority: authority, Log: log, Now: clk.Now,
		Stranger: func(id uint64) { memberships.Stranger(id) }, Removed: func() { runner.Removed() },
	})
	if err != nil {
		return err
	}
	space := diskspace.New(diskspace.Options{Dir: c.DataDir, Self: c.NodeID, Reserve: c.Limits.DiskReserve, Log: log})
	space.Attach(mesh)
	mesh.HandleDirect(diskspace.Command, space.Answer)
	clk.Attach(mesh)
	mesh.HandleDirect(clock.Command, clk.Answer)
	host, err := consensus.Open(consensus.Options{
		ID: c.NodeID, Members: consensusMembers(c, joins), Join: joins, Dir: filepath.Join(c.DataDir, "raft"), Transport: mesh, Log: log,
		ElectionTicks: electionTicks, FS: floor,
	})
	if err != nil {
		return err
	}
	for _, id := range []uint64{systemGroup, kvGroup} {
		o := consensus.GroupOptions{ID: id, Name: names[id], Machine: machines[id], Forward: id == kvGroup}
		if _, err := host.AddGroup(o); err != nil {
			return errors.Join(fmt.Errorf("%w: %w", consensus.ErrDamaged, err), host.Close())
		}
	}
	runner = consensus.Start(host, consensus.RunnerOptions{TickInterval: c.Tick})
	floor.holds(c.NodeID, runner)
	system := store.NewGroup(runner, systemGroup)
	defer system.Close()
	kvLeads := store.NewGroup(runner, kvGroup)
	defer kvLeads.Close()
	budgets := budget.New(c.Limits.Limits, clk.Elapsed)
	records := store.New(store.Options{Engine: engines[systemGroup], Proposer: system, PageKey: key.Derive("page-tokens"), Stamp: audit.Stamp, Spend: budgets.Spend, Now: clk.Now, Elapsed: clk.Elapsed})
	commands := leader.NewCommands(c.NodeID, system, mesh)
	commands.SetGate(gate(budgets, space))
	first := firstMembers(c)
	if host.Joined() {
		first = nil
	}
	memberships = membership.New(membership.Options{
		Store: records, Commands: commands, Consensus: runner, Peers: mesh, Self: c.NodeID, First: first, Cluster: key.ClusterID(), Log: log,
		Groups: []membership.Group{
			{ID: kvGroup, Name: names[kvGroup], Leadership: kvLeads},
			{ID: systemGroup, Name: names[systemGroup], Leadership: system},
		},
	})

	// Services.
	audits := audit.New(audit.Options{Store: records, Commands: commands, Log: log.With("service", "audit")})
	identities := identity.New(identity.Options{
		Store: records, Commands: commands, Key: key, Log: log, Audit: audits, Issuer: c.issuer(), Providers: c.Identity.Providers,
		Holds:  []func(store.Reader, cloud.Tenant) error{vm.Holds, image.Holds, credit.Holds(walletProject)},
		Vacant: []func(store.Reader, cloud.ProjectID) error{credit.Vacant}, Dev: c.Dev, Skew: clk.Skew,
	})
	images := image.New(image.Options{
		Store: records, Commands: commands, Files: files, Self: c.NodeID, Count: memberships.Count, Peers: mesh,
		ImportDirs: importDirsOf(c), Log: log,
	})
	nodes := node.New(node.Options{
		Store: records, Commands: commands, Leadership: system, Self: c.NodeID, Listeners: memberships.Listeners(c.Ports.Agents),
		Authority: authority, Log: log, Now: clk.Now, Steady: clk.Steady,
	})
	credits := credit.New(credit.Options{Store: records, Commands: commands, Log: log.With("service", "credit"), Project: walletProject, Metrics: registry})
	bills := newBilling(c.Billing, records, credits, log)
	vms := vm.New(vm.Options{Store: records, Commands: commands, Nodes: nodes, Log: log, Billing: c.Billing.of(bills)})
	bills.Attach(vms)
	invites := jointoken.New(jointoken.Options{Store: records, Commands: commands, Key: key, Log: log})
	kvRaft := kv.NewRaft(runner, kvGroup, c.NodeID, kvLeads)
	keys := kv.New(kv.Options{
		Engine: engines[kvGroup], Agreement: kvRaft, Leases: leaseFeed, Peers: mesh,
		Tokens: users.NewTokens(key.Derive("kv-tokens"), c.KV.TokenTTL), Self: c.NodeID, Cluster: key.ClusterID(),
		Transfer: func(ctx context.Context, to uint64) error { return memberships.Transfer(ctx, to, kvGroup) },
		Members:  func(ctx context.Context) ([]snapfile.Member, error) { return snapshotMembers(ctx, memberships) },
		Election: electionTicks * c.Tick, Quota: c.KV.Quota, Full: space.Full, CompactAge: c.KV.CompactAge, CorruptCheck: cmp.Or(c.KV.CorruptCheck, -1), BcryptCost: c.KV.BcryptCost, Log: log.With("service", "kv"), Now: clk.Now,
		Limits: kv.Limits{RequestBytes: c.KV.MaxRequestBytes, TxnOps: c.KV.MaxTxnOps, Progress: c.KV.WatchProgress},
	})
	nodes.Attach(vms, files)
	mesh.Attach(runner, commands, files)
	grpcMetrics := grpcprom.NewServerMetrics(grpcprom.WithServerHandlingTimeHistogram())
	// Envelopes flow until the leadership is handed over, which is when everything below has ended.
	meshing, endMesh := context.WithCancel(context.Background())
	var meshWork sync.WaitGroup
	meshWork.Go(func() { mesh.Run(meshing) })
	peers, _ := rpc.New(rpc.Options{
		Credentials: mesh.Credentials(at(clk, mtls.Server(certificate, authority.Certificate(), mtls.OnlyKind(mtls.Member)))),
		Log:         log, Metrics: grpcMetrics, MaxMessage: consensus.MaxEnvelopeBytes + 1<<20,
	})
	mesh.Register(peers)
	inner := &edges{log: log, opened: opened, failed: make(chan error, 1)}
	defer func() {
		stopping, cancel := context.WithTimeout(context.Background(), stopTime)
		defer cancel()
		err = errors.Join(err, ignoreStopped(runner.Stop(stopping)))
		endMesh()
		inner.close(0)
		meshWork.Wait()
	}()
	if err := inner.serve("peers", address(c, c.Ports.Peers), peers.Server, nil, nil); err != nil {
		return err
	}
	compactor := &compactor{store: records, engine: engines[systemGroup], now: clk.Elapsed}
	tasks := &leader.Tasks{
		Self: c.NodeID, Leadership: system, Ready: records.Barrier, Log: log,
		List: []leader.Task{
			{Name: "settle members", Every: membership.SettleEvery, Run: memberships.Run},
			{Name: "bootstrap", Every: time.Minute, Run: identities.Bootstrap},
			{Name: "tend keys", Every: time.Minute, Run: identities.Tend},
			{Name: "prune the audit", Every: audit.PruneEvery, Run: audits.Prune},
			{Name: "free IDs of deleted projects", Every: time.Hour, Run: func(ctx context.Context) error { return tenant.PruneDeleted(ctx, records) }},
			{Name: "follow nodes", Every: time.Second, Run: nodes.Follow},
			{Name: "follow vms", Every: time.Second, Run: vms.Follow},
			{Name: "settle vms", Every: vm.SettleEvery, Run: vms.Settle},
			{Name: "settle images", Every: image.SettleEvery, Run: images.Settle},
			{Name: "expire reservations", Every: credit.SweepEvery, Run: credits.Sweep},
			{Name: "bill", Every: bills.Every(), Run: bills.Run},
			{Name: "expire join tokens", Every: 10 * time.Minute, Run: nodes.Expire},
			{Name: "expire invitations", Every: 10 * time.Minute, Run: invites.Expire},
			{Name: "forget answers", Every: time.Minute, Run: forgetAnswers(records)},
			{Name: "compact", Every: compactEvery, Run: compactor.compact},
		},
	}

	// Edges.
	registry.MustRegister(grpcMetrics, clk, space, &collector{runner: runner, engines: engines, names: names},
		&costs{runner: runner, engines: engines, names: names, identities: identities}, kv.NewCollector(keys))
	if tenants.pair != nil {
		registry.MustRegister(tenants.pair)
	}
	httpMetrics, metrics := rest.NewMetrics(registry), metricsHandler(registry)
	agents, _ := rpc.New(rpc.Options{
		Credentials: nodes.Credentials(at(clk, mtls.ServerOptional(withAuthority(certificate, authority), authority.Certificate(),
			mtls.OnlyKind(mtls.Node), node.RenewGrace))),
		Log: log, Metrics: grpcMetrics, MaxMessage: node.MaxMessage,
		Certified: true, Open: []string{node.OpenMethod, jointoken.OpenMethod},
	})
	nodes.RegisterAgents(agents)
	invites.Register(agents)
	etcdOptions := etcdrpc.Options{
		Service: keys, Members: memberships, Verifier: identities, Open: c.KV.Open, CommonName: c.KV.EtcdClientCA != "", Dir: c.DataDir, Log: log.With("service", "kv"),
		StrictReconfig: c.KV.StrictReconfig, Audit: audits,
	}
	etcd := etcdrpc.New(etcdOptions)
	etcdOptions.TrustLoopback, etcdOptions.CountWith = c.KV.EtcdTrustLoopback, etcd
	etcdPorts := etcdrpc.New(etcdOptions)
	streams := rpc.NewStreams()
	public, health := rpc.New(rpc.Options{
		Credentials: tenants.grpc(), Verifier: identities, Log: log, Metrics: grpcMetrics, Audit: audits, Public: true, Streams: streams,
		Guest: &rpc.Guest{
			Prefix: etcdrpc.Prefix, Admit: etcd.Admits, MaxMessage: c.KV.MaxRequestBytes + etcdOverhead, Unary: etcd.Unary, Stream: etcd.Stream, Streams: etcd.Streams(),
		},
	})
	etcd.Register(public)
	identities.Register(public)
	images.Register(public)
	nodes.Register(public)
	vms.Register(public)
	volume.Register(public)
	credits.Register(public)
	archives := newArchives(c, key, engines, names, runner)
	operator.Register(public, operator.Options{
		Version: version(), Cluster: authority.Cluster(), Members: memberships, Runner: runner, Commands: commands, Groups: groupsOf(engines, names),
		ElectionTicks: electionTicks, Nodes: nodes, Invites: invites, VMs: vms, Disks: space.Members, Backup: archives.write,
	})
	creditOnly, creditHealth := rpc.New(rpc.Options{
		Credentials: tenants.grpc(), Verifier: identities, Log: log, Metrics: grpcMetrics, Audit: audits, Public: true, Streams: streams,
	})
	credits.Register(creditOnly)
	health.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	creditHealth.SetServingStatus("", healthv1.HealthCheckResponse_SERVING)
	ready := func(context.Context) error {
		if leaderID, _ := system.Leader(); leaderID == 0 {
			return errors.New("no leader: fewer than a majority of the members can be reached")
		}
		return identities.Ready()
	}
	identityREST := rest.New(rest.Options{Service: fault.Identity, Name: "identity", Hosts: c.hosts(), Ready: ready, Log: log, Metrics: httpMetrics})
	identities.Routes(identityREST, slices.Contains(c.REST.Open, "identity"))
	vmREST := rest.New(rest.Options{Service: fault.VM, Name: "vm", Verifier: identities, Audit: audits, Ready: ready, Log: log, Metrics: httpMetrics})
	vms.Routes(vmREST)
	creditREST := rest.New(rest.Options{Service: fault.Credit, Name: "credit", Verifier: identities, Audit: audits, Ready: ready, Log: log, Metrics: httpMetrics})
	credits.Routes(creditREST)

	kvREST := kv.NewREST(kv.RESTOptions{
		Keys: keys, Members: memberships, Group: kvRaft, GroupID: kvGroup, Self: c.NodeID, Cluster: key.ClusterID(), Key: key.Derive("kv-forwards"),
		Port: c.Ports.KV, Open: slices.Contains(c.REST.Open, "kv"), ToMember: tenants.toMember, Log: log, Audit: audits,
		Metrics: httpMetrics, Now: clk.Now,
	})
	defer kvREST.Close()

	e := &edges{log: log, opened: opened, failed: make(chan error, 16)}
	defer e.close(drainTime)
	// Agents hold streams that have no end; they find another member at once.
	agentEdge := &edges{log: log, opened: opened, failed: e.failed}
	defer agentEdge.close(0)
	if err := agentEdge.serve("agents", address(c, c.Ports.Agents), agents.Server, nil, nil); err != nil {
		return err
	}
	for _, s := range []struct {
		name string
		port uint16
		grpc *grpc.Server
		http http.Handler
	}{
		{"grpc", c.Ports.GRPC, public.Server, nil},
		{"credit rpc", c.Ports.CreditGRPC, creditOnly.Server, nil},
		{"identity", c.Ports.Identity, nil, identityREST},
		{"credit", c.Ports.Credit, nil, creditREST},
		{"vm", c.Ports.VM, nil, routed{localMetrics(metrics, vmREST, c.hosts()), slices.Concat(vmREST.Routes(), metrics.routes)}},
	} {
		if err := e.serve(s.name, address(c, s.port), s.grpc, s.http, tenants.rest); err != nil {
			return err
		}
	}
	for _, host := range kv.RESTAddresses(c.Listen) {
		if err := e.serve("kv", net.JoinHostPort(host, strconv.Itoa(int(c.Ports.KV))), nil, kvREST, tenants.keys); err != nil {
			return err
		}
	}
	for _, address := range c.KV.EtcdListen {
		if err := e.serveEtcd(address, c.KV, etcdPorts, keys, grpcMetrics, metrics); err != nil {
			return err
		}
	}
	if c.MetricsListen != "" {
		if err := e.serve("metrics", c.MetricsListen, nil, metrics, nil); err != nil {
			return err
		}
	}

	// What runs as long as the member does.
	background, cancel := context.WithCancel(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	work.Go(func() { clk.Run(background) })
	work.Go(func() { space.Run(background) })
	work.Go(func() { tasks.Run(background) })
	work.Go(func() { memberships.Meet(background) })
	work.Go(func() {
		if err := memberships.Follow(background); err != nil && background.Err() == nil {
			e.failed <- fmt.Errorf("follow the members: %w", err)
		}
	})
	if host.Joined() {
		work.Go(func() {
			if err := enter(background, c, host, mesh, log); err != nil && background.Err() == nil {
				e.failed <- err
			}
		})
	}
	work.Go(func() { nodes.Guard(background) })
	work.Go(func() { images.Run(background) })
	work.Go(func() { audits.Run(background) })
	work.Go(func() { tenants.run(background, c.Dev) })
	work.Go(func() { keepAnnouncing(background, c, memberships, log) })
	work.Go(func() { keepAdminToken(background, key, c.DataDir, validWith(identities), clk.Now, log) })
	work.Go(func() { scrub(background, engines, log) })
	work.Go(func() { keys.Run(background) })
	work.Go(func() { etcd.Run(background) })
	work.Go(func() { etcdPorts.Run(background) })
	if c.Dev {
		log.Warn("DEV: everybody who can reach this address acts in project default as its administrator")
	}
	if c.KV.EtcdTrustLoopback {
		log.Error("INSECURE: kv.etcd_trust_loopback lets every process of this host change the members of the cluster", "addresses", c.KV.EtcdListen)
	}
	warnOfPlaintext(c, log)
	log.Info("serving", "member", c.NodeID, "address", c.Listen, "cluster", authority.Cluster(), "version", version())
	select {
	case <-ctx.Done():
		log.Info("stopping")
		return nil
	case err := <-e.failed:
		return err
	case err := <-inner.failed:
		return err
	case <-runner.Done():
		return runner.Err()
	}
}

// gate refuses commands of callers over their budget, and changes while a member's disk is nearly full.
func gate(budgets *budget.Budget, space *diskspace.Monitor) leader.Gate {
	return func(ctx context.Context) error {
		if err := space.Admit(ctx); err != nil {
			return err
		}
		return budgets.Admit(ctx)
	}
}

func address(c Config, port uint16) string {
	return net.JoinHostPort(c.Listen, strconv.Itoa(int(port)))
}

// validWith says whether a token is valid.
func validWith(v auth.Verifier) func(context.Context, string) error {
	return func(ctx context.Context, token string) error {
		_, err := v.Verify(ctx, token)
		return err
	}
}

func ignoreStopped(err error) error {
	if errors.Is(err, consensus.ErrStopped) {
		return nil
	}
	return err
}

func newLog(c Config) *slog.Logger {
	json := c.LogFormat == "json" || c.LogFormat == "auto" && os.Getenv("JOURNAL_STREAM") != ""
	if json {
		return slog.New(slog.NewJSONHandler(os.Stderr, nil))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, nil))
}

// lock makes the data directory and keeps a second process out of it.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock data directory: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("another member runs in %s", dir)
	}
	return func() { f.Close() }, nil
}

func importDirsOf(c Config) []image.ImportDir {
	if len(c.Images.ImportDirs) > 0 {
		return c.Images.ImportDirs
	}
	dir := filepath.Join(c.DataDir, "import")
	os.MkdirAll(dir, 0o700)
	return []image.ImportDir{{Path: dir}}
}

func groupsOf(engines map[uint64]*mvcc.Engine, names map[uint64]string) map[uint64]operator.Group {
	out := map[uint64]operator.Group{}
	for id, engine := range engines {
		out[id] = operator.Group{Name: names[id], Revision: engine.Revision}
	}
	return out
}

// snapshotMembers are the members as a snapshot file of users' keys shows them.
func snapshotMembers(ctx context.Context, memberships *membership.Service) ([]snapfile.Member, error) {
	all, err := memberships.List(ctx, true)
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

// routed is a handler that lists what it serves, as a rest.Server does.
type routed struct {
	http.Handler
	routes []rest.Route
}

// Routes is rest.Server's.
func (r routed) Routes() []rest.Route { return r.routes }

func metricsHandler(registry *prometheus.Registry) routed {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	return routed{mux, []rest.Route{{Method: http.MethodGet, Path: "/metrics", Open: "counts, for those who reach a port of the operator's or call from this host"}}}
}

// localMetrics serves /metrics to callers on loopback, and passes other paths to other. Requests from web pages are
// refused, also by DNS rebinding: see rest.CheckPage.
func localMetrics(metrics, other http.Handler, hosts []string) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" || !rest.FromLoopback(r) {
			other.ServeHTTP(w, r)
			return
		}
		if err := rest.CheckPage(r, hosts); err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		metrics.ServeHTTP(w, r)
	})
}

// leafLife is the life of a member's own certificate, which it signs anew at half of it.
const leafLife = 30 * 24 * time.Hour

// walletProject implements credit.Lookup with the records of package tenant.
func walletProject(r store.Reader, id cloud.ProjectID) (credit.Project, error) {
	p, err := tenant.Projects.Get(r, string(id))
	if err != nil || p == nil {
		return credit.Project{}, err
	}
	return credit.Project{Exists: p.DeletedAt == 0, Org: p.Org, Incarnation: p.Incarnation}, nil
}
