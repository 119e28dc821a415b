package main

import (
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// namesOf returns the names of resources with their tenants.
func namesOf[T interface {
	GetOrgId() string
	GetProjectId() string
	GetName() string
}](all []T) (names []string) {
	for _, one := range all {
		names = append(names, one.GetOrgId()+"/"+one.GetProjectId()+"/"+one.GetName())
	}
	return names
}

// TestListsOverAllProjects checks that operators list the volumes, snapshots, images and networks of all projects, or
// of one org, one project or one host.
func TestListsOverAllProjects(t *testing.T) {
	h := startMember(t)
	h.createResources()
	volumes, networks := storagev1.NewVolumeServiceClient(h.public), networkv1.NewNetworkServiceClient(h.public)
	org, project := string(lab.Org), string(lab.Project)
	mustCall(h, vmv1.NewVolumeServiceClient(h.public).CreateVolume, &vmv1.CreateVolumeRequest{Name: "data", OrgId: org, ProjectId: project, SizeGib: 1})
	vpc := mustCall(h, networks.CreateVpc, &networkv1.CreateVpcRequest{OrgId: org, ProjectId: project, Name: "bench", CidrBlock: "10.7.0.0/16"})
	subnet := mustCall(h, networks.CreateSubnet, &networkv1.CreateSubnetRequest{OrgId: org, ProjectId: project, Name: "front", VpcId: vpc.GetId(), CidrBlock: "10.7.1.0/24"})
	mustCall(h, networks.CreatePort, &networkv1.CreatePortRequest{OrgId: org, ProjectId: project, Name: "door", SubnetId: subnet.GetId()})

	mine, theirs := lab.String()+"/", web.String()+"/"
	list := func(of *storagev1.ListAllVolumesRequest) []string {
		return namesOf(mustCall(h, volumes.ListAllVolumes, of).GetVolumes())
	}
	require.Subset(t, list(&storagev1.ListAllVolumesRequest{}), []string{mine + "data", theirs + "data"})
	require.Equal(t, []string{mine + "data"}, list(&storagev1.ListAllVolumesRequest{OrgId: org}))
	require.Equal(t, []string{theirs + "data"}, list(&storagev1.ListAllVolumesRequest{ProjectId: string(web.Project)}))
	require.Empty(t, list(&storagev1.ListAllVolumesRequest{OrgId: org, ProjectId: string(web.Project)}), "the project is of another org")
	require.Empty(t, list(&storagev1.ListAllVolumesRequest{NodeId: h.resources["node"]}), "no volume is bound to the host")
	_, err := volumes.ListAllVolumes(h.adminContext(), &storagev1.ListAllVolumesRequest{NodeId: "rack-1"})
	require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)
	_, err = volumes.ListAllVolumes(h.adminContext(), &storagev1.ListAllVolumesRequest{OrgId: "a b"})
	require.Equal(t, codes.InvalidArgument, status.Code(err), "%v", err)

	vpcs := mustCall(h, networks.ListAllVpcs, &networkv1.ListAllVpcsRequest{}).GetVpcs()
	require.Contains(t, namesOf(vpcs), mine+"bench")
	require.Greater(t, len(vpcs), 1, "VPCs of project web are missing")
	require.Equal(t, []string{mine + "bench"}, namesOf(mustCall(h, networks.ListAllVpcs, &networkv1.ListAllVpcsRequest{OrgId: org}).GetVpcs()))
	subnets := mustCall(h, networks.ListAllSubnets, &networkv1.ListAllSubnetsRequest{OrgId: org}).GetSubnets()
	require.Equal(t, []string{mine + "front"}, namesOf(subnets))
	require.NotZero(t, subnets[0].GetAvailableIpCount())
	require.Equal(t, []string{mine + "door"}, namesOf(mustCall(h, networks.ListAllPorts, &networkv1.ListAllPortsRequest{OrgId: org}).GetPorts()))

	lists := map[string]func(org string) []string{
		"front-end": func(org string) []string {
			return namesOf(mustCall(h, networks.ListAllSecurityGroups, &networkv1.ListAllSecurityGroupsRequest{OrgId: org}).GetSecurityGroups())
		},
		"by-hand": func(org string) []string {
			return namesOf(mustCall(h, networks.ListAllRouteTables, &networkv1.ListAllRouteTablesRequest{OrgId: org}).GetRouteTables())
		},
		"shop": func(org string) []string {
			all := mustCall(h, networks.ListAllServiceIps, &networkv1.ListAllServiceIpsRequest{OrgId: org}).GetServiceIps()
			for _, one := range all {
				if one.GetName() == "shop" {
					require.Len(t, one.GetBackends(), 1, "the port that the selector selects")
				}
			}
			return namesOf(all)
		},
		"partner": func(org string) []string {
			return namesOf(mustCall(h, networks.ListAllPeerings, &networkv1.ListAllPeeringsRequest{OrgId: org}).GetPeerings())
		},
	}
	other := mustCall(h, networks.CreateVpc, &networkv1.CreateVpcRequest{OrgId: org, ProjectId: project, Name: "other", CidrBlock: "10.8.0.0/16"})
	mustCall(h, networks.CreatePort, &networkv1.CreatePortRequest{OrgId: org, ProjectId: project, Name: "back", SubnetId: subnet.GetId(), Labels: map[string]string{"app": "shop"}})
	mustCall(h, networks.CreateSecurityGroup, &networkv1.CreateSecurityGroupRequest{OrgId: org, ProjectId: project, Name: "front-end"})
	mustCall(h, networks.CreateRouteTable, &networkv1.CreateRouteTableRequest{OrgId: org, ProjectId: project, Name: "by-hand", VpcId: vpc.GetId()})
	mustCall(h, networks.CreateServiceIp, &networkv1.CreateServiceIpRequest{
		OrgId: org, ProjectId: project, Name: "shop", VpcId: vpc.GetId(), SubnetId: subnet.GetId(),
		Ports:    []*networkv1.ServicePort{{Name: "http", Protocol: "tcp", Port: 80}},
		Selector: map[string]string{"app": "shop"},
	})
	mustCall(h, networks.CreatePeering, &networkv1.CreatePeeringRequest{OrgId: org, ProjectId: project, Name: "partner", VpcId: vpc.GetId(), PeerVpcId: other.GetId()})
	for name, list := range lists {
		require.Contains(t, list(""), mine+name)
		require.Contains(t, list(org), mine+name)
		require.NotContains(t, list(string(web.Org)), mine+name, "the list is limited to another org")
	}
	require.Empty(t, mustCall(h, networks.ListAllNatGateways, &networkv1.ListAllNatGatewaysRequest{OrgId: org}).GetNatGateways())
	require.Empty(t, mustCall(h, networks.ListAllFloatingIps, &networkv1.ListAllFloatingIpsRequest{OrgId: org}).GetFloatingIps())

	images := mustCall(h, storagev1.NewImageDataServiceClient(h.public).ListAllImages, &storagev1.ListAllImagesRequest{}).GetImages()
	require.Len(t, images, 1)
	require.Equal(t, h.resources["image"], images[0].GetId())
	require.Empty(t, mustCall(h, storagev1.NewSnapshotServiceClient(h.public).ListAllSnapshots, &storagev1.ListAllSnapshotsRequest{}).GetSnapshots())
}
