package reconcile

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// host is a host in memory. done is the generation that each VM has reached, and log the steps that were executed.
type host struct {
	mu      sync.Mutex
	done    map[cloud.VMID]uint64
	log     []string
	reports map[cloud.VMID]cloud.Observation
	removed []cloud.VMID
	active  map[Weight]int
	most    map[Weight]int
	closed  int

	// weigh returns the weight of a step, and act is called by each step. Both may be nil.
	weigh func(want *agentv1.AssignedVm) Weight
	act   func(ctx context.Context, want *agentv1.AssignedVm) error
	poke  map[cloud.VMID]chan struct{}
}

func newHost() *host {
	return &host{
		done: map[cloud.VMID]uint64{}, reports: map[cloud.VMID]cloud.Observation{}, active: map[Weight]int{},
		most: map[Weight]int{}, poke: map[cloud.VMID]chan struct{}{},
	}
}

func (h *host) start(t *testing.T) *Loop {
	l := New(Options{
		Open: func(id cloud.VMID) Reconciled {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.poke[id] = make(chan struct{}, 1)
			return &fake{h, id, h.poke[id]}
		},
		Report: func(o cloud.Observation) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.reports[o.VM] = o
		},
		Removed: func(id cloud.VMID) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.removed = append(h.removed, id)
		},
		Log: slog.New(slog.DiscardHandler), Launches: 2, Builds: 1,
	})
	t.Cleanup(l.Close)
	return l
}

func (h *host) record(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.log = append(h.log, fmt.Sprintf(format, args...))
}

func (h *host) takeLog() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := strings.Join(h.log, " ")
	h.log = nil
	return out
}

// fake is a VM that reaches the generation of its desired state in one step. The step of DESTROYED removes the VM.
type fake struct {
	host *host
	id   cloud.VMID
	poke chan struct{}
}

func (f *fake) Next(_ context.Context, want *agentv1.AssignedVm) (Step, error) {
	h := f.host
	h.mu.Lock()
	defer h.mu.Unlock()
	have, exists := h.done[f.id]
	s := Step{Observation: cloud.Observation{VM: f.id, Generation: have}, Gone: !exists}
	destroy := want.GetPower() == agentv1.Power_POWER_DESTROYED
	if want == nil || destroy && !exists || !destroy && have == want.GetGeneration() {
		return s, nil
	}
	if h.weigh != nil {
		s.Weight = h.weigh(want)
	}
	s.Name = fmt.Sprintf("g%d", want.GetGeneration())
	weight := s.Weight
	s.Do = func(ctx context.Context) error {
		h.mu.Lock()
		h.active[weight]++
		h.most[weight] = max(h.most[weight], h.active[weight])
		h.mu.Unlock()
		defer func() {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.active[weight]--
		}()
		if h.act != nil {
			if err := h.act(ctx, want); err != nil {
				h.record("%s!g%d", f.id, want.GetGeneration())
				return err
			}
		}
		h.record("%s:g%d", f.id, want.GetGeneration())
		h.mu.Lock()
		defer h.mu.Unlock()
		if destroy {
			delete(h.done, f.id)
		} else {
			h.done[f.id] = want.GetGeneration()
		}
		return nil
	}
	return s, nil
}

func (f *fake) Changed() <-chan struct{} { return f.poke }

func (f *fake) Close() {
	f.host.mu.Lock()
	defer f.host.mu.Unlock()
	f.host.closed++
}

// pass advances the virtual time by d, and waits until all goroutines are blocked.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

type assignments = map[cloud.VMID]*agentv1.AssignedVm

func assigned(generation uint64, power agentv1.Power) *agentv1.AssignedVm {
	return &agentv1.AssignedVm{Generation: generation, Power: power}
}

const (
	on        = agentv1.Power_POWER_ON
	destroyed = agentv1.Power_POWER_DESTROYED
)

func hang(ctx context.Context, _ *agentv1.AssignedVm) error { <-ctx.Done(); return ctx.Err() }

func slow(d time.Duration) func(context.Context, *agentv1.AssignedVm) error {
	return func(ctx context.Context, _ *agentv1.AssignedVm) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// TestNewestWins sets three desired states while a step runs, and checks that only the last one is executed.
func TestNewestWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.act = slow(time.Second)
		l := h.start(t)
		for g := uint64(1); g <= 4; g++ {
			l.Assign(assignments{"a": assigned(g, on)}, nil, false)
			synctest.Wait()
		}
		pass(time.Minute)
		require.Equal(t, "a:g1 a:g4", h.takeLog())
		require.EqualValues(t, 4, h.reports["a"].Generation)
	})
}

// TestBackoff checks that the pauses between failures double, up to 30 s, and that a new desired state ends a pause,
// but a change of the VM does not.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		var at []time.Duration
		start := time.Now()
		h.act = func(context.Context, *agentv1.AssignedVm) error {
			at = append(at, time.Since(start))
			return errors.New("no")
		}
		l := h.start(t)
		l.Assign(assignments{"a": assigned(1, on)}, nil, false)
		pass(10 * time.Minute)
		for i := 1; i < len(at); i++ {
			pause := min(firstPause<<min(i-1, 10), lastPause)
			require.GreaterOrEqual(t, at[i]-at[i-1], pause/2, "try %d", i)
			require.LessOrEqual(t, at[i]-at[i-1], pause+time.Millisecond, "try %d", i)
		}
		require.Greater(t, len(at), 20)

		tries := len(at)
		h.poke["a"] <- struct{}{}
		synctest.Wait()
		require.Len(t, at, tries, "a change of the VM must not shorten the pause")
		l.Assign(assignments{"a": assigned(2, on)}, nil, false)
		synctest.Wait()
		require.Len(t, at, tries+1, "a new desired state must end the pause")
	})
}

// TestNoProgressIsAFailure checks that a step that succeeds but changes nothing is not repeated without a pause.
func TestNoProgressIsAFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		tries := 0
		l := New(Options{
			Open: func(cloud.VMID) Reconciled {
				return withoutProgress(func(context.Context) error { tries++; return nil })
			},
			Report: func(cloud.Observation) {}, Removed: func(cloud.VMID) {}, Log: slog.New(slog.DiscardHandler), Launches: 1, Builds: 1,
		})
		t.Cleanup(l.Close)
		l.Assign(assignments{"a": assigned(1, on)}, nil, false)
		pass(time.Hour)
		require.Less(t, tries, 300)
		require.Empty(t, h.log)
	})
}

type withoutProgress func(context.Context) error

func (s withoutProgress) Next(context.Context, *agentv1.AssignedVm) (Step, error) {
	return Step{Name: "again", Do: s}, nil
}
func (withoutProgress) Changed() <-chan struct{} { return nil }
func (withoutProgress) Close()                   {}

// TestHeavyStepsAreFewAndDoNotStarveLaunches checks the limits of one build and two launches at a time: launches must
// run while builds wait, and light steps must not wait.
func TestHeavyStepsAreFewAndDoNotStarveLaunches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.weigh = func(want *agentv1.AssignedVm) Weight { return Weight(want.GetVcpus()) }
		h.act = slow(time.Minute)
		l := h.start(t)
		all := assignments{}
		for i := range 5 {
			for weight := range uint32(weights) {
				id := cloud.VMID(fmt.Sprintf("%d-%d", weight, i))
				all[id] = &agentv1.AssignedVm{Generation: 1, Power: on, Vcpus: weight}
			}
		}
		l.Assign(all, nil, false)
		pass(61 * time.Second)
		log := h.takeLog()
		require.Equal(t, 5, strings.Count(log, "0-"))
		require.Equal(t, 2, strings.Count(log, "1-"))
		require.Equal(t, 1, strings.Count(log, "2-"))
		pass(time.Hour)
		require.Equal(t, map[Weight]int{Light: 5, Launch: 2, Build: 1}, h.most)
		require.Len(t, h.done, 15)
	})
}

// TestOnlyDestroyCancelsAStep checks that the desired state DESTROYED cancels a step in progress, and that another
// desired state does not.
func TestOnlyDestroyCancelsAStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.weigh = func(*agentv1.AssignedVm) Weight { return Build }
		h.act = hang
		l := h.start(t)
		h.done["a"] = 1
		l.Assign(assignments{"a": assigned(2, on)}, nil, false)
		synctest.Wait()
		l.Assign(assignments{"a": assigned(3, on)}, nil, false)
		pass(time.Hour)
		require.Empty(t, h.takeLog())
		h.mu.Lock()
		h.act = func(ctx context.Context, want *agentv1.AssignedVm) error {
			if want.GetPower() == destroyed {
				return nil
			}
			return hang(ctx, want)
		}
		h.mu.Unlock()
		l.Assign(assignments{"a": assigned(4, destroyed)}, nil, false)
		synctest.Wait()
		require.Equal(t, "a!g2 a:g4", h.takeLog())
	})
}

// TestAdoptedVMIsNotTouchedUnassigned checks that a VM on the host without desired state is reported and not changed,
// also when an assignment of other VMs arrives.
func TestAdoptedVMIsNotTouchedUnassigned(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.done = map[cloud.VMID]uint64{"a": 3, "b": 4}
		l := h.start(t)
		require.NoError(t, l.Adopt(t.Context(), []cloud.VMID{"a", "b"}))
		require.Len(t, h.reports, 2)
		require.Equal(t, []cloud.VMID{"a", "b"}, l.Present())
		l.Assign(assignments{"a": assigned(3, on)}, nil, false)
		l.Assign(assignments{}, nil, false)
		pass(time.Hour)
		require.Empty(t, h.takeLog())
		require.Equal(t, []cloud.VMID{"a", "b"}, l.Present())
	})
}

// TestLeaving checks that a destroyed VM stays in the Loop until it is no longer assigned, and that a released VM is
// destroyed once although it is not assigned.
func TestLeaving(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.done = map[cloud.VMID]uint64{"a": 1, "b": 1}
		l := h.start(t)
		require.NoError(t, l.Adopt(t.Context(), []cloud.VMID{"a", "b"}))
		l.Assign(assignments{"a": assigned(2, destroyed), "b": assigned(1, on)}, nil, false)
		synctest.Wait()
		require.Equal(t, "a:g2", h.takeLog())
		require.Equal(t, []cloud.VMID{"a", "b"}, l.Present(), "a destroyed VM must stay present until it is no longer assigned")
		l.Assign(assignments{"b": assigned(1, on)}, []cloud.VMID{"a"}, false)
		synctest.Wait()
		require.Equal(t, []cloud.VMID{"a"}, h.removed)

		h.mu.Lock()
		h.act = func(context.Context, *agentv1.AssignedVm) error { return errors.New("busy") }
		h.mu.Unlock()
		l.Assign(assignments{}, []cloud.VMID{"b"}, false)
		pass(time.Second)
		l.Assign(assignments{}, nil, false) // the next assignment does not list b as released
		h.mu.Lock()
		h.act = nil
		h.log = nil
		h.mu.Unlock()
		pass(time.Minute)
		require.Equal(t, "b:g1", h.takeLog())
		require.Empty(t, l.Present())
		require.Empty(t, h.done)
		require.Equal(t, 2, h.closed)

		l.Assign(assignments{"b": assigned(9, on)}, nil, false) // a new VM with the id of a removed one
		synctest.Wait()
		require.EqualValues(t, 9, h.done["b"])
	})
}

// TestStoredDestroysNothing checks that a stored assignment executes the desired state ON, but neither DESTROYED nor a
// release.
func TestStoredDestroysNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.done = map[cloud.VMID]uint64{"a": 1, "b": 1, "c": 1}
		l := h.start(t)
		require.NoError(t, l.Adopt(t.Context(), []cloud.VMID{"a", "b", "c"}))
		l.Assign(assignments{"a": assigned(2, destroyed), "b": assigned(2, on)}, []cloud.VMID{"c"}, true)
		synctest.Wait()
		require.Equal(t, "b:g2", h.takeLog())
		l.Assign(assignments{"a": assigned(2, destroyed), "b": assigned(2, on)}, []cloud.VMID{"c"}, false)
		synctest.Wait()
		log := strings.Fields(h.takeLog())
		slices.Sort(log)
		require.Equal(t, []string{"a:g2", "c:g0"}, log)
	})
}

// TestCloseWaits checks that Close cancels steps in progress and closes all VMs. synctest checks that no goroutine is
// left.
func TestCloseWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost()
		h.weigh = func(want *agentv1.AssignedVm) Weight { return Weight(want.GetVcpus()) }
		h.act = hang
		l := h.start(t)
		all := assignments{}
		for i := range 10 {
			all[cloud.VMID(fmt.Sprint(i))] = &agentv1.AssignedVm{Generation: 1, Power: on, Vcpus: uint32(i) % uint32(weights)}
		}
		l.Assign(all, nil, false)
		synctest.Wait()
		l.Close()
		require.Equal(t, 10, h.closed)
		require.Zero(t, h.active[Build])
	})
}

// TestFailedLook checks that a failed observation is repeated with growing pauses, and that nothing is reported without
// one.
func TestFailedLook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		looks := 0
		l := New(Options{
			Open: func(cloud.VMID) Reconciled {
				return unobservable(func() { looks++ })
			},
			Report:  func(cloud.Observation) { t.Error("reported a VM without an observation") },
			Removed: func(cloud.VMID) {}, Log: slog.New(slog.DiscardHandler), Launches: 1, Builds: 1,
		})
		t.Cleanup(l.Close)
		require.NoError(t, l.Adopt(t.Context(), []cloud.VMID{"a"}))
		pass(5 * time.Minute)
		require.Greater(t, looks, 10)
		require.Less(t, looks, 60)
	})
}

type unobservable func()

func (b unobservable) Next(context.Context, *agentv1.AssignedVm) (Step, error) {
	b()
	return Step{}, errors.New("cannot look")
}
func (unobservable) Changed() <-chan struct{} { return nil }
func (unobservable) Close()                   {}
