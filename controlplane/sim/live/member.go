package live

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"google.golang.org/grpc"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/accounts/audit"
	"github.com/trivet-cloud/trivet/controlplane/accounts/identity"
	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/compute/snapshot"
	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/compute/volume"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/engine/mvcc"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// memberSlot is one of the three members: its ID, its disk and its current process. It exists for the whole simulation,
// while each start of the member creates a new process.
type memberSlot struct {
	f    *fleet
	id   uint64
	name endpoint
	dir  string // parent of the directory of image files, which crashes do not affect

	turn chan struct{} // semaphore, acquired to start or end a process

	mu   sync.Mutex
	disk *vfs.MemFS
	now  *process // the running process; nil while the member is down
}

// process is one run of a member's process. It contains what the real program creates at its start, except the
// listeners.
type process struct {
	s      *memberSlot
	ctx    context.Context
	cancel context.CancelFunc

	engine  *mvcc.Engine
	machine *store.StateMachine
	runner  *consensus.Runner
	system  *store.Group
	records *store.Store
	mesh    *mesh

	identities *identity.Service
	files      *image.Files
	images     *image.Service
	nodes      *node.Service
	networks   *network.Service
	vms        *vm.Service
	volumes    *volume.Service
	classes    *storageclass.Service
	snapshots  *snapshot.Service
	commands   *leader.Commands
	agents     agentv1.AgentServiceServer
	heartbeats vmv1.NodeServiceServer

	work sync.WaitGroup

	mu    sync.Mutex
	dead  bool
	calls sync.WaitGroup // calls from other members, hosts and tenants; no new one is accepted when dead is set
}

// start starts a process on the member's disk. It also makes the witness watch the records of this process.
func (s *memberSlot) start() error {
	s.f.trace.Add("%s starts", s.name)
	p := &process{s: s}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	if err := p.build(); err != nil {
		p.cancel()
		return fmt.Errorf("%s cannot start: %w", s.name, err)
	}
	s.mu.Lock()
	s.now = p
	s.mu.Unlock()
	s.f.audit.follow(p)
	return nil
}

// current returns the running process. It returns nil if the member is down.
func (s *memberSlot) current() *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.now
}

// build creates the engine, consensus, store and services, in the same order as the run function of
// trivet-controlplane.
func (p *process) build() (err error) {
	s, f := p.s, p.s.f
	log := f.log.With("member", s.id)
	if p.engine, err = mvcc.Open(s.disk, layout.SystemName, mvcc.Options{
		Logger: log, CacheBytes: 1 << 20, MemTableBytes: 1 << 20, KeyIndex: true, ValueCacheBytes: 1 << 20,
	}); err != nil {
		return err
	}
	p.machine = store.NewStateMachine(p.engine, store.StateMachineOptions{FlushBytes: f.flushBytes})
	p.mesh = &mesh{p}
	host, err := consensus.Open(consensus.Options{
		ID: s.id, Members: memberIDs, Dir: layout.RaftDir, FS: s.disk, Transport: p.mesh, Log: log, ElectionTicks: 10,
		Limits: consensus.Limits{TailEntries: f.tail},
	})
	if err == nil {
		_, err = host.AddGroup(consensus.GroupOptions{ID: layout.SystemGroup, Name: layout.SystemName, Machine: p.machine})
		if err != nil {
			err = errors.Join(err, host.Close())
		}
	}
	if err != nil {
		p.machine.Close()
		return errors.Join(err, p.engine.Close())
	}
	p.runner = consensus.Start(host, consensus.RunnerOptions{TickInterval: 100 * time.Millisecond})
	p.system = store.NewGroup(p.runner, layout.SystemGroup)
	p.records = store.New(store.Options{Engine: p.engine, Proposer: p.system, PageKey: f.key.Derive("page-tokens")})
	if err := p.serve(log); err != nil {
		return errors.Join(err, p.end())
	}
	return nil
}

// serve creates the services of the process. It also starts the background tasks that are active only on the leader.
func (p *process) serve(log *slog.Logger) (err error) {
	s, f := p.s, p.s.f
	p.commands = leader.NewCommands(s.id, p.system, p.mesh)
	p.identities = identity.New(identity.Options{
		Store: p.records, Commands: p.commands, Key: f.key, Log: log, Issuer: "http://member", Audit: audit.New(audit.Options{Store: p.records, Commands: p.commands, Log: log}),
	})
	if p.files, err = image.OpenFiles(filepath.Join(s.dir, layout.ImagesDir)); err != nil {
		return err
	}
	p.images = image.New(image.Options{
		Store: p.records, Commands: p.commands, Files: p.files, Self: s.id, Members: func() []uint64 { return memberIDs }, Peers: p.mesh,
		ImportDirs: []image.ImportDir{{Path: f.imports}}, Log: log,
	})
	addresses := map[uint64]string{}
	for _, s := range f.slots {
		addresses[s.id] = string(s.name)
	}
	p.nodes = node.New(node.Options{
		Store: p.records, Commands: p.commands, Leadership: p.system, Self: s.id, Listeners: func() map[uint64]string { return addresses },
		Authority: f.authority, Log: log, Now: time.Now,
	})
	p.networks = network.New(network.Options{Store: p.records, Commands: p.commands, Log: log})
	feed := network.NewFeed(network.FeedOptions{Store: p.records})
	p.volumes = volume.New(volume.Options{Store: p.records, Commands: p.commands, Key: f.key, Log: log})
	p.vms = vm.New(vm.Options{Store: p.records, Commands: p.commands, Nodes: p.nodes, Volumes: p.volumes, Log: log})
	p.snapshots = snapshot.New(p.records, p.commands, p.volumes, nil) // no content is read
	p.classes = storageclass.New(p.records, p.commands, f.key)
	p.nodes.Attach(p.vms, p.files)
	p.nodes.AttachVolumes(p.volumes)
	p.nodes.AttachNetworks(feed)
	p.nodes.RegisterAgents(p)
	tasks := &leader.Tasks{
		Self: s.id, Leadership: p.system, Ready: p.records.Barrier, Log: log,
		List: []leader.Task{
			{Name: "bootstrap", Every: time.Minute, Run: p.identities.Bootstrap},
			{Name: "create the first storage class", Every: time.Minute, Run: p.classes.Bootstrap},
			{Name: "follow nodes", Every: time.Second, Run: p.nodes.Follow},
			{Name: "follow vms", Every: time.Second, Run: p.vms.Follow},
			{Name: "settle vms", Every: vm.SettleEvery, Run: p.vms.Settle},
			{Name: "recover vms", Every: vm.RecoverEvery, Run: p.vms.Recover},
			{Name: "step live migrations", Every: vm.MigrateEvery, Run: p.vms.StepMigrations},
			{Name: "drain hosts", Every: vm.DrainEvery, Run: p.vms.StepDrains},
			{Name: "place volumes", Every: volume.PlaceEvery, Run: p.placeVolumes},
			{Name: "create and delete scheduled snapshots", Every: snapshot.ScheduleEvery, Run: p.snapshots.RunSchedules},
			{Name: "free rested addresses", Every: network.FreeEvery, Run: p.networks.FreeRested},
			{Name: "follow networks", Every: time.Second, Run: feed.Follow},
			{Name: "assign NAT gateways", Every: network.AssignEvery, Run: func(ctx context.Context) error {
				return feed.AssignGateways(ctx, p.hostStates())
			}},
			{Name: "settle images", Every: image.SettleEvery, Run: p.images.Settle},
			{Name: "expire join tokens", Every: 10 * time.Minute, Run: p.nodes.Expire},
		},
	}
	p.work.Go(func() { tasks.Run(p.ctx) })
	p.work.Go(func() { p.images.Run(p.ctx) })
	return nil
}

// hostStates describes the hosts for the assignment of NAT gateways.
func (p *process) hostStates() (out []network.HostState) {
	for _, c := range p.nodes.Fleet() {
		out = append(out, network.HostState{ID: c.Node.ID, State: c.State, Unresponsive: p.nodes.Unresponsive(c.Node.ID)})
	}
	return out
}

// placeVolumes calls volume.Service.Place with the records and states of all hosts.
func (p *process) placeVolumes(ctx context.Context) error {
	var fleet []volume.HostState
	for _, c := range p.nodes.Fleet() {
		fleet = append(fleet, volume.HostState{
			Node: c.Node, Ready: c.State == cloud.NodeReady,
			Awaited: c.State == cloud.NodeNotReady && c.Node.Declared != cloud.NodeNotReady && !p.nodes.Unresponsive(c.Node.ID),
		})
	}
	return p.volumes.Place(ctx, fleet)
}

// RegisterService implements grpc.ServiceRegistrar. It stores the handlers, which the simulated agents call directly.
func (p *process) RegisterService(_ *grpc.ServiceDesc, handlers any) {
	switch h := handlers.(type) {
	case agentv1.AgentServiceServer:
		p.agents = h
	case vmv1.NodeServiceServer:
		p.heartbeats = h
	}
}

// enter is called at the begin of a call from outside the process. The context inside is cancelled when the process
// ends. The caller must call leave at the end of the call. If the process has already ended, leave is nil.
func (p *process) enter(ctx context.Context) (inside context.Context, leave func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dead {
		return nil, nil
	}
	p.calls.Add(1)
	inside, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(p.ctx, cancel)
	return inside, func() {
		stop()
		cancel()
		p.calls.Done()
	}
}

func (p *process) gone() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.dead
}

// take acquires the lock of the member, so that only one goroutine at a time starts or ends its process. The caller
// must call release.
func (s *memberSlot) take() (release func()) {
	s.turn <- struct{}{}
	return func() { <-s.turn }
}

// kill ends the member's process. At random, it also simulates a power loss. After a power loss the member's disk
// contains only the data that was synced; otherwise it contains all written data.
func (s *memberSlot) kill(rng *rand.Rand) error {
	defer s.take()()
	p := s.current()
	if p == nil {
		return nil
	}
	power := rng.IntN(2) == 0
	s.f.trace.Add("%s is killed, power lost: %v", s.name, power)
	p.mu.Lock()
	p.dead = true
	p.mu.Unlock()
	crash := vfs.CrashCloneCfg{}
	if !power {
		crash = vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rng}
	}
	picture := s.disk.CrashClone(crash)
	err := p.end()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now, s.disk = nil, picture
	return err
}

// end closes the parts of the process in the same order as the run function of trivet-controlplane. Unlike that
// function, it does not transfer leadership first.
func (p *process) end() error {
	p.mu.Lock()
	p.dead = true
	p.mu.Unlock()
	p.cancel()
	p.work.Wait()
	p.calls.Wait()
	err := p.runner.Stop(p.ctx)
	if errors.Is(err, consensus.ErrStopped) {
		err = nil
	}
	p.system.Close()
	p.machine.Close()
	return errors.Join(err, p.engine.Close())
}

func itoa(n uint64) string { return strconv.FormatUint(n, 10) }
