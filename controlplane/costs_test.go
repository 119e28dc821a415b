package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"maps"
	"math"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/metadata"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// costCounters lists columns of testdata/costs.txt with the metrics that they are read from. If a metric has a value
// for each raft group, the column has the sum.
var costCounters = []struct{ name, metric string }{
	{"entries", "trivet_raft_committed_index"},
	{"bytes", "trivet_raft_proposed_bytes_total"},
	{"readidx", "trivet_raft_read_index_total"},
	{"gets", "trivet_store_gets_total"},
	{"ranges", "trivet_store_ranges_total"},
	{"keys", "trivet_store_keys_read_total"},
	{"policy", "trivet_policy_evaluations_total"},
	{"sigs", "trivet_token_signatures_verified_total"},
}

const (
	// costSamples is the number of samples per call. The cost is the lower quartile of the samples, because background
	// jobs add work to some of them.
	costSamples = 31
	// costTolerance is the largest relative difference between a cost and the expected one.
	costTolerance = 0.05
	// costFile is the file with the expected costs.
	costFile = "testdata/costs.txt"
)

// cost maps each counter to its increase during one call. The counter allocs is the number of heap allocations of the
// process, which include those of the test's client.
type cost map[string]int64

// measuredCall is a call that TestCosts makes repeatedly to measure its cost.
type measuredCall struct {
	name string
	// prepare returns a function that makes call number i, which must succeed. The work of prepare itself is not
	// measured.
	prepare func(i int) func()
	// pause is the time to wait before each sample, for calls whose rate is limited.
	pause time.Duration
	// slow marks a call that is skipped with the race detector, because it would take so long that background jobs add
	// work to every sample.
	slow bool
}

// TestCosts compares the cost of the most common calls with testdata/costs.txt: log entries, bytes proposed, ReadIndex
// calls, store reads, policy evaluations, verified signatures and allocations. None of these depends on the speed of
// the machine. The test fails if a cost differs by more than 5 %; after an intended change, run it with -rewrite.
func TestCosts(t *testing.T) {
	h := startMember(t)
	h.createResources()
	agent := vmv1.NewNodeServiceClient(h.dial(h.config.Address(h.config.Ports.Agents), h.memberTLS(h.host)))
	beat := func() {
		_, err := agent.HeartbeatNode(t.Context(), h.heartbeat(h.resources["node"]))
		require.NoError(t, err)
	}
	got, skipped := map[string]cost{}, map[string]bool{}
	for _, c := range h.measuredCalls() {
		if c.slow && raceEnabled {
			skipped[c.name] = true
			continue
		}
		got[c.name] = h.measure(c, beat)
	}
	if *rewrite {
		require.False(t, raceEnabled, "-rewrite needs a test without -race, which changes how much is allocated")
		require.NoError(t, os.WriteFile(costFile, []byte(formatCosts(got)), 0o644))
		return
	}
	text, err := os.ReadFile(costFile)
	require.NoError(t, err)
	want := parseCosts(t, string(text))
	maps.DeleteFunc(want, func(name string, _ cost) bool { return skipped[name] })
	require.ElementsMatch(t, slices.Collect(maps.Keys(want)), slices.Collect(maps.Keys(got)), "run go test ./controlplane -run TestCosts -rewrite")
	for name, w := range want {
		for counter, expected := range w {
			if counter == "allocs" && raceEnabled {
				continue
			}
			if problem := compareCost(expected, got[name][counter]); problem != "" {
				t.Errorf("%s: %s: %s", name, counter, problem)
			}
		}
	}
	if t.Failed() {
		t.Logf("measured:\n%s", formatCosts(got))
	}
}

// compareCost returns the text of the failure if the cost got differs from want by more than costTolerance, or "".
func compareCost(want, got int64) string {
	switch d := float64(got - want); {
	case math.Abs(d) <= costTolerance*float64(want):
		return ""
	case d > 0:
		return fmt.Sprintf("rose from %d to %d. Find what the call does more than before; if it must be, run go test ./controlplane -run TestCosts -rewrite", want, got)
	}
	return fmt.Sprintf("fell from %d to %d. Run go test ./controlplane -run TestCosts -rewrite, so that the gain is kept", want, got)
}

func TestCompareCost(t *testing.T) {
	for _, c := range []struct {
		want, got int64
		says      string
	}{
		{0, 0, ""}, {1, 1, ""}, {100, 105, ""}, {100, 95, ""},
		{0, 1, "rose"}, {1, 2, "rose"}, {100, 106, "rose"}, {100, 94, "fell"}, {1, 0, "fell"},
	} {
		require.Contains(t, compareCost(c.want, c.got), c.says)
		require.Equal(t, c.says == "", compareCost(c.want, c.got) == "")
	}
}

// costHeader is the first part of the file of expected costs, which explains the columns.
const costHeader = `Cost of one call at a member that is alone in its cluster, with both groups. Written by go test ./controlplane -run TestCosts -rewrite.
entries: log entries; bytes: proposed; readidx: ReadIndex calls; gets, ranges: reads of the store, not from memory; keys: keys that these returned;
policy: evaluations of the authorization policy; sigs: token signatures verified; allocs: heap allocations, those of the caller and its connection included.

`

func costColumns() (names []string) {
	for _, c := range costCounters {
		names = append(names, c.name)
	}
	return append(names, "allocs")
}

func formatCosts(costs map[string]cost) string {
	var b strings.Builder
	b.WriteString(costHeader)
	line := func(name string, cell func(string) string) {
		text := fmt.Sprintf("%-24s", name)
		for _, c := range costColumns() {
			text += fmt.Sprintf(" %8s", cell(c))
		}
		b.WriteString(text + "\n")
	}
	line("call", func(c string) string { return c })
	for _, name := range slices.Sorted(maps.Keys(costs)) {
		line(name, func(c string) string { return strconv.FormatInt(costs[name][c], 10) })
	}
	return b.String()
}

func parseCosts(t *testing.T, text string) map[string]cost {
	out := map[string]cost{}
	body, ok := strings.CutPrefix(text, costHeader)
	require.True(t, ok, "%s has another header: run with -rewrite", costFile)
	lines := strings.Split(strings.TrimSpace(body), "\n")
	columns := strings.Fields(lines[0])[1:]
	require.Equal(t, costColumns(), columns)
	for _, line := range lines[1:] {
		fields := strings.Fields(line)
		require.Len(t, fields, 1+len(columns), line)
		c := cost{}
		for i, column := range columns {
			n, err := strconv.ParseInt(fields[i+1], 10, 64)
			require.NoError(t, err)
			c[column] = n
		}
		out[fields[0]] = c
	}
	return out
}

// measure returns the cost of a call. It calls beat about once a second, outside of the measurement, so that the host
// stays READY.
func (h *testMember) measure(c measuredCall, beat func()) cost {
	h.t.Helper()
	samples := map[string][]int64{}
	var beaten time.Time
	// The first three calls are not counted, because they fill caches.
	for i := range costSamples + 3 {
		if time.Since(beaten) > time.Second {
			beat()
			beaten = time.Now()
		}
		call := c.prepare(i)
		time.Sleep(c.pause)
		before := h.settled()
		allocs, took := allocations(func() { call(); time.Sleep(tailTime) })
		after := h.settled()
		if i < 3 {
			continue
		}
		for name, n := range after {
			samples[name] = append(samples[name], n-before[name])
		}
		samples["allocs"] = append(samples["allocs"], allocs)
		// Raft's clock and other background jobs allocate too. What they allocate in the same time is subtracted below.
		idle, _ := allocations(func() { time.Sleep(took) })
		samples[idleAllocs] = append(samples[idleAllocs], idle)
	}
	out := cost{}
	for name, all := range samples {
		slices.Sort(all)
		out[name] = all[len(all)/4]
	}
	out["allocs"] -= out[idleAllocs]
	delete(out, idleAllocs)
	return out
}

// idleAllocs is the name of the samples of allocations while no call runs.
const idleAllocs = "idle"

const (
	// tailTime is how long allocations are still counted after the response to a call, for the watches that the call
	// wakes.
	tailTime = 5 * time.Millisecond
)

// allocations returns how many heap allocations the process has made while f ran, and how long f took.
func allocations(f func()) (n int64, took time.Duration) {
	var from, to runtime.MemStats
	runtime.ReadMemStats(&from)
	began := time.Now()
	f()
	took = time.Since(began)
	runtime.ReadMemStats(&to)
	return int64(to.Mallocs - from.Mallocs), took
}

// settled returns the counters once two readings are equal: all work that a call has caused, even after its response,
// is then complete.
func (h *testMember) settled() cost {
	h.t.Helper()
	var last cost
	h.waitFor(func() bool {
		now := h.readCounters()
		same := maps.Equal(last, now)
		last = now
		return same
	})
	return last
}

// readCounters reads the counters of costCounters from /metrics.
func (h *testMember) readCounters() cost {
	h.t.Helper()
	answer, err := http.Get("http://" + h.config.MetricsListen + "/metrics")
	require.NoError(h.t, err)
	defer answer.Body.Close()
	out := cost{}
	for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
		name, value, _ := strings.Cut(lines.Text(), " ")
		name, _, _ = strings.Cut(name, "{")
		for _, c := range costCounters {
			if c.metric == name {
				n, err := strconv.ParseFloat(value, 64)
				require.NoError(h.t, err)
				out[c.name] += int64(n)
			}
		}
	}
	require.Len(h.t, out, len(costCounters))
	return out
}

// always returns the prepare function of a call that needs no preparation.
func always(call func()) func(int) func() { return func(int) func() { return call } }

// measuredCalls returns the most common calls, which TestCosts measures.
func (h *testMember) measuredCalls() []measuredCall {
	ctx := h.t.Context()
	token := h.hostToken(web, time.Now(), time.Hour)
	vmService, nodes := vmv1.NewVmServiceClient(h.public), vmv1.NewNodeServiceClient(h.dial(h.config.Address(h.config.Ports.Agents), h.memberTLS(h.host)))
	agents := agentv1.NewAgentServiceClient(h.dial(h.config.Address(h.config.Ports.Agents), h.memberTLS(h.host)))
	wallets, who := creditv1.NewCreditServiceClient(h.public), identityv1.NewIdentityServiceClient(h.public)
	call := metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	must := func(err error) { h.t.Helper(); require.NoError(h.t, err) }
	send := func(port uint16, method, path, body string) {
		h.t.Helper()
		q, err := http.NewRequestWithContext(ctx, method, "http://"+h.config.Address(port)+path, bytes.NewReader([]byte(body)))
		must(err)
		q.Header.Set("Content-Type", "application/json")
		if port == h.config.Ports.VM {
			q.Header.Set("Authorization", "Bearer "+token)
		}
		answer, err := http.DefaultClient.Do(q)
		must(err)
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		must(err)
		require.Less(h.t, answer.StatusCode, 300, "%s %s: %s", method, path, text)
	}
	create := func(name string) string {
		h.t.Helper()
		vm, err := vmService.CreateVm(call, &vmv1.CreateVmRequest{
			Name: name, OrgId: string(web.Org), ProjectId: string(web.Project), Spec: &vmv1.VmSpec{
				Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 512},
				Disks: []*vmv1.DiskSpec{{Id: "root", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}},
			},
		})
		must(err)
		return vm.GetId()
	}
	// report sends observations in a new stream of a host, and returns when the member has processed them.
	report := func(all ...*agentv1.VmObservation) {
		h.t.Helper()
		stream, err := agents.Report(ctx)
		must(err)
		must(stream.Send(&agentv1.ReportRequest{Vms: all}))
		_, err = stream.CloseAndRecv()
		must(err)
	}
	// built creates a VM and reports that its host has built it.
	built := func(name string) string {
		id := create(name)
		report(&agentv1.VmObservation{VmId: id, Generation: 1, Observed: agentv1.Observed_OBSERVED_BUILT})
		return id
	}
	vm := built("measured")
	one := &vmv1.GetVmRequest{VmId: vm}
	known := &agentv1.VmObservation{VmId: vm, Generation: 1, Observed: agentv1.Observed_OBSERVED_BUILT}
	send(h.config.Ports.KV, http.MethodPut, "/api/v1/kv/costs", `{"value":"first"}`)

	return []measuredCall{
		{name: "CreateVm/gRPC", prepare: func(i int) func() { return func() { create(fmt.Sprintf("g-%04d", i)) } }},
		{name: "CreateVm/REST", prepare: func(i int) func() {
			return func() {
				send(h.config.Ports.VM, http.MethodPost, "/api/v1/vms", fmt.Sprintf(`{"name":"r-%04d","vcpus":1,"memory_mib":512,"disks":[{"id":"root","source":{"type":"blank"},"size_gib":1}]}`, i))
			}
		}},
		{name: "StartVm/gRPC", prepare: func(i int) func() {
			id := built(fmt.Sprintf("s-%04d", i))
			stream, err := agents.Watch(ctx, &agentv1.WatchRequest{Protocol: 1})
			must(err)
			for complete := false; !complete; {
				message, err := stream.Recv()
				must(err)
				complete = message.GetComplete()
			}
			return func() {
				done := make(chan error, 1)
				go func() {
					_, err := vmService.StartVm(call, &vmv1.StartVmRequest{VmId: id})
					done <- err
				}()
				for started := false; !started; {
					message, err := stream.Recv()
					must(err)
					for _, a := range message.GetVms() {
						if a.GetVmId() == id && a.GetPower() == agentv1.Power_POWER_ON {
							report(&agentv1.VmObservation{
								VmId: id, Generation: a.GetGeneration(), Observed: agentv1.Observed_OBSERVED_RUNNING, StartsDone: a.GetStarts(), StartedAt: 1,
							})
							started = true
						}
					}
				}
				must(<-done)
			}
		}},
		{name: "UpdateVm/gRPC", prepare: func(i int) func() {
			return func() {
				_, err := vmService.UpdateVm(call, &vmv1.UpdateVmRequest{VmId: vm, Labels: map[string]string{"n": fmt.Sprintf("%04d", i)}})
				must(err)
			}
		}},
		{name: "GetVm/REST", prepare: always(func() { send(h.config.Ports.VM, http.MethodGet, "/api/v1/vms/"+vm, "") })},
		{name: "GetVm/gRPC", prepare: always(func() { _, err := vmService.GetVm(call, one); must(err) })},
		{name: "ListVms100/gRPC", prepare: always(func() {
			page, err := vmService.ListVms(call, &vmv1.ListVmsRequest{PageSize: 100})
			must(err)
			require.Len(h.t, page.GetVms(), 100)
		})},
		{name: "HeartbeatNode", pause: 60 * time.Millisecond, prepare: always(func() {
			_, err := nodes.HeartbeatNode(ctx, h.heartbeat(h.resources["node"]))
			must(err)
		})},
		{name: "Report", pause: 60 * time.Millisecond, prepare: always(func() { report(known) })},
		{name: "PutKey/REST", prepare: func(i int) func() {
			return func() {
				send(h.config.Ports.KV, http.MethodPut, "/api/v1/kv/costs", fmt.Sprintf(`{"value":"%04d"}`, i))
			}
		}},
		{name: "GetKey/REST", prepare: always(func() { send(h.config.Ports.KV, http.MethodGet, "/api/v1/kv/costs", "") })},
		{name: "GetWallet/gRPC", prepare: always(func() {
			_, err := wallets.GetWallet(call, &creditv1.GetWalletRequest{OrgId: string(web.Org), ProjectId: string(web.Project)})
			must(err)
		})},
		{name: "IssueToken/gRPC", slow: true, prepare: always(func() {
			_, err := who.IssueToken(ctx, &identityv1.IssueTokenRequest{Username: "memb", Password: secret, OrgId: string(web.Org), ProjectId: string(web.Project)})
			must(err)
		})},
	}
}
