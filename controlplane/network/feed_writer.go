package network

import (
	"cmp"

	"google.golang.org/protobuf/proto"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// Approximate limits of a message to a host.
const (
	maxMessagePorts = 500
	maxMessageBytes = 256 << 10
)

// feedWriter divides records of one revision into messages of limited size.
type feedWriter struct {
	term     uint64
	revision int64
	send     func(*agentv1.SyncNetworksResponse) error

	message *agentv1.SyncNetworksResponse
	bytes   int
}

// next returns the message to which size bytes are to be added. It sends the present one if that is full.
func (w *feedWriter) next(size int) (*agentv1.SyncNetworksResponse, error) {
	if w.message != nil && (len(w.message.Ports) >= maxMessagePorts || w.bytes+size > maxMessageBytes) {
		if err := w.flush(false); err != nil {
			return nil, err
		}
	}
	if w.message == nil {
		w.message = &agentv1.SyncNetworksResponse{}
	}
	w.bytes += size
	return w.message, nil
}

// setProtected adds the protected addresses.
func (w *feedWriter) setProtected(addresses []string) error {
	list := &agentv1.ProtectedAddresses{Addresses: addresses}
	m, err := w.next(proto.Size(list))
	if err != nil {
		return err
	}
	m.Protected = list
	return nil
}

// setEncryption adds the keys of the host.
func (w *feedWriter) setEncryption(keys *agentv1.HostEncryption) error {
	m, err := w.next(proto.Size(keys))
	if err != nil {
		return err
	}
	m.Encryption = keys
	return nil
}

// delete adds the ID of a deleted record.
func (w *feedWriter) delete(id string) error {
	m, err := w.next(len(id))
	if err != nil {
		return err
	}
	m.Deleted = append(m.Deleted, id)
	return nil
}

// add adds a record.
func (w *feedWriter) add(record any) error {
	m, err := w.next(proto.Size(record.(proto.Message)))
	if err != nil {
		return err
	}
	switch r := record.(type) {
	case *agentv1.HostVpc:
		m.Vpcs = append(m.Vpcs, r)
	case *agentv1.HostSubnet:
		m.Subnets = append(m.Subnets, r)
	case *agentv1.HostPort:
		m.Ports = append(m.Ports, r)
	case *networkv1.SecurityGroup:
		m.SecurityGroups = append(m.SecurityGroups, r)
	case *networkv1.RouteTable:
		m.RouteTables = append(m.RouteTables, r)
	case *networkv1.NatGateway:
		m.NatGateways = append(m.NatGateways, r)
	case *agentv1.HostNatGateway:
		m.HostNatGateways = append(m.HostNatGateways, r)
	case *networkv1.FloatingIp:
		m.FloatingIps = append(m.FloatingIps, r)
	case *networkv1.ServiceIp:
		m.ServiceIps = append(m.ServiceIps, r)
	case *networkv1.Peering:
		m.Peerings = append(m.Peerings, r)
	}
	return nil
}

// flush sends the present message, which may be empty. complete is true for the last message of the revision.
func (w *feedWriter) flush(complete bool) error {
	m := w.message
	if m == nil {
		m = &agentv1.SyncNetworksResponse{}
	}
	m.Term, m.Revision, m.Complete = w.term, w.revision, complete
	w.message, w.bytes = nil, 0
	return w.send(m)
}

// compareKeys orders records by kind, project and ID.
func compareKeys(a, b recordKey) int {
	return cmp.Or(cmp.Compare(a.kind, b.kind), cmp.Compare(a.project, b.project), cmp.Compare(a.id, b.id))
}
