package billing

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/controlplane/records/store/storetest"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestShortRuns checks that a VM that runs only between two calls of Run is billed one hour, and that several starts
// within one hour cost one hour.
func TestShortRuns(t *testing.T) {
	w := newWorld(t, on)
	w.fund(1000)
	id := w.run("web")
	w.Clock.Advance(time.Second)
	w.stop(id)
	w.Clock.Advance(time.Second)
	require.NoError(t, w.delete(id))
	w.bill()
	require.Equal(t, [3]int64{running, 0, 1000 - running}, w.figures())

	id = w.run("again")
	for range 5 {
		w.Clock.Advance(time.Minute)
		w.stop(id)
		w.bill()
		require.NoError(t, w.start(id))
	}
	w.bill()
	require.EqualValues(t, 2*running, w.wallet().Consumed())
	w.stop(id)
	w.Clock.Advance(hour)
	w.bill()
	require.EqualValues(t, 2*running+off, w.wallet().Consumed(), "a stopped VM must pay for its disks")
	_, err := w.vms.Update(w.as(acme), acme, id, changeTo(4, 1024))
	require.NoError(t, err)
	w.bill()
	require.EqualValues(t, 2*running+off, w.wallet().Consumed())
	require.NoError(t, w.start(id))
	w.bill()
	require.EqualValues(t, 2*running+4*10+4+5, w.wallet().Consumed(), "a VM that was made larger must pay the higher price")
	require.NoError(t, w.clean())
}

// TestEachHourIsChargedOnce checks that each hour is charged once: if Run is called twice, by several leaders at the
// same time, and after five hours without a call.
func TestEachHourIsChargedOnce(t *testing.T) {
	w := newWorld(t, on)
	w.fund(100_000)
	const vms = 10
	for n := range vms {
		w.run(fmt.Sprint("web-", n))
	}
	w.bill()
	w.bill()
	require.EqualValues(t, vms*running, w.wallet().Consumed())

	w.Clock.Advance(hour - time.Millisecond)
	w.bill()
	require.EqualValues(t, vms*running, w.wallet().Consumed(), "no further hour may be charged before the hour is over")
	w.Clock.Advance(time.Millisecond)
	other := w.member(on)
	var work sync.WaitGroup
	for _, leader := range []*Service{w.bills, other, w.member(on)} {
		work.Go(func() {
			if err := leader.Run(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	require.EqualValues(t, 2*vms*running, w.wallet().Consumed())

	w.Clock.Advance(5 * hour)
	require.NoError(t, other.Run(t.Context()))
	w.bill()
	require.EqualValues(t, 7*vms*running, w.wallet().Consumed())
	w.Clock.Advance(-3 * hour) // the member's clock goes back, but the store's time does not
	w.bill()
	require.EqualValues(t, 7*vms*running, w.wallet().Consumed())
	w.Clock.Advance(3*hour + hour/2)
	w.bill()
	require.EqualValues(t, 7*vms*running, w.wallet().Consumed(), "no further hour may be charged while half of the hour is left")
	_, sum := w.unpaidBills()
	require.Zero(t, sum)
	require.NoError(t, w.clean())
}

// TestInterruptedRun ends the leadership during Run at each log entry, which is either lost or committed without a
// response. The next leader's Run must charge what is left, once.
func TestInterruptedRun(t *testing.T) {
	for _, agreed := range []bool{false, true} {
		for cut := 1; ; cut++ {
			w := newWorld(t, on)
			w.fund(100_000)
			for n := range 3 {
				w.run(fmt.Sprint("web-", n))
			}
			w.Clock.Advance(5 * hour)
			ctx, stop := context.WithCancel(t.Context())
			entries := 0
			w.Quorum.Lose = func(after bool) bool {
				if after != agreed {
					return false
				}
				if entries++; entries < cut {
					return false
				}
				stop() // the leadership ends at this entry
				return true
			}
			err := w.bills.Run(ctx)
			stop()
			w.Quorum.Lose = nil
			require.True(t, err == nil || errors.Is(err, storetest.ErrLost) || errors.Is(err, context.Canceled), "%v", err)
			next := w.member(on)
			require.NoError(t, next.Run(t.Context()))
			require.EqualValues(t, 3*6*running, w.wallet().Consumed(), "leadership ended at log entry %d, committed: %v", cut, agreed)
			require.NoError(t, w.clean())
			if entries < cut {
				require.Greater(t, cut, 2, "leadership must have ended at several log entries")
				break
			}
		}
	}
}

// TestLongOutage checks that if more hours are unpaid than one transaction charges, a create is refused as retryable
// and Run charges all of them.
func TestLongOutage(t *testing.T) {
	w := newWorld(t, on)
	w.fund(1_000_000)
	w.run("web")
	w.bill()
	const hours = 2*maxHours + 50
	w.Clock.Advance(hours * hour)
	require.NoError(t, w.bills.count(t.Context()))
	bills, _ := w.unpaidBills()
	require.Len(t, bills, 1)
	before := w.figures()
	_, err := w.tryCreate("more")
	f, _ := fault.From(err)
	require.True(t, f != nil && f.Kind == fault.ResourceExhausted && f.Retry, "%v", err)
	require.Equal(t, before, w.figures(), "a refused create must not change the wallet")
	w.bill()
	require.EqualValues(t, (hours+1)*running, w.wallet().Consumed())
	w.create("more")
	require.NoError(t, w.clean())
}

// TestEnabledLater checks that VMs from before billing was enabled are billed from then on, and that changes and
// deletions while it was disabled are found by the next Run.
func TestEnabledLater(t *testing.T) {
	w := newWorld(t, Rules{})
	id, gone := w.run("web"), w.run("gone")
	w.Clock.Advance(10 * hour)
	w.bill()
	w.fund(10_000)
	enabled := w.member(on)
	require.NoError(t, enabled.Run(t.Context())) // creates the meters and bills of the VMs
	require.NoError(t, enabled.Run(t.Context())) // charges the bills
	require.EqualValues(t, 2*running, w.wallet().Consumed())
	w.Clock.Advance(5 * time.Hour)
	w.bill() // Run of a leader whose configuration disables billing
	require.EqualValues(t, 2*running, w.wallet().Consumed())
	w.stop(gone)
	require.NoError(t, w.delete(gone))
	w.stop(id)
	w.Clock.Advance(hour)
	w.bill()
	require.NoError(t, enabled.Run(t.Context()))
	w.Clock.Advance(hour)
	require.NoError(t, enabled.Run(t.Context()))
	require.EqualValues(t, 2*running+2*off, w.wallet().Consumed(), "hours in which billing was disabled must be free, then the stopped VM must pay for its disks")
	require.NoError(t, w.store.Local(func(v *store.View) error {
		all, _, err := meters.List(v, 0)
		require.Len(t, all, 1)
		return err
	}))
	require.NoError(t, w.clean())
}
