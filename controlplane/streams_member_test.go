package main

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// watchers are WatchVm streams of one tenant on the same VM. Each has received its first event.
type watchers struct {
	h       *testMember
	tenant  cloud.Tenant
	vm      string
	tokens  []string
	streams []grpc.ServerStreamingClient[vmv1.VmEvent]
}

// fat returns 60 labels, or metadata pairs, with values of 1 KiB, the largest size, and the label mark.
func fat(mark int) map[string]string {
	m := map[string]string{"mark": fmt.Sprint(mark)}
	for i := range 60 {
		m[fmt.Sprint("key-", i)] = strings.Repeat("x", cloud.MaxPairValue)
	}
	return m
}

// newWatchers creates a project with the largest possible VM, and the given number of service accounts with their
// tokens.
func newWatchers(h *testMember, t cloud.Tenant, accounts int) *watchers {
	who := identityv1.NewIdentityServiceClient(h.public)
	mustCall(h, who.CreateProject, &identityv1.CreateProjectRequest{Id: string(t.Project), OrgId: string(t.Org)})
	mustCall(h, creditv1.NewCreditServiceClient(h.public).CreateWallet,
		&creditv1.CreateWalletRequest{OrgId: string(t.Org), ProjectId: string(t.Project), InitialBalance: 1000})
	w := &watchers{h: h, tenant: t}
	w.vm = mustCall(h, vmv1.NewVmServiceClient(h.public).CreateVm, &vmv1.CreateVmRequest{
		Name: "fat", OrgId: string(t.Org), ProjectId: string(t.Project), Labels: fat(0), Metadata: fat(0), Spec: &vmv1.VmSpec{
			Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 512},
			Disks: []*vmv1.DiskSpec{{Id: "root", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}},
		},
	}).GetId()
	for i := range accounts {
		made := mustCall(h, who.CreateServiceAccount, &identityv1.CreateServiceAccountRequest{
			OrgId: string(t.Org), ProjectId: string(t.Project), Name: fmt.Sprint("watcher-", i), Roles: []string{string(cloud.ProjectViewer)},
		})
		token, err := who.IssueToken(h.callContext(), &identityv1.IssueTokenRequest{
			Username: made.GetAccount().GetId(), Password: made.GetSecret(), OrgId: string(t.Org), ProjectId: string(t.Project),
		})
		require.NoError(h.t, err)
		w.tokens = append(w.tokens, token.GetToken())
	}
	return w
}

// open opens n streams with a token and waits for the first event of each. It returns how many streams ended with each
// code; OK means that a stream is open.
func (w *watchers) open(ctx context.Context, conn *grpc.ClientConn, token string, n int) map[codes.Code]int {
	vms := vmv1.NewVmServiceClient(conn)
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	got := map[codes.Code]int{}
	for range n {
		s, err := vms.WatchVm(ctx, &vmv1.WatchVmRequest{OrgId: string(w.tenant.Org), ProjectId: string(w.tenant.Project), VmId: w.vm})
		require.NoError(w.h.t, err)
		e, err := s.Recv()
		if got[status.Code(err)]++; err == nil {
			require.Equal(w.h.t, w.vm, e.GetVmId())
			w.streams = append(w.streams, s)
		} else {
			require.ErrorContains(w.h.t, err, "streams open on this member, which is the limit")
		}
	}
	return got
}

// update changes the VM's labels and metadata, which sends every watcher an event of the largest size with this mark. On
// a busy machine a proposal can time out. It is then repeated, which changes nothing if it was applied.
func (w *watchers) update(mark int) {
	request := &vmv1.UpdateVmRequest{
		OrgId: string(w.tenant.Org), ProjectId: string(w.tenant.Project), VmId: w.vm, Labels: fat(mark), Metadata: fat(mark),
	}
	var err error
	for range 10 {
		if _, err = vmv1.NewVmServiceClient(w.h.public).UpdateVm(w.h.adminContext(), request); status.Code(err) != codes.Unavailable {
			break
		}
	}
	require.NoError(w.h.t, err)
}

// dial connects to the member's gRPC port.
func (w *watchers) dial() *grpc.ClientConn {
	conn, err := grpc.NewClient(w.h.config.Address(w.h.config.Ports.GRPC), grpc.WithTransportCredentials(insecure.NewCredentials()),
		// The window is smaller than half an event, so that the rest of an unread event stays in the member's memory.
		grpc.WithStaticStreamWindowSize(64<<10), grpc.WithStaticConnWindowSize(1<<30))
	require.NoError(w.h.t, err)
	w.h.t.Cleanup(func() { conn.Close() })
	return conn
}

// read reads a stream up to the event with the mark last. It returns an error unless each event arrives once and in
// order.
func (w *watchers) read(s grpc.ServerStreamingClient[vmv1.VmEvent], last int) error {
	for next := 1; next <= last; next++ {
		e, err := s.Recv()
		if err != nil {
			return err
		}
		if got := e.GetVm().GetLabels()["mark"]; got != fmt.Sprint(next) {
			return fmt.Errorf("event %s follows %d", got, next-1)
		}
	}
	return nil
}

// heapInUse returns the bytes of heap and stacks that are in use after a garbage collection.
func heapInUse() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapInuse + m.StackInuse
}

// TestWatchesOfSlowClientsUseBoundedMemory opens as many watches of two orgs as are allowed, on VMs of the largest
// size, reads few of them, and changes the VMs all the time. The process, which contains the member and the clients,
// must need less than 256 MiB more. Clients that read must get every event, and the memory must be free again after the
// streams have ended.
func TestWatchesOfSlowClientsUseBoundedMemory(t *testing.T) {
	h := startMember(t)
	h.createResources()
	const projects, updates, readers = 4, 40, 4
	var all []*watchers
	for i := range projects {
		all = append(all, newWatchers(h, cloud.Tenant{Org: []cloud.OrgID{web.Org, lab.Org}[i%2], Project: cloud.ProjectID(fmt.Sprint("load-", i))}, 3))
	}
	before := heapInUse()
	ctx, cancelWatches := context.WithCancel(context.Background())
	defer cancelWatches()
	for _, w := range all {
		// One principal reaches its own limit. Other principals then reach the limit of the project.
		const each = rpc.MaxPrincipalStreams
		slow := w.dial()
		require.Equal(t, map[codes.Code]int{codes.OK: readers}, w.open(ctx, w.dial(), w.tokens[0], readers))
		require.Equal(t, map[codes.Code]int{codes.OK: each - readers, codes.ResourceExhausted: 50}, w.open(ctx, slow, w.tokens[0], each-readers+50))
		require.Equal(t, map[codes.Code]int{codes.OK: rpc.MaxProjectStreams - each}, w.open(ctx, slow, w.tokens[1], rpc.MaxProjectStreams-each))
		require.Equal(t, map[codes.Code]int{codes.ResourceExhausted: 5}, w.open(ctx, slow, w.tokens[2], 5))
	}
	opened := heapInUse()

	var reading sync.WaitGroup
	missed := make(chan error, projects*readers)
	for _, w := range all {
		for _, s := range w.streams[:readers] {
			reading.Go(func() { missed <- w.read(s, updates) })
		}
	}
	var peak uint64
	for mark := range updates {
		var work sync.WaitGroup
		for _, w := range all {
			work.Go(func() { w.update(mark + 1) })
		}
		work.Wait()
		if mark%8 == 7 {
			peak = max(peak, heapInUse())
		}
	}
	reading.Wait()
	t.Logf("in use: %d MiB before, %d MiB with %d streams, at most %d MiB while they are not read", before>>20, opened>>20, projects*rpc.MaxProjectStreams, peak>>20)
	require.Less(t, max(opened, peak), before+256<<20)
	for range projects * readers {
		require.NoError(t, <-missed)
	}

	// The other streams either continue from their revision, or have ended because their client was too slow.
	for _, w := range all {
		for _, s := range w.streams[readers : 10*readers] {
			switch err := w.read(s, updates); status.Code(err) {
			case codes.OK, codes.ResourceExhausted, codes.Unavailable:
			default:
				require.NoError(t, err)
			}
		}
		w.streams = nil
	}
	cancelWatches()
	require.Eventually(t, func() bool { return heapInUse() < before+128<<20 }, 30*time.Second, 500*time.Millisecond, "the memory must be free after the streams have ended")
	t.Logf("in use: %d MiB after", heapInUse()>>20)
}
