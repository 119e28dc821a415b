package vm

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// listWatcher runs WatchList or WatchAll, and returns its changes as text with the names of VMs.
type listWatcher struct {
	t       *testing.T
	changes chan ListChange
	names   map[cloud.VMID]string
}

func watchList(t *testing.T, run func(context.Context, func(ListChange) error) error) *listWatcher {
	l := &listWatcher{t, make(chan ListChange), map[cloud.VMID]string{}}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = run(ctx, func(c ListChange) error {
			select {
			case l.changes <- c:
			case <-ctx.Done():
			}
			return ctx.Err()
		})
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return l
}

func (l *listWatcher) next() string {
	l.t.Helper()
	c := <-l.changes
	if c.VM == nil {
		return fmt.Sprint(map[ListChangeType]string{ListSynced: "synced", RemovedFromList: "removed"}[c.Type], " ", l.names[c.ID])
	}
	l.names[c.ID] = c.VM.Name
	require.NotZero(l.t, c.At)
	return fmt.Sprint(map[ListChangeType]string{PresentInList: "present", ChangedInList: "changed"}[c.Type], " ", c.VM.Name, " ", c.VM.State)
}

func TestWatchList(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	web := w.create("web")
	all := watchList(t, func(ctx context.Context, send func(ListChange) error) error {
		return w.vms.WatchList(ctx, acme, "", send)
	})
	stopped := watchList(t, func(ctx context.Context, send func(ListChange) error) error {
		return w.vms.WatchList(ctx, acme, "state = STOPPED", send)
	})
	cloudwide := watchList(t, func(ctx context.Context, send func(ListChange) error) error { return w.vms.WatchAll(ctx, "", send) })
	foreign := watchList(t, func(ctx context.Context, send func(ListChange) error) error {
		return w.vms.WatchList(ctx, other, "", send)
	})
	require.Equal(t, "synced ", foreign.next())
	require.Equal(t, "synced ", stopped.next())
	for _, l := range []*listWatcher{all, cloudwide} {
		require.Equal(t, "present web CREATING", l.next())
		require.Equal(t, "synced ", l.next())
	}

	w.report(web.ID, cloud.ObservedBuilt)
	require.Equal(t, "changed web STOPPED", all.next())
	require.Equal(t, "changed web STOPPED", cloudwide.next())
	require.Equal(t, "changed web STOPPED", stopped.next())

	_, err := w.vms.changePowerOnLeader(w.as(acme, ""), powerRequest{Tenant: acme, VM: web.ID, Action: start})
	require.NoError(t, err)
	require.Equal(t, "changed web STARTING", all.next())
	require.Equal(t, "removed web", stopped.next(), "the VM does not match the filter any more")

	w.create("db")
	require.Equal(t, "changed db CREATING", all.next())
	require.Equal(t, "changed web STARTING", cloudwide.next())
	require.Equal(t, "changed db CREATING", cloudwide.next())

	w.deleteIfPresent(web.ID)
	for change := all.next(); change != "removed web"; change = all.next() {
		require.Contains(t, change, "changed web")
	}
	err = w.vms.WatchAll(t.Context(), "color = red", nil)
	require.True(t, fault.Is(err, fault.InvalidArgument), err)
}

// TestListAll lists the VMs of two projects page by page.
func TestListAll(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	for i := range 3 {
		w.create(fmt.Sprint("web", i))
	}
	var names []string
	for token := ""; ; {
		page, next, err := w.vms.ListAll(t.Context(), 2, token, `project_id = "`+string(acme.Project)+`"`)
		require.NoError(t, err)
		for _, vm := range page {
			names = append(names, vm.Name)
		}
		if token = next; token == "" {
			break
		}
		_, _, err = w.vms.List(t.Context(), acme, 2, token, "")
		require.True(t, fault.Is(err, fault.InvalidArgument), "a token is only good for its own list")
	}
	require.Equal(t, []string{"web0", "web1", "web2"}, names)
	none, _, err := w.vms.ListAll(t.Context(), 0, "", `org_id = "nobody"`)
	require.NoError(t, err)
	require.Empty(t, none)
}

// TestDetails checks that a VM records why its host was chosen.
func TestDetails(t *testing.T) {
	w := newWorld(t)
	w.AddHost("small", cloud.Capacity{VCPUs: 1, MemoryMiB: 64, StorageGiB: 1})
	w.AddHost("large", plenty())
	made := w.create("web")
	vm, host, err := w.vms.Details(t.Context(), acme, made.ID)
	require.NoError(t, err)
	require.Equal(t, "large", host)
	require.Equal(t, vm.Node, vm.Choice.Node)
	require.NotZero(t, vm.Choice.At)
	require.Equal(t, "the best of the hosts that fit, by free capacity", vm.Choice.Reason)
	_, _, err = w.vms.Details(t.Context(), other, made.ID)
	require.True(t, fault.Is(err, fault.NotFound), err)
}
