package vm

import (
	"net/netip"
	"sync"
	"testing"

	"github.com/fxamacker/cbor/v2"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// setNetwork stores that a host can have NICs.
func (w *world) setNetwork(host cloud.NodeID) {
	w.update(func(tx *store.Tx) {
		require.NoError(w.t, network.SetHostNetwork(tx, host, cloud.HostNetwork{VTEP: netip.MustParseAddr("192.0.2.1"), UnderlayMTU: 1500}))
	})
}

// networkHost adds a host that can have NICs.
func (w *world) networkHost(name string) cloud.NodeID {
	id := w.AddHost(name, plenty())
	w.setNetwork(id)
	return id
}

// records returns the number of records in each table that has records of ports, VPCs and VMs.
func (w *world) records() map[string]int {
	w.t.Helper()
	out := map[string]int{}
	require.NoError(w.t, w.store.View(w.t.Context(), func(v *store.View) error {
		for _, table := range []string{
			"net-vpc", "vpc-default", "net-subnet", "subnet-of", "net-port", "port-of", "port-at", "port-mac", "device-port", "net-security-group", "group-port",
			"network-name", "ipam-resting", "ipam-assigned", "vm", "vm-name", "net-floating-ip", "floating-at", "idem",
		} {
			all, _, err := store.NewTable[cbor.RawMessage](table).List(v, 0)
			require.NoError(w.t, err)
			if len(all) > 0 {
				out[table] = len(all)
			}
		}
		return nil
	}))
	return out
}

func (w *world) port(id string) *cloud.Port {
	w.t.Helper()
	p, err := w.networks.GetPort(w.t.Context(), acme, cloud.PortID(id))
	require.NoError(w.t, err)
	return p
}

// assignedNICs returns the NICs in the assignment that the VM's host receives.
func (w *world) assignedNICs(vm *cloud.VM) []*agentv1.AssignedNic {
	w.t.Helper()
	var out []*agentv1.AssignedNic
	require.NoError(w.t, w.store.Local(func(v *store.View) error {
		all, err := w.vms.Assigned(v, vm.Node, vm.ID)
		require.NoError(w.t, err)
		require.Len(w.t, all, 1)
		out = all[0].State.GetNics()
		return nil
	}))
	return out
}

func withNICs(nics ...cloud.NIC) func(*CreateRequest) {
	return func(q *CreateRequest) { q.Spec.Network = nics }
}

// newPort creates a port in a new VPC, which no VM uses.
func (w *world) newPort() cloud.Port {
	w.t.Helper()
	vpc, err := w.networks.CreateVPC(w.as(acme, ""), acme, network.VPCRequest{CIDR: netip.MustParsePrefix("10.1.0.0/16")}, [32]byte{})
	require.NoError(w.t, err)
	subnet, err := w.networks.CreateSubnet(w.as(acme, ""), acme, network.SubnetRequest{VPC: vpc.Value.ID, CIDR: netip.MustParsePrefix("10.1.0.0/24")}, [32]byte{})
	require.NoError(w.t, err)
	port, err := w.networks.CreatePort(w.as(acme, ""), acme, network.PortRequest{Subnet: subnet.Value.ID, Secured: true}, [32]byte{})
	require.NoError(w.t, err)
	return port.Value
}

// TestCreateWithNICs creates VMs with NICs in the default VPC, which the first one creates. The record and the
// assignment to the host must have the values of the ports. Deleting the VMs must delete their ports.
func TestCreateWithNICs(t *testing.T) {
	w := newWorld(t)
	host := w.networkHost("h1")
	web := w.create("web", withNICs(cloud.NIC{ID: "nic0"}, cloud.NIC{ID: "nic1", NetworkID: "default", IP: "10.0.0.9", Model: cloud.ModelE1000}))
	require.Equal(t, web, w.get(web.ID))
	require.Equal(t, 1, w.records()["net-vpc"])
	require.Len(t, web.Spec.Network, 2)
	for i, n := range web.Spec.Network {
		p := w.port(n.PortID)
		require.Equal(t, cloud.PortDevice{Kind: cloud.DeviceVM, ID: string(web.ID)}, p.Device)
		require.Equal(t, host, p.Node)
		require.Equal(t, "web", p.HostName)
		require.EqualValues(t, 1, p.BindingGeneration)
		require.Equal(t, cloud.NetworkPending, p.Status)
		require.True(t, p.Owned)
		want := cloud.NIC{
			ID: []string{"nic0", "nic1"}[i], NetworkID: string(p.VPC), SubnetID: string(p.Subnet), PortID: string(p.ID), MAC: p.MAC.String(),
			IP: []string{"10.0.0.2", "10.0.0.9"}[i], CIDR: "10.0.0.0/20", Gateway: "10.0.0.1", DHCP: true, MTU: 1450,
			Model: []cloud.NICModel{cloud.ModelVirtio, cloud.ModelE1000}[i], SecurityGroups: []string{string(p.Groups[0])},
		}
		require.Equal(t, want, n)
		nic := w.assignedNICs(web)[i]
		require.Equal(t, []any{n.ID, n.PortID, n.NetworkID, n.MAC, uint32(1450)},
			[]any{nic.GetId(), nic.GetPortId(), nic.GetVpcId(), nic.GetMacAddress(), nic.GetMtu()})
	}
	require.Equal(t, []string{"10.0.0.2", "10.0.0.9", "192.0.2.9"}, w.report(web.ID, cloud.ObservedBuilt, func(o *cloud.Observation) {
		o.Addresses = []string{"10.0.0.9", "192.0.2.9"}
	}).Addresses())

	before := w.records()
	db := w.create("db", withNICs(cloud.NIC{ID: "nic0"}))
	require.Equal(t, web.Spec.Network[0].NetworkID, db.Spec.Network[0].NetworkID, "there is one default VPC")
	_, err := w.vms.Delete(w.as(acme, ""), acme, db.ID, false, [32]byte{})
	require.NoError(t, err)
	before["ipam-resting"]++
	require.Equal(t, before, w.records(), "the deleted VM must leave only an address that rests")
	third := w.create("third", withNICs(cloud.NIC{ID: "nic0"}))
	require.NotEqual(t, db.Spec.Network[0].IP, third.Spec.Network[0].IP, "a released address must not be assigned at once")

	_, err = w.vms.deleteOnLeader(w.as(acme, ""), deleteRequest{Tenant: acme, VM: web.ID, Force: true})
	require.NoError(t, err)
	require.Equal(t, 1, w.records()["net-port"], "a forced delete must delete the ports at once")
}

// TestDefaultNetworkNames shows that the default VPC and its subnet are called default. Both can be renamed, and can
// get the name back. No other VPC can have the name at any time.
func TestDefaultNetworkNames(t *testing.T) {
	w := newWorld(t)
	w.networkHost("h1")
	nic := w.create("web", withNICs(cloud.NIC{ID: "nic0"})).Spec.Network[0]
	ctx := w.as(acme, "")
	vpc, err := w.networks.GetVPC(ctx, acme, cloud.VPCID(nic.NetworkID))
	require.NoError(t, err)
	require.Equal(t, "default", vpc.Name)
	require.True(t, vpc.Default)
	subnet, err := w.networks.GetSubnet(ctx, acme, cloud.SubnetID(nic.SubnetID))
	require.NoError(t, err)
	require.Equal(t, "default", subnet.Name)

	other := network.VPCRequest{Name: "default", CIDR: vpc.CIDR}
	for _, name := range []string{"main", "default"} {
		_, err = w.networks.UpdateVPC(ctx, acme, network.VPCUpdate{ID: vpc.ID, Name: &name}, [32]byte{})
		require.NoError(t, err)
		_, err = w.networks.UpdateSubnet(ctx, acme, network.SubnetUpdate{ID: subnet.ID, Name: &name}, [32]byte{})
		require.NoError(t, err)
		_, err = w.networks.CreateVPC(ctx, acme, other, [32]byte{})
		require.ErrorContains(t, err, "reserved")
	}
}

// TestGivenPortStays creates VMs with a port that exists. Only one VM at a time can use it, and it stays when the VM is
// deleted. Each binding must have a new generation.
func TestGivenPortStays(t *testing.T) {
	w := newWorld(t)
	host := w.networkHost("h1")
	port := w.newPort()
	before := w.records()
	for generation := range uint64(2) {
		vm := w.create("web", withNICs(cloud.NIC{ID: "nic0", PortID: string(port.ID)}))
		bound := w.port(string(port.ID))
		require.Equal(t, []any{host, "web", generation + 1, cloud.NetworkPending}, []any{bound.Node, bound.HostName, bound.BindingGeneration, bound.Status})
		require.Equal(t, port.IP.String(), vm.Spec.Network[0].IP)

		err := w.try("db", withNICs(cloud.NIC{ID: "nic0", PortID: string(port.ID)}))
		f, _ := fault.From(err)
		require.True(t, fault.Is(err, fault.FailedPrecondition), "%v", err)
		require.Equal(t, "spec.network[0].port_id", f.Field)
		require.ErrorContains(t, err, "is used by VM web ("+string(vm.ID)+")")

		w.deleteIfPresent(vm.ID)
		free := w.port(string(port.ID))
		require.Equal(t, []any{cloud.NodeID(""), "", cloud.NetworkDown, cloud.PortDevice{}}, []any{free.Node, free.HostName, free.Status, free.Device})
		require.Equal(t, before, w.records())
	}
}

// TestRefusedNICsLeaveNothing creates VMs whose second NIC must be refused. The calls must write nothing, although the
// first NIC could have been made, with a default VPC.
func TestRefusedNICsLeaveNothing(t *testing.T) {
	w := newWorld(t)
	host := w.networkHost("h1")
	w.AwaitFleet()
	port := w.newPort()
	nowhere := string(newID())
	w.update(func(tx *store.Tx) {
		two := uint64(2) // one port exists
		require.NoError(t, tenant.SetQuota(tx, acme.Project, tenant.Quota{Ports: &two}))
	})
	revision, allocated := w.store.Revision(), w.allocated(host)
	for name, c := range map[string]struct {
		nic   cloud.NIC
		kind  fault.Kind
		field string
		says  string
	}{
		"the quota of ports":            {cloud.NIC{}, fault.ResourceExhausted, "", "allows 2 ports"},
		"an unknown VPC":                {cloud.NIC{NetworkID: nowhere}, fault.NotFound, "network_id", nowhere},
		"an unknown subnet":             {cloud.NIC{SubnetID: nowhere}, fault.NotFound, "subnet_id", nowhere},
		"an unknown port":               {cloud.NIC{PortID: nowhere}, fault.NotFound, "port_id", nowhere},
		"a subnet ID that is no UUID":   {cloud.NIC{SubnetID: "x"}, fault.InvalidArgument, "subnet_id", ""},
		"a port and another subnet":     {cloud.NIC{PortID: string(port.ID), SubnetID: nowhere}, fault.InvalidArgument, "subnet_id", string(port.Subnet)},
		"a port and another VPC":        {cloud.NIC{PortID: string(port.ID), NetworkID: nowhere}, fault.InvalidArgument, "network_id", string(port.VPC)},
		"a port and groups":             {cloud.NIC{PortID: string(port.ID), SecurityGroups: []string{nowhere}}, fault.InvalidArgument, "security_groups", "change the groups of the port"},
		"a port and another gateway":    {cloud.NIC{PortID: string(port.ID), Gateway: "10.1.0.9"}, fault.InvalidArgument, "gateway_ip", "10.1.0.1"},
		"a port without DHCP, and DHCP": {cloud.NIC{PortID: string(port.ID), DHCP: true}, fault.InvalidArgument, "dhcp_enabled", "has no DHCP"},
	} {
		nic := c.nic
		nic.ID = "b"
		err := w.try("web", withNICs(cloud.NIC{ID: "a"}, nic))
		f, ok := fault.From(err)
		require.True(t, ok && f.Kind == c.kind, "%s: %v", name, err)
		if c.field != "" {
			require.Equal(t, "spec.network[1]."+c.field, f.Field, name)
		}
		require.Contains(t, f.Message, c.says, name)
	}
	_, err := w.vms.Create(w.as(other, ""), other, small("x", withNICs(cloud.NIC{ID: "a", PortID: string(port.ID)})), [32]byte{})
	require.True(t, fault.Is(err, fault.NotFound), "another project's port must not be found: %v", err)
	err = w.try("web", withNICs(cloud.NIC{ID: "a"}), func(q *CreateRequest) { q.Spec.CPU = &cloud.CPU{VCPUs: 65} })
	require.ErrorContains(t, err, "no host fits")
	require.Equal(t, revision, w.store.Revision(), "refused calls must write nothing")
	require.Equal(t, allocated, w.allocated(host))
}

// TestPlacementNeedsNetwork checks that only hosts with a network get VMs with NICs.
func TestPlacementNeedsNetwork(t *testing.T) {
	w := newWorld(t)
	bare, lacking := w.AddHost("h1", plenty()), w.AddHost("h2", plenty())
	w.update(func(tx *store.Tx) {
		require.NoError(t, network.SetHostNetwork(tx, lacking, cloud.HostNetwork{VTEP: netip.MustParseAddr("192.0.2.2"), Missing: []string{"kernel module vxlan"}}))
	})
	err := w.try("web", withNICs(cloud.NIC{ID: "nic0"}))
	f, ok := fault.From(err)
	require.True(t, ok && f.Reason == "NO_HOST_FITS", "%v", err)
	require.Equal(t, map[string]any{
		"h1": "has no network: the host has not reported its network", "h2": "has no network: kernel module vxlan",
	}, f.Details)
	require.NoError(t, w.try("plain"), "a VM without NICs needs no network")
	w.setNetwork(bare)
	require.Equal(t, bare, w.create("web", withNICs(cloud.NIC{ID: "nic0"})).Node)

	ctx := w.as(acme, "")
	jumbo, err := w.networks.CreateVPC(ctx, acme, network.VPCRequest{CIDR: netip.MustParsePrefix("10.8.0.0/16"), MTU: 8950}, [32]byte{})
	require.NoError(t, err)
	_, err = w.networks.CreateSubnet(ctx, acme, network.SubnetRequest{VPC: jumbo.Value.ID, CIDR: netip.MustParsePrefix("10.8.0.0/24")}, [32]byte{})
	require.NoError(t, err)
	nic := cloud.NIC{ID: "nic0", NetworkID: string(jumbo.Value.ID)}
	setMTU := func(mtu uint32) {
		w.update(func(tx *store.Tx) {
			require.NoError(t, network.SetHostNetwork(tx, bare, cloud.HostNetwork{VTEP: netip.MustParseAddr("192.0.2.1"), UnderlayMTU: mtu}))
		})
	}
	setMTU(8999)
	f, _ = fault.From(w.try("large", withNICs(nic)))
	require.Equal(t, "has no network: its underlay has an MTU of 8999, and the VPC needs 9000", f.Details["h1"])
	setMTU(9000)
	require.EqualValues(t, 8950, w.create("large", withNICs(nic)).Spec.Network[0].MTU)
}

// TestVMsRaceForOneAddress creates VMs at the same time that all want the same address. Exactly one must get it.
func TestVMsRaceForOneAddress(t *testing.T) {
	w := newWorld(t)
	for _, name := range []string{"h1", "h2", "h3"} {
		w.networkHost(name)
	}
	subnet := string(w.newPort().Subnet)
	w.delayCommits()
	var wg sync.WaitGroup
	errs := make([]error, 6)
	for i := range errs {
		wg.Go(func() {
			errs[i] = w.try("web-"+string(rune('a'+i)), withNICs(cloud.NIC{ID: "nic0", SubnetID: subnet, IP: "10.1.0.50"}))
		})
	}
	wg.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
			continue
		}
		f, ok := fault.From(err)
		require.True(t, ok && f.Kind == fault.AlreadyExists, "%v", err)
		require.Equal(t, []string{"ADDRESS_IN_USE", "spec.network[0].ip_address"}, []string{f.Reason, f.Field})
	}
	require.Equal(t, 1, made)
	require.Equal(t, 2, w.records()["net-port"], "the port of the winner, and the one that existed")
	require.Equal(t, 1, w.records()["vm"])
}

// TestChangeNICsOfStoppedVM attaches NICs to a stopped VM and detaches them, each at most once per idempotency key.
func TestChangeNICsOfStoppedVM(t *testing.T) {
	w := newWorld(t)
	w.networkHost("h1")
	port := w.newPort()
	vm := w.createInState(cloud.Stopped, "web")
	before := w.records()

	attach := func(key string, n cloud.NIC) (PowerResult, error) {
		return w.vms.AttachNIC(w.as(acme, key), acme, vm.ID, n, [32]byte{})
	}
	out, err := attach("k", cloud.NIC{ID: "front"})
	require.NoError(t, err)
	require.Equal(t, w.get(vm.ID), out.VM)
	require.Equal(t, vm.Generation+1, out.VM.Generation)
	require.Equal(t, "10.0.0.2", out.VM.Spec.Network[0].IP)
	require.Equal(t, vm.Node, w.port(out.VM.Spec.Network[0].PortID).Node)
	again, err := attach("k", cloud.NIC{ID: "front"})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, out.VM, again.VM)
	_, err = attach("", cloud.NIC{ID: "front"})
	require.True(t, fault.Is(err, fault.AlreadyExists), "%v", err)
	_, err = attach("", cloud.NIC{ID: "back", PortID: string(port.ID)})
	require.NoError(t, err)
	require.Len(t, w.assignedNICs(vm), 2)
	_, err = attach("", cloud.NIC{ID: "x", SubnetID: "y"})
	f, _ := fault.From(err)
	require.Equal(t, "nic.subnet_id", f.Field)

	nics := w.get(vm.ID).Spec.Network
	_, err = w.vms.Update(w.as(acme, ""), acme, vm.ID, Change{Network: visibleNICs(nics), Labels: map[string]string{"a": "b"}})
	require.NoError(t, err, "an update may repeat the NICs of the response")

	detach := func(key, id string) (PowerResult, error) {
		return w.vms.DetachNIC(w.as(acme, key), acme, vm.ID, id, [32]byte{})
	}
	for range 2 {
		out, err = detach("d", "front")
		require.NoError(t, err)
		require.Len(t, out.VM.Spec.Network, 1)
	}
	_, err = detach("", "front")
	require.True(t, fault.Is(err, fault.NotFound), "%v", err)
	out, err = detach("", "back")
	require.NoError(t, err)
	require.Empty(t, out.VM.Spec.Network)
	require.Equal(t, cloud.NetworkDown, w.port(string(port.ID)).Status)
	after := w.records()
	for _, table := range []string{"net-vpc", "vpc-default", "net-subnet", "subnet-of", "net-security-group", "ipam-resting", "ipam-assigned", "network-name", "idem"} {
		before[table] = after[table] // the default VPC stays
	}
	require.Equal(t, before, after)

	for i := range cloud.MaxNICs {
		_, err := attach("", cloud.NIC{ID: "n" + string(rune('0'+i))})
		require.NoError(t, err)
	}
	_, err = attach("", cloud.NIC{ID: "more"})
	require.ErrorContains(t, err, "has 8 NICs")
	creating := w.create("creating")
	_, err = w.vms.AttachNIC(w.as(acme, ""), acme, creating.ID, cloud.NIC{ID: "a"}, [32]byte{})
	require.ErrorContains(t, err, "cannot attach a NIC of VM creating: it is CREATING")
}
