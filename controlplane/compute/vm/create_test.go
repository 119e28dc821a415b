package vm

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/compute/image"
	"github.com/trivet-cloud/trivet/controlplane/compute/node"
	"github.com/trivet-cloud/trivet/controlplane/records/leader/leadertest"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// TestCreate checks that Create places a VM on a host that has room, allocates its capacity there, and assigns the VM
// and its images to that host only.
func TestCreate(t *testing.T) {
	w := newWorld(t)
	host, idle := w.AddHost("h1", plenty()), w.AddHost("h2", cloud.Capacity{})
	disk := w.image(1, 3<<30)
	w.image(3, 1<<20)
	kernel := w.image(2, 1<<20)
	vm := w.create("web", func(q *CreateRequest) {
		q.Labels, q.Metadata = map[string]string{"env": "prod"}, map[string]string{"note": "x"}
		q.Spec.Boot = cloud.Boot{Kernel: kernel, Cmdline: "quiet"}
		q.Spec.Disks = []cloud.Disk{{ID: "data", Blank: true, SizeGiB: 5, BootIndex: 1}, {ID: "root", Image: disk, SizeGiB: 4}}
	})
	require.Equal(t, cloud.Creating, vm.State)
	require.Equal(t, host, vm.Node)
	require.Equal(t, "ada", vm.CreatedBy)
	require.Equal(t, vm, w.get(vm.ID), "the response equals the record")
	require.Equal(t, cloud.Capacity{VCPUs: 2, MemoryMiB: 512, StorageGiB: 9}, w.allocated(host))
	require.Equal(t, []string{"root", "data"}, []string{vm.Disks[0].ID, vm.Disks[1].ID}, "the disks must be in boot order")
	require.Equal(t, cloud.BusVirtio, vm.Disks[0].Bus)
	require.Equal(t, disk, vm.Disks[0].Image.ID)
	require.Equal(t, kernel, vm.Kernel.ID)
	require.NoError(t, w.store.Local(func(v *store.View) error {
		assignments, err := w.vms.Assigned(v, host)
		require.NoError(t, err)
		require.Len(t, assignments, 1)
		require.Equal(t, string(vm.ID), assignments[0].State.GetVmId())
		require.EqualValues(t, 1, assignments[0].State.GetGeneration())
		for n, uses := range map[int]bool{1: true, 2: true, 3: false} {
			got, err := w.vms.UsesImage(v, host, fmt.Sprintf("%064d", n))
			require.NoError(t, err)
			require.Equal(t, uses, got, "image %d", n)
			elsewhere, err := w.vms.UsesImage(v, idle, fmt.Sprintf("%064d", n))
			require.NoError(t, err)
			require.False(t, elsewhere)
		}
		return nil
	}))
}

// TestCreateRefuses creates VMs that must be refused. Each error must name the reason, and no capacity may be
// allocated.
func TestCreateRefuses(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	w.create("web")
	w.AwaitFleet()
	disk := w.image(1, 3<<30, func(i *cloud.Image) { i.MinMemoryMiB = 256 })
	minimum := w.image(2, 1<<20, func(i *cloud.Image) { i.MinDiskGiB = 8 })
	private := w.image(3, 1<<20, func(i *cloud.Image) { i.Org = other.Org })
	pending := w.image(4, 1<<20, func(i *cloud.Image) { i.Status = cloud.ImagePending })
	arm := w.image(5, 1<<20, func(i *cloud.Image) { i.Architecture = cloud.AArch64 })
	from := func(id cloud.ImageID, gib uint64) func(*CreateRequest) {
		return func(q *CreateRequest) { q.Spec.Disks = []cloud.Disk{{ID: "root", Image: id, SizeGiB: gib}} }
	}
	before := w.allocated(host)
	nowhere := cloud.ImageID(newID())
	for _, c := range []struct {
		name   string
		change func(*CreateRequest)
		kind   fault.Kind
		field  string
		says   []string
	}{
		{"a name in use", func(q *CreateRequest) { q.Name = "web" }, fault.AlreadyExists, "", []string{"web"}},
		{"a bad name", func(q *CreateRequest) { q.Name = "Web" }, fault.InvalidArgument, "name", nil},
		{"another hypervisor", func(q *CreateRequest) { q.Hypervisor = cloud.MicroVM }, fault.InvalidArgument, "hypervisor", []string{"public VM APIs support only the KVM backend"}},
		{"an unknown hypervisor", func(q *CreateRequest) { q.Hypervisor = 255 }, fault.InvalidArgument, "hypervisor", nil},
		{"an image that does not exist", from(nowhere, 5), fault.NotFound, "", []string{string(nowhere)}},
		{"another org's image", from(private, 5), fault.NotFound, "", []string{string(private)}},
		{"another org's kernel", func(q *CreateRequest) { q.Spec.Boot = cloud.Boot{Kernel: private} }, fault.NotFound, "", []string{string(private)}},
		{"another org's initrd", func(q *CreateRequest) { q.Spec.Boot = cloud.Boot{Kernel: disk, Initrd: private} }, fault.NotFound, "", []string{string(private)}},
		{"an image that is not AVAILABLE", from(pending, 5), fault.FailedPrecondition, "", []string{"PENDING"}},
		{"a disk smaller than its image", from(disk, 2), fault.InvalidArgument, "spec.disks[root].size_gib", []string{"3221225472 bytes", "2147483648"}},
		{"a disk smaller than its image requires", from(minimum, 7), fault.InvalidArgument, "spec.disks[root].size_gib", []string{"needs 8 GiB, got 7"}},
		{"less memory than its image requires", func(q *CreateRequest) { from(disk, 4)(q); q.Spec.Memory = &cloud.Memory{SizeMiB: 128} }, fault.InvalidArgument, "spec.memory.size_mib", []string{"256 MiB, got 128"}},
		{"images of two architectures", func(q *CreateRequest) {
			q.Spec.Disks = []cloud.Disk{{ID: "a", Image: disk, SizeGiB: 4}, {ID: "b", Image: arm, SizeGiB: 4}}
		}, fault.InvalidArgument, "", []string{"architectures"}},
		{"an architecture that no host has", from(arm, 1), fault.ResourceExhausted, "", []string{"h1 is of another architecture"}},
		{"a CPU model that no host has", func(q *CreateRequest) { q.Spec.CPU.Model = "Itanium" }, fault.ResourceExhausted, "", []string{"Itanium"}},
		{"more than any host has", func(q *CreateRequest) { q.Spec.CPU = &cloud.CPU{VCPUs: 65} }, fault.ResourceExhausted, "", []string{"h1 has 62 vCPUs free, 65 needed"}},
		{"an invalid selector", func(q *CreateRequest) { q.Labels = map[string]string{cloud.NodeSelectorLabel: "ssd"} }, fault.InvalidArgument, "labels", []string{"k=v"}},
		{"a selector that matches no host", func(q *CreateRequest) { q.Labels = map[string]string{cloud.NodeSelectorLabel: "disk=ssd"} }, fault.ResourceExhausted, "", []string{"labels"}},
		{"an invalid rule for tokens", func(q *CreateRequest) { q.Metadata = map[string]string{cloud.MetadataTokens: "no"} }, fault.InvalidArgument, "metadata", []string{"required or optional"}},
		{"an invalid name of an instance type", func(q *CreateRequest) { q.Metadata = map[string]string{cloud.InstanceTypeKey: "a b"} }, fault.InvalidArgument, "metadata", []string{"the name of an instance type"}},
		{"an invalid restart policy", func(q *CreateRequest) { q.Metadata = map[string]string{cloud.RestartPolicy: "always"} }, fault.InvalidArgument, "metadata", []string{"never or on-failure"}},
		{"a metadata key with a typing error", func(q *CreateRequest) { q.Metadata = map[string]string{"trivet/restrat": "never"} }, fault.InvalidArgument, "metadata", []string{"trivet/restrat is unknown", cloud.RestartPolicy, UserData}},
		{"a label with a typing error", func(q *CreateRequest) { q.Labels = map[string]string{"trivet/afinity": "db"} }, fault.InvalidArgument, "labels", []string{"trivet/afinity is unknown", cloud.AffinityLabel}},
		{"a label in the metadata", func(q *CreateRequest) { q.Metadata = map[string]string{cloud.AffinityLabel: "db"} }, fault.InvalidArgument, "metadata", []string{"is the key of a label"}},
		{"metadata as a label", func(q *CreateRequest) { q.Labels = map[string]string{cloud.HighAvailability: "restart"} }, fault.InvalidArgument, "labels", []string{"is a key of the metadata"}},
		{"a label of hosts", func(q *CreateRequest) { q.Labels = map[string]string{cloud.HostLabel: "h1"} }, fault.InvalidArgument, "labels", []string{"is unknown"}},
		{"a NIC on a host without a network", func(q *CreateRequest) { q.Spec.Network = []cloud.NIC{{ID: "nic0"}} }, fault.ResourceExhausted, "", []string{"h1 has no network: the host has not reported its network"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := w.vms.Create(w.as(acme, "key of "+c.name), acme, small("x", c.change), [32]byte{})
			f, ok := fault.From(err)
			require.True(t, ok && f.Kind == c.kind, "%v", err)
			require.Equal(t, c.field, f.Field)
			for _, part := range c.says {
				require.Contains(t, f.Message, part)
			}
			if c.kind == fault.ResourceExhausted {
				require.Equal(t, "NO_HOST_FITS", f.Reason)
				require.Contains(t, f.Details, "h1", "the details must have an entry for each host")
			}
		})
	}
	require.Equal(t, before, w.allocated(host), "a refused VM must allocate no capacity")
	list, _, err := w.vms.List(t.Context(), acme, 0, "", "")
	require.NoError(t, err)
	require.Len(t, list, 1)
	_, err = w.vms.Create(w.as(acme, "key of a bad name"), acme, small("x"), [32]byte{1})
	require.NoError(t, err, "a failed call must not reserve its idempotency key")
}

// TestNames checks that a second VM of the same name in a project is refused. Another project may use the name, and so
// may the project itself after the VM is deleted.
func TestNames(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	vm := w.createInState(cloud.Stopped, "web")
	_, err := w.vms.Create(w.as(acme, ""), acme, small("web"), [32]byte{})
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	require.ErrorContains(t, err, "the project has a VM called web")
	_, err = w.vms.Create(w.as(other, ""), other, small("web"), [32]byte{})
	require.NoError(t, err)
	_, err = w.vms.Delete(w.as(acme, ""), acme, vm.ID, false, [32]byte{})
	require.NoError(t, err)
	w.create("web")
}

// TestCreateIsIdempotent repeats a create under its idempotency key. For a day it must create no second VM and return
// the first response, even if the VM was deleted. Another request under the same key must be refused.
func TestCreateIsIdempotent(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	ask := func(key string, body byte) (Created, error) {
		return w.vms.Create(w.as(acme, key), acme, small("web"), [32]byte{body})
	}
	first, err := ask("k", 1)
	require.NoError(t, err)
	require.False(t, first.Replayed)
	w.report(first.VM.ID, cloud.ObservedBuilt)
	again, err := ask("k", 1)
	require.NoError(t, err)
	require.Equal(t, Created{VM: first.VM, Replayed: true}, again, "the repeated call must return the stored first response")
	require.Equal(t, taken, w.allocated(host))
	_, err = ask("k", 2)
	require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
	require.ErrorContains(t, err, "idempotency-key")
	_, err = ask("another", 1)
	require.True(t, fault.Is(err, fault.AlreadyExists))

	_, err = w.vms.Delete(w.as(acme, ""), acme, first.VM.ID, false, [32]byte{})
	require.NoError(t, err)
	again, err = ask("k", 1)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	w.Clock.Advance(store.KeepAnswers * time.Millisecond)
	w.Heartbeat(host)
	later, err := ask("k", 1)
	require.NoError(t, err)
	require.False(t, later.Replayed)
	require.NotEqual(t, first.VM.ID, later.VM.ID)
}

// TestCapacity fills three hosts up to their allocatable capacity. The next create must be refused, naming what each
// host lacks. Freed capacity must be usable again.
func TestCapacity(t *testing.T) {
	w := newWorld(t)
	hosts := []cloud.NodeID{
		w.AddHost("h1", cloud.Capacity{VCPUs: 4, MemoryMiB: 4096, StorageGiB: 100}), // room for 2 VMs, by vCPUs
		w.AddHost("h2", cloud.Capacity{VCPUs: 64, MemoryMiB: 512, StorageGiB: 100}), // room for 1 VM, by memory
		w.AddHost("h3", cloud.Capacity{VCPUs: 64, MemoryMiB: 4096, StorageGiB: 19}), // room for 3 VMs, by storage
	}
	var vms []*cloud.VM
	for i := range 6 {
		vms = append(vms, w.create(fmt.Sprint("vm-", i)))
		w.AwaitFleet()
	}
	var sum cloud.Capacity
	for _, id := range hosts {
		n := w.Node(id)
		require.Equal(t, n.Allocatable, n.Allocatable.Minus(n.Allocated).Plus(n.Allocated), "%s holds more than it has", n.Name)
		sum = sum.Plus(n.Allocated)
	}
	require.Equal(t, cloud.Capacity{VCPUs: 12, MemoryMiB: 6 * 512, StorageGiB: 30}, sum)
	_, err := w.vms.Create(w.as(acme, ""), acme, small("more"), [32]byte{})
	f, _ := fault.From(err)
	require.Equal(t, map[string]any{
		"h1": "has 0 vCPUs free, 2 needed", "h2": "has 0 MiB of memory free, 512 needed", "h3": "has 4 GiB of storage free, 5 needed",
	}, f.Details)

	// After the VM is deleted and reported absent, its capacity must be available to another VM.
	full := vms[0]
	w.report(full.ID, cloud.ObservedBuilt)
	_, err = w.vms.Delete(w.as(acme, ""), acme, full.ID, false, [32]byte{})
	require.NoError(t, err)
	w.reportAbsent(full.Node, full.ID, full.Generation+1)
	w.AwaitFleet()
	require.Equal(t, full.Node, w.create("more").Node)
}

// TestConcurrentCreatesShareNoCapacity makes 16 creates at the same time for a host with room for 4 VMs. Exactly 4 must
// succeed. The VMs belong to two projects, so that their transactions conflict only in the host's record.
func TestConcurrentCreatesShareNoCapacity(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", cloud.Capacity{VCPUs: 8, MemoryMiB: 64 << 10, StorageGiB: 1000})
	w.delayCommits()
	errs := make(chan error)
	for i := range 16 {
		go func() {
			at := []cloud.Tenant{acme, other}[i%2]
			_, err := w.vms.Create(w.as(at, ""), at, small(fmt.Sprint("vm-", i)), [32]byte{})
			errs <- err
		}()
	}
	made := 0
	for range 16 {
		if err := <-errs; err == nil {
			made++
		} else {
			require.True(t, fault.Is(err, fault.ResourceExhausted), "%v", err)
		}
	}
	require.Equal(t, 4, made, "more VMs than the host has room for, or fewer")
	require.EqualValues(t, 8, w.allocated(host).VCPUs)
}

// TestGroupsAndSelectors checks that VMs of an anti-affinity group share no host, that groups of other projects do not
// count, and that a VM with a node selector is placed on a host with the labels.
func TestGroupsAndSelectors(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	ssd := w.AddHost("h2", plenty(), func(n *cloud.Node) { n.Labels = map[string]string{"disk": "ssd", "zone": "a"} })
	in := func(group string) func(*CreateRequest) {
		return func(q *CreateRequest) { q.Labels = map[string]string{cloud.AntiAffinityLabel: group} }
	}
	a, b := w.create("a", in("db / α")), w.create("b", in("db / α"))
	require.NotEqual(t, a.Node, b.Node)
	_, err := w.vms.Create(w.as(acme, ""), acme, small("c", in("db / α")), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted))
	require.ErrorContains(t, err, "same anti-affinity group")
	_, err = w.vms.Create(w.as(other, ""), other, small("c", in("db / α")), [32]byte{})
	require.NoError(t, err)
	w.deleteIfPresent(a.ID)
	require.Equal(t, a.Node, w.create("c", in("db / α")).Node)
	for i := range 5 {
		vm := w.create(fmt.Sprint("fast-", i), func(q *CreateRequest) { q.Labels = map[string]string{cloud.NodeSelectorLabel: "disk=ssd,zone=a"} })
		require.Equal(t, ssd, vm.Node)
	}
}

// TestUnavailableHostsAreNotChosen checks that cordoned and unresponsive hosts get no VMs, also if the leader's copy of
// the host records does not show the cordon yet.
func TestUnavailableHostsAreNotChosen(t *testing.T) {
	w := newWorld(t)
	host := w.AddHost("h1", plenty())
	w.update(func(tx *store.Tx) {
		n, err := node.Nodes.Get(tx, string(host))
		require.NoError(t, err)
		n.Cordoned = true
		node.Nodes.Put(tx, n, string(host))
	})
	_, err := w.vms.Create(w.as(acme, ""), acme, small("x"), [32]byte{})
	require.ErrorContains(t, err, "h1 is CORDONED")
	silent := w.AddHost("h2", plenty())
	w.Clock.Advance((cloud.HeartbeatTimeout + 1) * time.Millisecond)
	w.Heartbeat(host)
	_, err = w.vms.Create(w.as(acme, ""), acme, small("x"), [32]byte{})
	f, _ := fault.From(err)
	require.Equal(t, map[string]any{"h1": "is CORDONED", "h2": "is NOT_READY"}, f.Details)
	w.Heartbeat(silent)
	require.Equal(t, silent, w.create("x").Node)
}

// TestPlacementWaitsForHeartbeatsToNewLeader creates a VM at a leader that has received no heartbeat yet. The call must
// wait, and succeed after the host's heartbeat.
func TestPlacementWaitsForHeartbeatsToNewLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		id := w.AddSilentHost("h1", plenty())
		made := make(chan error, 1)
		go func() {
			_, err := w.vms.Create(w.as(acme, ""), acme, small("web"), [32]byte{})
			made <- err
		}()
		select {
		case err := <-made:
			t.Fatalf("the create returned before the host's first heartbeat: %v", err)
		case <-time.After(heartbeatWait / 2):
		}
		w.Heartbeat(id)
		require.NoError(t, <-made)
	})
}

func TestNoHosts(t *testing.T) {
	w := newWorld(t)
	_, err := w.vms.Create(w.as(acme, ""), acme, small("web"), [32]byte{})
	require.True(t, fault.Is(err, fault.ResourceExhausted))
	require.ErrorContains(t, err, "the cloud has no hosts yet")
}

// TestUsedImagesAreRecorded checks that an image cannot be deleted until the VM that uses it is deleted.
func TestUsedImagesAreRecorded(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	id := w.image(1, 1<<30)
	images := image.New(image.Options{Store: w.store, Commands: leadertest.Single(), Members: func() []uint64 { return []uint64{1} }, Self: 1})
	vm := w.create("web", func(q *CreateRequest) { q.Spec.Disks = []cloud.Disk{{ID: "root", Image: id, SizeGiB: 1}} })
	err := images.Delete(w.as(acme, ""), acme.Org, id, [32]byte{})
	require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
	w.deleteIfPresent(vm.ID)
	require.NoError(t, images.Delete(w.as(acme, ""), acme.Org, id, [32]byte{}))
}

// TestList checks that the pages of a list have each VM of the project once, in order, also if a VM is created
// meanwhile. A page token must be valid only for the list that returned it.
func TestList(t *testing.T) {
	w := newWorld(t)
	w.AddHost("h1", plenty())
	for i := range 7 {
		w.create(fmt.Sprint("vm-", i), func(q *CreateRequest) { q.Labels = map[string]string{"odd": fmt.Sprint(i % 2)} })
	}
	_, err := w.vms.Create(w.as(other, ""), other, small("theirs"), [32]byte{})
	require.NoError(t, err)
	var names []string
	var token string
	for page := 0; page == 0 || token != ""; page++ {
		var list []*cloud.VM
		list, token, err = w.vms.List(t.Context(), acme, 3, token, "")
		require.NoError(t, err)
		for _, vm := range list {
			names = append(names, vm.Name)
		}
		if page == 0 {
			w.create("late")
		}
	}
	require.Equal(t, "vm-0 vm-1 vm-2 vm-3 vm-4 vm-5 vm-6", strings.Join(names, " "))
	odd, token, err := w.vms.List(t.Context(), acme, 2, "", `labels.odd = "1" AND state = CREATING`)
	require.NoError(t, err)
	require.Equal(t, []string{"vm-1", "vm-3"}, []string{odd[0].Name, odd[1].Name})
	for _, c := range []struct {
		t             cloud.Tenant
		token, filter string
		size          int32
		field         string
	}{
		{acme, token, "", 0, "page_token"},
		{other, token, `labels.odd = "1" AND state = CREATING`, 0, "page_token"},
		{acme, token[:len(token)-1], `labels.odd = "1" AND state = CREATING`, 0, "page_token"},
		{acme, "é\x00", "", 0, "page_token"},
		{acme, "", "state =", 0, "filter"},
		{acme, "", "", -1, "page_size"},
		{acme, "", "", 1001, "page_size"},
	} {
		_, _, err := w.vms.List(t.Context(), c.t, c.size, c.token, c.filter)
		f, ok := fault.From(err)
		require.True(t, ok && f.Kind == fault.InvalidArgument, "%v", err)
		require.Equal(t, c.field, f.Field)
	}
}

// FuzzPageToken checks that List accepts no token that it did not return. The corpus includes a returned token without
// its last byte.
func FuzzPageToken(f *testing.F) {
	w := newWorld(f)
	w.AddHost("h1", plenty())
	for i := range 3 {
		w.create(fmt.Sprint("vm-", i))
	}
	_, token, err := w.vms.List(f.Context(), acme, 1, "", "")
	require.NoError(f, err)
	f.Add(token[:len(token)-1])
	f.Add("")
	f.Add("AAAA")
	f.Fuzz(func(t *testing.T, text string) {
		list, _, err := w.vms.List(t.Context(), acme, 1, text, "")
		if err != nil {
			require.True(t, fault.Is(err, fault.InvalidArgument), "%v", err)
			return
		}
		require.Empty(t, text, "a token that List did not return")
		require.Len(t, list, 1)
	})
}
