package node

import (
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// NetworkController sends hosts the state of the VPCs that they need. Package network implements it.
type NetworkController interface {
	// Sync serves a SyncNetworks stream of a host, whose first request is first. It returns when the stream's context
	// ends, when this member's term as leader ends, or when the host opens another stream.
	Sync(node cloud.NodeID, first *agentv1.SyncNetworksRequest, stream agentv1.AgentService_SyncNetworksServer) error
}

// SyncNetworks admits the host and passes the stream to the NetworkController.
func (a *agents) SyncNetworks(stream agentv1.AgentService_SyncNetworksServer) error {
	id, leave, err := a.s.admit(stream.Context())
	if err != nil {
		return err
	}
	defer leave()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	if err := checkProtocol(first.GetProtocol()); err != nil {
		return err
	}
	if a.s.networks == nil {
		return fault.New(fault.Unimplemented, "this member does not serve networks")
	}
	return a.s.networks.Sync(id, first, stream)
}
