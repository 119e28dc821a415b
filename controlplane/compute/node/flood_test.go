package node

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// TestHeartbeatFlood sends heartbeats of one host that change the capacity and the labels each time. They must be
// acknowledged up to the call limit, but change the record only once per minUpdateInterval. A heartbeat after that time
// must record the last change.
func TestHeartbeatFlood(t *testing.T) {
	w := newWorld(t)
	w.mu.Lock()
	w.frozen = time.Now()
	w.mu.Unlock()
	w.follow(1)
	ctx := limited(t)
	a := w.host(1, 1)
	_, err := a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	changed := func(n int) *vmv1.HeartbeatNodeRequest {
		return sendHeartbeat(a, func(r *vmv1.HeartbeatNodeRequest) {
			r.Capacity.Vcpus = uint32(n)
			for i := range 62 {
				r.Labels[fmt.Sprint("label-", i)] = fmt.Sprintf("%060d", n)[:min(60, 4000/62-8)]
			}
		})
	}
	before := w.records.Revision()
	const streams, each = 8, 26
	var work sync.WaitGroup
	var mu sync.Mutex
	answered := map[codes.Code]int{}
	for stream := range streams {
		work.Go(func() {
			for i := range each {
				_, err := a.HeartbeatNode(ctx, changed(100+stream*each+i))
				mu.Lock()
				answered[codeOf(err)]++
				mu.Unlock()
			}
		})
	}
	work.Wait()
	require.Equal(t, before, w.records.Revision(), "no second change may be recorded within minUpdateInterval")
	require.Equal(t, map[codes.Code]int{codes.OK: callBurst - 1, codes.ResourceExhausted: streams*each - callBurst + 1}, answered)

	// The acknowledged heartbeats must count as heartbeats, and another host's calls must not be delayed.
	w.members[1].mu.Lock()
	require.Equal(t, w.frozen.UnixMilli(), w.members[1].lastHeartbeat[a.id])
	w.members[1].mu.Unlock()
	b := w.host(1, 2)
	_, err = b.HeartbeatNode(ctx, sendHeartbeat(b))
	require.NoError(t, err)

	w.mu.Lock()
	w.frozen = w.frozen.Add(time.Duration(minUpdateInterval) * time.Millisecond)
	w.mu.Unlock()
	before = w.records.Revision()
	for range 3 {
		_, err := a.HeartbeatNode(ctx, changed(7))
		require.NoError(t, err)
	}
	require.Equal(t, before+1, w.records.Revision())
	require.EqualValues(t, 7, w.node(a.id).Capacity.VCPUs)
}

// TestFactsFlood sends facts that change with every message. They must be written once per minUpdateInterval, and the
// last facts must be written at its end.
func TestFactsFlood(t *testing.T) {
	w := newWorld(t)
	w.follow(1)
	ctx := limited(t)
	a := w.host(1, 1)
	_, err := a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)
	before := w.records.Revision()
	s, err := a.Report(ctx)
	require.NoError(t, err)
	const floods = 300
	for n := range floods {
		f := &agentv1.NodeFacts{QemuVersion: "7.2.0", Architecture: vmv1.Architecture(cloud.X8664)}
		for i := range 256 {
			f.CpuModels = append(f.CpuModels, fmt.Sprintf("model-%d-%d", n, i))
		}
		require.NoError(t, s.Send(&agentv1.ReportRequest{Facts: f}))
	}
	_, err = s.CloseAndRecv()
	require.NoError(t, err)
	// At most two writes are allowed: the first facts, and the key of the connection's certificate.
	require.LessOrEqual(t, w.records.Revision()-before, int64(2))
	require.Equal(t, "model-0-0", w.node(a.id).CPUModels[0])

	w.pass(time.Duration(minUpdateInterval) * time.Millisecond)
	before = w.records.Revision()
	for range 3 {
		_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
		require.NoError(t, err)
	}
	require.Equal(t, before+1, w.records.Revision())
	require.Equal(t, fmt.Sprintf("model-%d-0", floods-1), w.node(a.id).CPUModels[0])
}

func observations(from, n int) (out []*agentv1.VmObservation) {
	for i := range n {
		out = append(out, &agentv1.VmObservation{VmId: string(testVM(from + i)), Observed: agentv1.Observed_OBSERVED_RUNNING})
	}
	return out
}

// TestReportFlood checks that reports beyond a host's rate are read more slowly while other hosts are served, and that
// too large a message ends the stream.
func TestReportFlood(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	a, b := w.host(1, 1), w.host(1, 2)
	for name, c := range map[string]struct {
		n    int
		code codes.Code
		says string
	}{
		"many":  {maxObservations + 1, codes.InvalidArgument, "at most 1000 in a message"},
		"large": {100_000, codes.ResourceExhausted, "larger than max"},
	} {
		s, err := a.Report(ctx)
		require.NoError(t, err)
		s.Send(&agentv1.ReportRequest{Vms: observations(0, c.n)})
		_, err = s.CloseAndRecv()
		require.Error(t, err, name)
		refused(t, err, c.code, c.says)
	}
	require.Empty(t, w.vms.reports)

	awaitPause := w.holdPauses(1)
	flood, end := context.WithCancel(ctx)
	defer end()
	s, err := a.Report(flood)
	require.NoError(t, err)
	var work sync.WaitGroup
	defer work.Wait()
	defer end()
	work.Go(func() {
		for n := range 200 {
			if s.Send(&agentv1.ReportRequest{Vms: observations(n*maxObservations, maxObservations)}) != nil {
				return
			}
		}
	})
	awaitPause(ctx)
	const burst = observationBurst / (messageCost + maxObservations) * maxObservations
	require.Equal(t, burst, w.told(a.id))

	// Meanwhile all reports of a host with 5,000 VMs must be processed, and its heartbeats acknowledged.
	other, err := b.Report(ctx)
	require.NoError(t, err)
	for n := range 50 {
		require.NoError(t, other.Send(&agentv1.ReportRequest{Vms: observations(n*100, 100)}))
	}
	_, err = other.CloseAndRecv()
	require.NoError(t, err)
	require.Equal(t, 5000, w.told(b.id))
	_, err = b.HeartbeatNode(ctx, sendHeartbeat(b))
	require.NoError(t, err)
	require.Equal(t, burst, w.told(a.id))
}

func (w *world) told(id cloud.NodeID) int {
	w.vms.mu.Lock()
	defer w.vms.mu.Unlock()
	return len(w.vms.reports[id])
}

// holdPauses stops the clock that member reads and makes each throttling pause of the member last until the context of
// the call ends. awaitPause waits until one pause has begun.
func (w *world) holdPauses(member uint64) (awaitPause func(context.Context)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frozen = time.Now()
	began := make(chan struct{}, 64)
	w.members[member].pause = func(ctx context.Context, d time.Duration) error {
		if d <= 0 {
			return nil
		}
		began <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	return func(ctx context.Context) {
		w.t.Helper()
		select {
		case <-began:
		case <-ctx.Done():
			require.Fail(w.t, "the member paused no call")
		}
	}
}

// TestChangeRateLimit checks that reports that change records are throttled by the number of changed records, per host.
func TestChangeRateLimit(t *testing.T) {
	w := newWorld(t)
	limit := limited(t)
	awaitPause := w.holdPauses(1)
	w.vms.changes = true
	ctx, end := context.WithCancel(limit)
	var work sync.WaitGroup
	defer work.Wait()
	defer end()
	s := w.members[1]
	var all []cloud.Observation
	for n := range 4 * changeBurst {
		all = append(all, cloud.Observation{VM: testVM(n)})
	}
	work.Go(func() { _ = s.applyReports(ctx, "host", all) })
	awaitPause(limit)
	require.LessOrEqual(t, w.told("host"), changeBurst+16)
	require.NoError(t, s.applyReports(ctx, "another host", all[:changeBurst]))
}

// TestConnectionAndCallLimits opens connections, calls and Report streams of one host up to each limit. One more must
// be refused, and another host's calls must succeed.
func TestConnectionAndCallLimits(t *testing.T) {
	w := newWorld(t)
	ctx := limited(t)
	a, b := w.host(1, 1), w.host(1, 2)
	for range maxReportStreams {
		s, err := a.Report(ctx)
		require.NoError(t, err)
		require.NoError(t, s.Send(&agentv1.ReportRequest{Vms: observations(1, 1)}))
	}
	budget := w.members[1].budgetOf(a.id)
	require.Eventually(t, func() bool {
		w.members[1].mu.Lock()
		defer w.members[1].mu.Unlock()
		return budget.reportStreams == maxReportStreams
	}, 10*time.Second, time.Millisecond)
	s, err := a.Report(ctx)
	require.NoError(t, err)
	_, err = s.CloseAndRecv()
	refused(t, err, codes.ResourceExhausted, "4 streams of reports open")

	var leave []func()
	for range maxCalls - maxReportStreams {
		l, err := w.members[1].beginCall(ctx, a.id)
		require.NoError(t, err)
		leave = append(leave, l)
	}
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
	refused(t, err, codes.ResourceExhausted, "160 calls in progress")
	_, err = b.HeartbeatNode(ctx, sendHeartbeat(b))
	require.NoError(t, err)
	for _, l := range leave {
		l()
	}
	_, err = a.HeartbeatNode(ctx, sendHeartbeat(a))
	require.NoError(t, err)

	own := w.certificate(mtls.Node, string(a.id), time.Now(), time.Hour)
	refusals := ""
	for range maxConnections {
		c := w.with(1, own)
		c.id = a.id
		if _, err := c.HeartbeatNode(ctx, sendHeartbeat(c)); err != nil {
			require.Equal(t, codes.Unavailable, codeOf(err))
			refusals += err.Error() + "\n"
		}
	}
	require.Equal(t, 1, strings.Count(refusals, "\n"), refusals)
	_, err = b.HeartbeatNode(ctx, sendHeartbeat(b))
	require.NoError(t, err)
}

// TestWatchFlood opens more than watchBurst sessions of one host in a row. The next session must be delayed, and
// another host's session must not.
func TestWatchFlood(t *testing.T) {
	w := newWorld(t)
	a, b := w.host(1, 1), w.host(1, 2)
	awaitPause := w.holdPauses(1)
	for range watchBurst {
		a.watch(t).all()
	}
	s, err := a.AgentServiceClient.Watch(limited(t), &agentv1.WatchRequest{Protocol: Protocol})
	require.NoError(t, err)
	awaitPause(s.Context())
	b.watch(t).all()
}
