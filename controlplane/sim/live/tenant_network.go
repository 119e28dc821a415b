package live

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	"github.com/fxamacker/cbor/v2"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/compute/vm"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// networkResource is a network resource whose creation a member has acknowledged.
type networkResource struct {
	id string
	// parent is the VPC of a subnet, NAT gateway or route table, and the subnet of a port.
	parent string
	// leaving is true if the tenant called delete and got no final response, so the resource may or may not exist.
	leaving bool
}

// resourceKind is a kind of network resource.
type resourceKind string

const (
	kindVPC    resourceKind = "VPC"
	kindSubnet resourceKind = "subnet"
	kindPort   resourceKind = "port"
	kindGroup  resourceKind = "security group"
)

// mostResources has the number of resources of each kind that a tenant has at most.
var mostResources = map[resourceKind]int{kindVPC: 2, kindSubnet: 3, kindPort: 4, kindGroup: 3, kindFloating: 2, kindNAT: 2, kindTable: 2}

// subnetPrefixes are the prefixes of the subnets of a VPC. A subnet has few addresses, so that they are used again.
var subnetPrefixes = []string{"10.1.0.0/28", "10.1.0.16/28", "10.1.0.32/28"}

// pick returns a random resource of a kind that certainly exists, nil if there is none.
func (t *tenantClient) pick(kind resourceKind) *networkResource {
	var all []*networkResource
	for i := range t.networks[kind] {
		if r := &t.networks[kind][i]; !r.leaving {
			all = append(all, r)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return all[t.rng.IntN(len(all))]
}

// network makes one random call for a network resource.
func (t *tenantClient) network(ctx context.Context) {
	if t.pick(kindSubnet) == nil || t.rng.IntN(10) == 0 {
		t.createSubnet(ctx)
		return
	}
	if t.rng.IntN(3) == 0 {
		t.edge(ctx)
		return
	}
	switch n := t.rng.IntN(100); {
	case n < 25:
		t.createPort(ctx)
	case n < 35:
		t.createGroup(ctx)
	case n < 50:
		t.changeRules(ctx)
	case n < 60:
		t.changePortGroups(ctx)
	case n < 75:
		t.changeNIC(ctx)
	case n < 90:
		t.deleteResource(ctx, kindPort)
	default:
		t.deleteResource(ctx, []resourceKind{kindGroup, kindGroup, kindSubnet, kindVPC}[t.rng.IntN(4)])
	}
}

// askNetwork makes a call that changes a network resource, as ask does. After a success it sometimes makes the call
// again with the same idempotency key: the response must be the same and be marked as replayed.
func askNetwork[T any](
	ctx context.Context, t *tenantClient, what string,
	call func(context.Context, *process, [32]byte) (network.Result[T], error),
) (out T, err error, ok bool) {
	var r network.Result[T]
	try := func(ctx context.Context, p *process, body [32]byte) (err error) {
		r, err = call(ctx, p, body)
		return err
	}
	if err, ok = t.ask(ctx, what, try); err != nil || !ok {
		return out, err, ok
	}
	if r.Replayed {
		t.f.count("network calls replayed")
	}
	out = r.Value
	if t.rng.IntN(4) > 0 {
		return out, nil, true
	}
	key, body := t.lastKey()
	if err := t.call(ctx, key, func(ctx context.Context, p *process) error { return try(ctx, p, body) }); err != nil {
		return out, nil, true
	}
	t.f.count("network calls repeated after success")
	first, _ := cbor.Marshal(out)
	second, _ := cbor.Marshal(r.Value)
	if !r.Replayed || string(first) != string(second) {
		t.f.fail("%s with the key %s: the first response was %+v, the second %+v, replayed %v", what, key, out, r.Value, r.Replayed)
	}
	return out, nil, true
}

// created adds a resource to the tenant's list after its creation was acknowledged. A creation may be refused because
// of a lack of something, or because something is in use.
func (t *tenantClient) created(kind resourceKind, id, parent string, err error, ok bool) {
	switch {
	case !ok:
	case err == nil:
		t.f.count("network resources created")
		t.networks[kind] = append(t.networks[kind], networkResource{id: id, parent: parent})
	case fault.Is(err, fault.ResourceExhausted):
		t.f.count("network resources exhausted")
	default:
		t.f.fail("creating a %s was refused: %v", kind, err)
	}
}

func (t *tenantClient) createSubnet(ctx context.Context) {
	if t.pick(kindVPC) == nil || t.rng.IntN(4) == 0 && len(t.networks[kindVPC]) < mostResources[kindVPC] {
		q := network.VPCRequest{Name: fmt.Sprintf("%s-%d", t.name, t.asks), CIDR: netip.MustParsePrefix("10.1.0.0/16"), CIDR6: netip.MustParsePrefix("fd00:1::/48")}
		v, err, ok := askNetwork(ctx, t, "create a VPC", func(
			ctx context.Context, p *process, body [32]byte,
		) (network.Result[cloud.VPC], error) {
			return p.networks.CreateVPC(ctx, tenant.Default, q, body)
		})
		t.created(kindVPC, string(v.ID), "", err, ok)
	}
	vpc := t.pick(kindVPC)
	if vpc == nil || len(t.networks[kindSubnet]) >= mostResources[kindSubnet] {
		return
	}
	n := t.rng.IntN(len(subnetPrefixes))
	q := network.SubnetRequest{
		Name: fmt.Sprintf("%s-%d", t.name, t.asks), VPC: cloud.VPCID(vpc.id), DHCP: true, CIDR: netip.MustParsePrefix(subnetPrefixes[n]),
	}
	if t.rng.IntN(2) == 0 {
		q.CIDR6 = netip.MustParsePrefix(fmt.Sprintf("fd00:1:0:%d::/64", n))
	}
	s, err, ok := askNetwork(ctx, t, "create a subnet", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[network.SubnetInfo], error) {
		return p.networks.CreateSubnet(ctx, tenant.Default, q, body)
	})
	if fault.Is(err, fault.InvalidArgument) {
		return // it overlaps another subnet
	}
	t.created(kindSubnet, string(s.ID), vpc.id, err, ok)
}

// groupIDs returns up to two different security groups of the tenant.
func (t *tenantClient) groupIDs() []cloud.SecurityGroupID {
	ids := []cloud.SecurityGroupID{}
	for range t.rng.IntN(3) {
		if g := t.pick(kindGroup); g != nil && !slices.Contains(ids, cloud.SecurityGroupID(g.id)) {
			ids = append(ids, cloud.SecurityGroupID(g.id))
		}
	}
	return ids
}

func (t *tenantClient) createPort(ctx context.Context) {
	subnet := t.pick(kindSubnet)
	if len(t.networks[kindPort]) >= mostResources[kindPort] {
		return
	}
	q := network.PortRequest{Name: fmt.Sprintf("%s-%d", t.name, t.asks), Subnet: cloud.SubnetID(subnet.id), Secured: true}
	if groups := t.groupIDs(); len(groups) > 0 {
		q.Groups = &groups
	}
	// Few MACs and addresses, so that another port often has them or has had them.
	q.MAC[0], q.MAC[5] = 2, byte(1+t.rng.IntN(4))
	if t.rng.IntN(4) > 0 {
		q.MAC = cloud.MAC{}
	}
	if t.rng.IntN(4) == 0 {
		q.IP = t.addressIn(subnet.id)
	}
	port, err, ok := askNetwork(ctx, t, "create a port", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.Port], error) {
		return p.networks.CreatePort(ctx, tenant.Default, q, body)
	})
	if fault.Is(err, fault.AlreadyExists) {
		t.f.count("addresses refused")
		return
	}
	t.created(kindPort, string(port.ID), subnet.id, err, ok)
}

// addressIn returns one of the first addresses of a subnet that ports can have. It returns an invalid address if the
// witness does not know the subnet yet.
func (t *tenantClient) addressIn(subnet string) netip.Addr {
	t.f.audit.mu.Lock()
	defer t.f.audit.mu.Unlock()
	s := t.f.audit.networks.subnets[subnet]
	if s == nil {
		return netip.Addr{}
	}
	a := s.Gateway.Next()
	for range t.rng.IntN(5) {
		a = a.Next()
	}
	return a
}

func (t *tenantClient) createGroup(ctx context.Context) {
	if len(t.networks[kindGroup]) >= mostResources[kindGroup] {
		return
	}
	q := network.GroupRequest{Name: fmt.Sprintf("%s-%d", t.name, t.asks)}
	g, err, ok := askNetwork(ctx, t, "create a security group", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.SecurityGroup], error) {
		return p.networks.CreateSecurityGroup(ctx, tenant.Default, q, body)
	})
	t.created(kindGroup, string(g.ID), "", err, ok)
}

// changeRules adds a rule to a security group, and sometimes removes the group's first rule then.
func (t *tenantClient) changeRules(ctx context.Context) {
	g := t.pick(kindGroup)
	if g == nil {
		return
	}
	port := uint16(1 + t.rng.IntN(1000))
	rule := cloud.Rule{Direction: cloud.Ingress, Protocol: cloud.ProtocolTCP, Ports: cloud.PortRange{First: port, Last: port}}
	if t.rng.IntN(2) == 0 {
		rule.Group = cloud.SecurityGroupID(t.pick(kindGroup).id)
	}
	id := cloud.SecurityGroupID(g.id)
	now, err, ok := askNetwork(ctx, t, "add a rule", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.SecurityGroup], error) {
		return p.networks.AddSecurityGroupRule(ctx, tenant.Default, id, rule, body)
	})
	t.refused("add a rule", err, fault.AlreadyExists)
	if !ok || err != nil || t.rng.IntN(2) == 0 {
		return
	}
	remove := now.Rules[0].ID
	_, err, _ = askNetwork(ctx, t, "remove a rule", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.SecurityGroup], error) {
		return p.networks.RemoveSecurityGroupRule(ctx, tenant.Default, id, remove, body)
	})
	t.refused("remove a rule", err)
}

// refused reports a violation if a call was refused with another kind of error than those expected.
func (t *tenantClient) refused(what string, err error, expected ...fault.Kind) {
	if err == nil || !final(err) || slices.ContainsFunc(expected, func(k fault.Kind) bool { return fault.Is(err, k) }) {
		return
	}
	t.f.fail("%s was refused: %v", what, err)
}

func (t *tenantClient) changePortGroups(ctx context.Context) {
	port := t.pick(kindPort)
	if port == nil {
		return
	}
	groups := t.groupIDs()
	q := network.PortUpdate{ID: cloud.PortID(port.id), Groups: &groups}
	_, err, _ := askNetwork(ctx, t, "change the groups of a port", func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[cloud.Port], error) {
		return p.networks.UpdatePort(ctx, tenant.Default, q, body)
	})
	t.refused("change the groups of a port", err)
}

// randomNIC returns a NIC with one of the tenant's ports, or one in one of the tenant's subnets.
func (t *tenantClient) randomNIC(id string) (n cloud.NIC, ok bool) {
	if port := t.pick(kindPort); port != nil && t.rng.IntN(2) == 0 {
		return cloud.NIC{ID: id, PortID: port.id}, true
	}
	if subnet := t.pick(kindSubnet); subnet != nil {
		return cloud.NIC{ID: id, SubnetID: subnet.id}, true
	}
	return n, false
}

// changeNIC attaches a NIC to one of the tenant's VMs, or detaches one.
func (t *tenantClient) changeNIC(ctx context.Context) {
	if len(t.have) == 0 {
		return
	}
	v := t.have[t.rng.IntN(len(t.have))]
	id := fmt.Sprintf("nic%d", t.rng.IntN(3))
	n, ok := t.randomNIC(id)
	if v.leaving || !ok {
		return
	}
	verb, call := "detach "+id, func(ctx context.Context, p *process, body [32]byte) (vm.PowerResult, error) {
		return p.vms.DetachNIC(ctx, tenant.Default, v.id, id, body)
	}
	if t.rng.IntN(5) < 3 {
		verb, call = "attach "+id, func(ctx context.Context, p *process, body [32]byte) (vm.PowerResult, error) {
			return p.vms.AttachNIC(ctx, tenant.Default, v.id, n, body)
		}
	}
	err, ok := t.ask(ctx, verb+" of "+short(v.id), func(ctx context.Context, p *process, body [32]byte) error {
		_, err := call(ctx, p, body)
		return err
	})
	if ok && err == nil {
		t.f.count("NICs attached or detached")
	}
	t.refused(verb, err, fault.FailedPrecondition, fault.NotFound, fault.AlreadyExists, fault.ResourceExhausted)
}

// deleteResource deletes a random resource of a kind. It is refused while the resource is in use.
func (t *tenantClient) deleteResource(ctx context.Context, kind resourceKind) {
	if len(t.networks[kind]) == 0 {
		return
	}
	at := t.rng.IntN(len(t.networks[kind]))
	r := t.networks[kind][at]
	_, err, ok := askNetwork(ctx, t, "delete "+string(kind)+" "+r.id, func(
		ctx context.Context, p *process, body [32]byte,
	) (network.Result[struct{}], error) {
		return p.deleteResource(ctx, kind, r.id, body)
	})
	switch {
	case !ok:
		t.networks[kind][at].leaving = true
	case err == nil, r.leaving && fault.Is(err, fault.NotFound):
		t.f.count("network resources deleted")
		t.networks[kind] = slices.Delete(t.networks[kind], at, at+1)
		t.deleted = append(t.deleted, r.id)
		if kind == kindVPC {
			t.forgetParts(r.id)
		}
	case fault.Is(err, fault.FailedPrecondition):
	default:
		t.f.fail("deleting %s %s was refused: %v", kind, r.id, err)
	}
}

func (p *process) deleteResource(ctx context.Context, kind resourceKind, id string, body [32]byte) (network.Result[struct{}], error) {
	switch kind {
	case kindVPC:
		return p.networks.DeleteVPC(ctx, tenant.Default, cloud.VPCID(id), body)
	case kindSubnet:
		return p.networks.DeleteSubnet(ctx, tenant.Default, cloud.SubnetID(id), body)
	case kindPort:
		return p.networks.DeletePort(ctx, tenant.Default, cloud.PortID(id), body)
	case kindFloating:
		return p.networks.DeleteFloatingIP(ctx, tenant.Default, cloud.FloatingIPID(id), body)
	case kindNAT:
		return p.networks.DeleteNATGateway(ctx, tenant.Default, cloud.NATGatewayID(id), body)
	case kindTable:
		return p.networks.DeleteRouteTable(ctx, tenant.Default, cloud.RouteTableID(id), body)
	}
	return p.networks.DeleteSecurityGroup(ctx, tenant.Default, cloud.SecurityGroupID(id), body)
}
