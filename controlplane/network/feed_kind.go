package network

import (
	"hash/maphash"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// recordKey identifies a record that is sent to hosts. kind is the record's index in feedKinds.
type recordKey struct {
	kind    uint8
	project cloud.ProjectID
	id      string
}

// feedKind describes how records of a table are sent to hosts.
type feedKind struct {
	table string
	// get returns a record, a pointer, or nil if it does not exist.
	get func(v *store.View, path ...string) (any, error)
	// list returns up to limit records that follow the path after.
	list func(v *store.View, limit int, after []string) (records []store.Record[any], more bool, err error)
	// vpc returns the VPC to which a record belongs, or "" if it belongs to none.
	vpc func(x *index, record any) cloud.VPCID
	// message returns the message for hosts, without the fields that hosts do not need.
	message func(record any) proto.Message
}

// Indexes of feedKinds.
const (
	feedVPC = iota
	feedSubnet
	feedGroup
	feedRouteTable
	feedNAT
	feedPort
	feedService
	feedFloating
	feedPeering
)

// feedKinds lists the kinds of records in the order in which they are sent: a record follows those to which it refers.
var feedKinds = [...]feedKind{
	feedVPC:        newKind(vpcs, func(_ *index, v *cloud.VPC) cloud.VPCID { return v.ID }, hostVPC),
	feedSubnet:     newKind(subnets, func(_ *index, n *cloud.Subnet) cloud.VPCID { return n.VPC }, hostSubnet),
	feedGroup:      newKind(groups, func(*index, *cloud.SecurityGroup) cloud.VPCID { return "" }, hostGroup),
	feedRouteTable: newKind(routeTables, func(_ *index, t *cloud.RouteTable) cloud.VPCID { return t.VPC }, hostRouteTable),
	feedNAT:        newKind(natGateways, func(_ *index, n *cloud.NATGateway) cloud.VPCID { return n.VPC }, hostNAT),
	feedPort:       newKind(ports, func(_ *index, p *cloud.Port) cloud.VPCID { return p.VPC }, hostPort),
	feedService:    newKind(serviceIPs, func(_ *index, s *cloud.ServiceIP) cloud.VPCID { return s.VPC }, hostService),
	feedFloating:   newKind(floatingIPs, floatingVPC, hostFloating),
	feedPeering:    newKind(peerings, func(_ *index, p *cloud.Peering) cloud.VPCID { return p.VPC }, hostPeering),
}

// kindNumbers has the index in feedKinds of each table.
var kindNumbers = func() map[string]int {
	out := map[string]int{}
	for i, k := range feedKinds {
		out[k.table] = i
	}
	return out
}()

func newKind[T any](table store.Table[T], vpc func(*index, *T) cloud.VPCID, message func(*T) proto.Message) feedKind {
	return feedKind{
		table: table.Name(),
		get:   func(v *store.View, path ...string) (any, error) { return found(table.Get(v, path...)) },
		list: func(v *store.View, limit int, after []string) (out []store.Record[any], more bool, err error) {
			records, more, err := table.ListAfter(v, limit, after)
			for _, r := range records {
				var value any = r.Value
				out = append(out, store.Record[any]{Path: r.Path, Value: &value})
			}
			return out, more, err
		},
		vpc:     func(x *index, record any) cloud.VPCID { return vpc(x, record.(*T)) },
		message: func(record any) proto.Message { return message(record.(*T)) },
	}
}

// found returns record as any. It returns nil, and not a nil pointer, if there is no record.
func found[T any](record *T, err error) (any, error) {
	if record == nil {
		return nil, err
	}
	return record, err
}

// floatingVPC returns the VPC of the port or service IP to which a floating IP leads.
func floatingVPC(x *index, f *cloud.FloatingIP) cloud.VPCID {
	switch {
	case f.Port != "":
		return x.entries[recordKey{feedPort, f.Project, string(f.Port)}].vpc
	case f.ServiceIP != "":
		return x.entries[recordKey{feedService, f.Project, string(f.ServiceIP)}].vpc
	}
	return ""
}

func hostVPC(v *cloud.VPC) proto.Message {
	m := vpcToProto(v)
	m.Description, m.Status, m.StatusReason, m.UpdatedAt = "", 0, "", 0
	return &agentv1.HostVpc{Vpc: m, Domain: domainOf(v.Project)}
}

func hostSubnet(n *cloud.Subnet) proto.Message {
	m := subnetToProto(&SubnetInfo{Subnet: *n})
	m.Description, m.Status, m.StatusReason, m.UpdatedAt = "", 0, "", 0
	return &agentv1.HostSubnet{Subnet: m, Vni: n.VNI}
}

func hostGroup(g *cloud.SecurityGroup) proto.Message {
	m := groupToProto(g)
	m.Description, m.UpdatedAt = "", 0
	for _, r := range m.Rules {
		r.Description = ""
	}
	return m
}

func hostRouteTable(t *cloud.RouteTable) proto.Message {
	m := tableToProto(t)
	m.Description, m.Status, m.StatusReason, m.UpdatedAt = "", 0, "", 0
	return m
}

// hostNAT returns the message for a NAT gateway. For a gateway on one host, the sender must add the VTEP.
func hostNAT(n *cloud.NATGateway) proto.Message {
	m := natToProto(n)
	m.Description, m.Status, m.StatusReason, m.UpdatedAt = "", 0, "", 0
	if !n.OnOneHost() {
		return m
	}
	return hostGateway(m, &n.Placement)
}

func hostGateway(m *networkv1.NatGateway, p *cloud.Placement) *agentv1.HostNatGateway {
	return &agentv1.HostNatGateway{NatGateway: m, Vni: p.VNI, BindingGeneration: p.BindingGeneration}
}

// hostService returns the message for a service IP. For a service IP with a selector, the message has the health
// reports in place of the backends, because hosts apply the selector themselves.
func hostService(s *cloud.ServiceIP) proto.Message {
	if len(s.Selector) > 0 {
		reported := *s
		reported.Backends = s.Reports
		s = &reported
	}
	m := serviceToProto(s)
	m.Description, m.Status, m.StatusReason, m.UpdatedAt = "", 0, "", 0
	return m
}

// hostFloating returns the message for a floating IP. The sender adds the VTEP to the message for the floating IP of a
// service IP.
func hostFloating(f *cloud.FloatingIP) proto.Message {
	if f.ServiceIP == "" {
		m := floatingToProto(f)
		m.Description, m.Status, m.StatusReason, m.UpdatedAt, m.NodeId = "", 0, "", 0, ""
		return m
	}
	m := hostGateway(&networkv1.NatGateway{
		Id: string(f.ID), Name: f.Name, OrgId: string(f.Org), ProjectId: string(f.Project), VpcId: string(f.VPC),
		ExternalNetwork: f.External, Address: f.Address.String(), NodeId: string(f.Node),
	}, &f.Placement)
	m.ServiceIpId = string(f.ServiceIP)
	return m
}

func hostPeering(p *cloud.Peering) proto.Message {
	m := peeringToProto(p)
	m.Description, m.Status, m.StatusReason, m.UpdatedAt = "", 0, "", 0
	return m
}

// hostPort returns the message for a port without the VTEP, which the sender adds.
func hostPort(p *cloud.Port) proto.Message {
	m := portToProto(p)
	m.Description, m.Status, m.StatusReason, m.UpdatedAt = "", 0, "", 0
	return &agentv1.HostPort{
		Port: m, HostName: p.HostName, BindingGeneration: p.BindingGeneration, MigrationNodeId: string(p.MigrationNode),
	}
}

var feedSeed = maphash.MakeSeed()

// hashOf returns a hash of what hosts see of a record. A change that leaves the hash as it is, such as one of the
// description, is not sent.
func hashOf(m proto.Message) uint64 {
	// The only error of Marshal is text that is not UTF-8, which the conversion to a record refuses.
	body, _ := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	return maphash.Bytes(feedSeed, body)
}
