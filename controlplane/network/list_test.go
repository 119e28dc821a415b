package network

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestFilteredLists lists ports and subnets with every filter, page by page. Each list must have exactly the records of
// the whole list that the filter selects, in the same order, no matter which index the service reads. Filters that are
// not IDs, and filters with IDs of another project, select nothing.
func TestFilteredLists(t *testing.T) {
	w := newWorld(t)
	ctx := w.as(acme, "")
	group, err := w.networks.CreateSecurityGroup(ctx, acme, GroupRequest{Name: "web"}, [32]byte{})
	require.NoError(t, err)
	vpcIDs, subnetIDs := []cloud.VPCID{""}, []cloud.SubnetID{""}
	for v := range 2 {
		vpc, err := w.networks.CreateVPC(
			ctx, acme, VPCRequest{Name: fmt.Sprintf("v%d", v), CIDR: netip.MustParsePrefix("10.0.0.0/16")}, [32]byte{},
		)
		require.NoError(t, err)
		vpcIDs = append(vpcIDs, vpc.Value.ID)
		for s := range 2 {
			subnet, err := w.networks.CreateSubnet(ctx, acme, SubnetRequest{
				VPC: vpc.Value.ID, CIDR: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(s), 0}), 24),
				Name: fmt.Sprintf("s%d%d", v, s),
			}, [32]byte{})
			require.NoError(t, err)
			subnetIDs = append(subnetIDs, subnet.Value.ID)
			for p := range 3 {
				q := PortRequest{Name: fmt.Sprintf("p%d%d%d", v, s, p), Subnet: subnet.Value.ID}
				if p == 1 {
					q.Groups = &[]cloud.SecurityGroupID{group.Value.ID}
				}
				port, err := w.networks.CreatePort(ctx, acme, q, [32]byte{})
				require.NoError(t, err)
				if p == 2 {
					w.update(func(tx *store.Tx) error {
						setDevice(tx, &port.Value, cloud.PortDevice{Kind: cloud.DeviceVM, ID: fmt.Sprintf("vm%d", s)})
						return nil
					})
				}
			}
		}
	}
	listPorts := func(at cloud.Tenant, name string, f PortFilter) (found []string) {
		for p := (page{Size: 1, Name: name}); ; {
			some, next, err := w.networks.ListPorts(w.as(at, ""), at, p, f)
			require.NoError(t, err)
			for _, one := range some {
				found = append(found, one.Name)
			}
			if p.Token = next; next == "" {
				return found
			}
		}
	}
	every, _, err := w.networks.ListPorts(ctx, acme, page{}, PortFilter{})
	require.NoError(t, err)
	require.Len(t, every, 12)
	for _, name := range []string{"", "p011", "none", "a/b", "p011/"} {
		for _, v := range vpcIDs {
			for _, s := range subnetIDs {
				for _, device := range []string{"", "vm0", "vm0/", "none"} {
					for _, g := range []cloud.SecurityGroupID{"", group.Value.ID} {
						f := PortFilter{VPC: v, Subnet: s, Device: device, Group: g}
						var want []string
						for _, n := range every {
							if (name == "" || n.Name == name) && (v == "" || n.VPC == v) && (s == "" || n.Subnet == s) &&
								(device == "" || n.Device.ID == device) && (g == "" || hasGroup(n, g)) {
								want = append(want, n.Name)
							}
						}
						require.Equal(t, want, listPorts(acme, name, f), "name %q %+v", name, f)
						require.Empty(t, listPorts(evil, name, f))
					}
				}
			}
		}
	}

	inside, _, err := w.networks.ListSubnets(ctx, acme, page{}, SubnetFilter{VPC: vpcIDs[1]})
	require.NoError(t, err)
	require.Equal(t, []string{"s00", "s01"}, []string{inside[0].Name, inside[1].Name})
	inside, _, err = w.networks.ListSubnets(ctx, acme, page{Name: "s10"}, SubnetFilter{VPC: vpcIDs[1]})
	require.NoError(t, err)
	require.Empty(t, inside, "the subnet is in the other VPC")
	inside, _, err = w.networks.ListSubnets(w.as(evil, ""), evil, page{}, SubnetFilter{VPC: vpcIDs[1]})
	require.NoError(t, err)
	require.Empty(t, inside)
	named, _, err := w.networks.ListVPCs(ctx, acme, page{Name: "v1"})
	require.NoError(t, err)
	require.Len(t, named, 1)
	require.Equal(t, vpcIDs[2], named[0].ID)
}

// TestPageTokensOfOtherIndexes requires that a page token stays valid when the next page is read from another index, as
// a member that runs another version may do. The token must not be valid for a list with another filter.
func TestPageTokensOfOtherIndexes(t *testing.T) {
	w := newFeedScript(t)
	w.createVPC("prod")
	w.createVPC("lab")
	ctx := w.as(acme, "")
	for i := range 4 {
		for _, vpc := range []string{"prod", "lab"} {
			w.update(func(tx *store.Tx) error {
				_, err := createService(tx, acme, ServiceRequest{
					Subnet: cloud.SubnetID(w.ids[vpc+"-subnet"]), Service: cloud.ServiceIP{
						Name: fmt.Sprint(vpc, i), Affinity: cloud.AffinityNone,
						Ports: []cloud.ServicePort{{Protocol: cloud.ProtocolTCP, Port: 80, Target: 80}},
					},
				})
				return err
			})
		}
	}
	vpc := cloud.VPCID(w.ids["prod"])
	read := map[string]func(page) ([]*cloud.ServiceIP, string, error){
		"index": func(p page) ([]*cloud.ServiceIP, string, error) {
			return w.networks.ListServiceIPs(ctx, acme, p, vpc)
		},
		"scan": func(p page) ([]*cloud.ServiceIP, string, error) {
			return list(ctx, w.networks, listing[cloud.ServiceIP]{
				table: serviceIPs, t: acme, page: p, filter: string(vpc),
				keep: func(s *cloud.ServiceIP) bool { return s.VPC == vpc },
			})
		},
	}
	for _, order := range [][]string{{"index", "scan", "index", "scan"}, {"scan", "index", "scan", "index"}} {
		var found []string
		p := page{Size: 1}
		for _, from := range order {
			some, next, err := read[from](p)
			require.NoError(t, err)
			require.Len(t, some, 1)
			found = append(found, some[0].Name)
			p.Token = next
		}
		require.Equal(t, []string{"prod0", "prod1", "prod2", "prod3"}, found)
		require.Empty(t, p.Token)
	}
	_, token, err := read["index"](page{Size: 1})
	require.NoError(t, err)
	_, _, err = w.networks.ListServiceIPs(ctx, acme, page{Token: token}, cloud.VPCID(w.ids["lab"]))
	require.ErrorContains(t, err, "page_token")
	_, _, err = w.networks.ListServiceIPs(w.as(evil, ""), evil, page{Token: token}, vpc)
	require.ErrorContains(t, err, "page_token")
}
