package main

import (
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
)

// createNetworks creates one resource of each kind of the network service in project web, whose IDs replace the
// placeholders $vpc, $subnet, $port, $group, $table, $nat, $floating, $service and $peering in requests.
func (h *testMember) createNetworks() {
	n := networkv1.NewNetworkServiceClient(h.public)
	org, project := string(web.Org), string(web.Project)
	mustCall(h, n.CreateExternalNetwork, &networkv1.CreateExternalNetworkRequest{
		Name: "internet", CidrBlock: "203.0.113.0/24", Pools: []*networkv1.AddressRange{{First: "203.0.113.10", Last: "203.0.113.20"}},
	})
	vpc := mustCall(h, n.CreateVpc, &networkv1.CreateVpcRequest{OrgId: org, ProjectId: project, CidrBlock: "10.0.0.0/16"}).GetId()
	peer := mustCall(h, n.CreateVpc, &networkv1.CreateVpcRequest{OrgId: org, ProjectId: project, CidrBlock: "10.1.0.0/16"}).GetId()
	subnet := mustCall(h, n.CreateSubnet, &networkv1.CreateSubnetRequest{OrgId: org, ProjectId: project, VpcId: vpc, CidrBlock: "10.0.0.0/24"}).GetId()
	for name, id := range map[string]string{
		"vpc": vpc, "subnet": subnet,
		"port":     mustCall(h, n.CreatePort, &networkv1.CreatePortRequest{OrgId: org, ProjectId: project, SubnetId: subnet}).GetId(),
		"group":    mustCall(h, n.CreateSecurityGroup, &networkv1.CreateSecurityGroupRequest{OrgId: org, ProjectId: project}).GetId(),
		"table":    mustCall(h, n.CreateRouteTable, &networkv1.CreateRouteTableRequest{OrgId: org, ProjectId: project, VpcId: vpc}).GetId(),
		"nat":      mustCall(h, n.CreateNatGateway, &networkv1.CreateNatGatewayRequest{OrgId: org, ProjectId: project, VpcId: vpc}).GetId(),
		"floating": mustCall(h, n.CreateFloatingIp, &networkv1.CreateFloatingIpRequest{OrgId: org, ProjectId: project}).GetId(),
		"service": mustCall(h, n.CreateServiceIp, &networkv1.CreateServiceIpRequest{
			OrgId: org, ProjectId: project, SubnetId: subnet, Ports: []*networkv1.ServicePort{{Protocol: "tcp", Port: 80}},
		}).GetId(),
		"peering": mustCall(h, n.CreatePeering, &networkv1.CreatePeeringRequest{OrgId: org, ProjectId: project, VpcId: vpc, PeerVpcId: peer}).GetId(),
	} {
		h.resources[name] = id
	}
}
