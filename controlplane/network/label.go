package network

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// label returns the text that errors and explanations use for a resource: "VPC prod (0192…)", or "VPC 0192…" for a
// resource without a name.
func label(kind, name, id string) string {
	if name == "" {
		return kind + " " + id
	}
	return kind + " " + name + " (" + id + ")"
}

// resourceNames has a function for each kind that returns the name of a resource. The name is empty if the resource has
// none or does not exist.
var resourceNames = map[string]func(r store.Reader, p cloud.ProjectID, id string) (string, error){
	kindVPC:      nameIn(vpcs, func(v *cloud.VPC) string { return v.Name }),
	kindSubnet:   nameIn(subnets, func(s *cloud.Subnet) string { return s.Name }),
	kindPort:     nameIn(ports, func(p *cloud.Port) string { return p.Name }),
	kindGroup:    nameIn(groups, func(g *cloud.SecurityGroup) string { return g.Name }),
	kindTable:    nameIn(routeTables, func(t *cloud.RouteTable) string { return t.Name }),
	kindNAT:      nameIn(natGateways, func(n *cloud.NATGateway) string { return n.Name }),
	kindFloating: nameIn(floatingIPs, func(f *cloud.FloatingIP) string { return f.Name }),
	kindService:  nameIn(serviceIPs, func(s *cloud.ServiceIP) string { return s.Name }),
	kindPeering:  nameIn(peerings, func(p *cloud.Peering) string { return p.Name }),
}

func nameIn[T any](
	table store.Table[T], name func(*T) string,
) func(store.Reader, cloud.ProjectID, string) (string, error) {
	return func(r store.Reader, p cloud.ProjectID, id string) (string, error) {
		record, err := table.Get(r, string(p), id)
		if err != nil || record == nil {
			return "", err
		}
		return name(record), nil
	}
}

// labelOf reads the name of a project's resource and returns its label.
func labelOf(r store.Reader, p cloud.ProjectID, kind, id string) (string, error) {
	name, err := resourceNames[kind](r, p, id)
	return label(kind, name, id), err
}

// labelDevice returns the label of the VM or service IP that uses a port.
func labelDevice(r store.Reader, p *cloud.Port) (string, error) {
	if p.Device.Kind == cloud.DeviceServiceIP {
		return labelOf(r, p.Project, kindService, p.Device.ID)
	}
	return label("VM", p.HostName, p.Device.ID), nil
}

// listUsers returns the labels of up to maxNamedUsers+1 resources of a kind, whose IDs an index lists under the ID of
// the resource that they use. Each label follows the text before, such as "a route of ".
func listUsers[T any](
	r store.Reader, index store.Table[T], p cloud.ProjectID, used, before, kind string,
) (users []string, err error) {
	all, _, err := index.List(r, maxNamedUsers+1, used)
	if err != nil {
		return nil, err
	}
	for _, u := range all {
		text, err := labelOf(r, p, kind, u.Path[1])
		if err != nil {
			return nil, err
		}
		users = append(users, before+text)
	}
	return users, nil
}
