package vm

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/trivet-cloud/trivet/cli/apply"
	"github.com/trivet-cloud/trivet/cli/session"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
)

// portGroups are the security groups that a port gets. Both are given by ID.
type portGroups struct {
	port   string
	groups []string
}

// newNIC is a NIC of a file, and the NIC as a field of a request.
type newNIC struct {
	nic
	spec *vmv1.NetworkSpec
}

// allNICs compares the NICs. A port of the file is the NIC that has this port, and any other NIC of the file is the NIC
// with the same ID, which is by default its place in the file.
func (x *comparison) allNICs(ctx context.Context) error {
	if !x.given("network") {
		return nil
	}
	nics, err := parseNICs(x.f.networks)
	if err != nil {
		return err
	}
	all := make([]newNIC, len(nics))
	var ports []string // IDs of the ports that the file names
	for i, n := range nics {
		spec, err := n.spec(ctx, x.resolver)
		if err != nil {
			if !x.willExist(err, n) {
				return err
			}
			if spec == nil { // Otherwise only a security group is missing.
				spec = &vmv1.NetworkSpec{Id: n.id}
			}
		}
		if all[i] = (newNIC{n, spec}); n.port != "" {
			ports = append(ports, spec.GetPortId())
		}
	}
	var missing []newNIC
	for _, n := range all {
		have := x.find(n)
		switch {
		case have == nil:
			missing = append(missing, n)
		case n.port == "" && slices.Contains(ports, have.GetPortId()):
			err = session.Errorf(codes.FailedPrecondition, "give the network of the file an id that no NIC has",
				"%s is a port that the file also lists", n.id)
		default:
			err = x.compareNIC(ctx, n, have)
		}
		if err != nil {
			return err
		}
	}
	x.addNICs(missing)
	return nil
}

// find returns the NIC of the VM that is the given NIC of the file, or nil if the VM does not have it.
func (x *comparison) find(n newNIC) *vmv1.NetworkSpec {
	for _, have := range x.vm.GetSpec().GetNetwork() {
		if n.port != "" && have.GetPortId() == n.spec.GetPortId() || n.port == "" && have.GetId() == n.id {
			return have
		}
	}
	return nil
}

// addNICs adds NICs that the VM does not have. A port gets another ID if its place in the file is that of another NIC.
func (x *comparison) addNICs(missing []newNIC) {
	present := x.vm.GetSpec().GetNetwork()
	for _, n := range missing {
		x.nics = append(x.nics, n.spec)
	}
	for _, n := range missing {
		if !n.named && slices.ContainsFunc(present, func(have *vmv1.NetworkSpec) bool { return have.GetId() == n.id }) {
			n.spec.Id = freeNICID(slices.Concat(present, x.nics))
		}
		x.plan.Add("%s attached", n.spec.GetId())
	}
}

// willExist reports whether err is about a subnet, a VPC or a security group that a dry run would create.
func (x *comparison) willExist(err error, n nic) bool {
	if x.run.WillExist(err, "subnet", n.subnet) || x.run.WillExist(err, "vpc", n.vpc) {
		return true
	}
	return slices.ContainsFunc(n.groups, func(group string) bool { return x.run.WillExist(err, "security-group", group) })
}

// compareNIC compares a NIC of the file with a NIC of the VM. Only the security groups can be changed.
func (x *comparison) compareNIC(ctx context.Context, n newNIC, have *vmv1.NetworkSpec) (err error) {
	want := n.spec
	fixed := func(what, present, file string) error { return apply.Fixed(have.GetId()+": "+what, present, file) }
	network := want.GetNetworkId()
	if network == defaultVPC { // the word in a request; the NIC has the ID of the VPC, whose name is this word
		if network, err = x.resolver.FindVPC(ctx, defaultVPC); err != nil {
			return err
		}
	}
	switch {
	case n.named && n.id != have.GetId():
		return fixed("id", have.GetId(), n.id)
	case n.subnet != "" && want.GetSubnetId() != have.GetSubnetId():
		return fixed("subnet", x.resolver.SubnetName(have.GetSubnetId()), n.subnet)
	case network != "" && network != have.GetNetworkId():
		return fixed("vpc", x.resolver.VPCName(have.GetNetworkId()), cmp.Or(n.vpc, defaultVPC))
	case n.ip != "" && !apply.SameAddress(n.ip, have.GetIpAddress()):
		return fixed("ip", have.GetIpAddress(), n.ip)
	case n.mac != "" && !strings.EqualFold(strings.ReplaceAll(n.mac, "-", ":"), have.GetMacAddress()):
		return fixed("mac", have.GetMacAddress(), n.mac)
	case n.model != "" && want.GetModel() != have.GetModel():
		return fixed("model", modelName(have.GetModel()), n.model)
	case len(n.groups) == 0:
		return nil
	}
	return x.nicGroups(ctx, want, have)
}

// nicGroups compares the security groups. They are those of the port: the NIC has those of the time when it was made.
func (x *comparison) nicGroups(ctx context.Context, want, have *vmv1.NetworkSpec) error {
	present, err := x.resolver.GroupsOfPort(ctx, have.GetPortId())
	if err != nil {
		return err
	}
	groups := slices.Sorted(slices.Values(want.GetSecurityGroups()))
	if slices.Equal(slices.Compact(groups), slices.Sorted(slices.Values(present))) {
		return nil
	}
	x.groups = append(x.groups, portGroups{have.GetPortId(), want.GetSecurityGroups()})
	x.plan.Add("%s groups", have.GetId())
	return nil
}
