package network

import (
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// Kinds of resources. Names are unique per project and kind.
const (
	kindVPC    = "VPC"
	kindSubnet = "subnet"
	kindPort   = "port"
	kindGroup  = "security group"

	kindTable    = "route table"
	kindNAT      = "NAT gateway"
	kindFloating = "floating IP"
	kindService  = "service IP"
	kindPeering  = "peering"
)

// names has the ID of each resource with a name, at network-name/<project>/<kind>/<name>.
var names = store.NewTable[string]("network-name")

// claimName checks a name and reserves it for the resource with the given ID. An empty name is allowed and reserves
// nothing. It returns AlreadyExists if another resource of the kind has the name.
func claimName(tx *store.Tx, p cloud.ProjectID, kind, name, id string) error {
	if name == "" {
		return nil
	}
	if err := cloud.CheckName("name", name); err != nil {
		return err
	}
	taken, err := names.Has(tx, string(p), kind, name)
	if err != nil {
		return err
	}
	if taken {
		return fault.New(fault.AlreadyExists, "the project has a %s with the name %s", kind, name)
	}
	names.Put(tx, &id, string(p), kind, name)
	return nil
}

// checkReserved returns InvalidArgument if a VPC or a subnet requests the name DefaultNetwork and is neither the
// default VPC nor one of its subnets. So the default VPC can always have this name, and the name denotes the same VPC
// as the network_id "default" of a NIC. inDefault is true for the default VPC and its subnets.
func checkReserved(kind, name string, inDefault bool) error {
	if name != DefaultNetwork || inDefault {
		return nil
	}
	return fault.Invalid("name", "a %s cannot be called %s: the name is reserved for the project's default VPC and its "+
		"subnets", kind, DefaultNetwork).With("constraint", "reserved")
}

// releaseName makes a name available again.
func releaseName(tx *store.Tx, p cloud.ProjectID, kind, name string) {
	if name != "" {
		names.Delete(tx, string(p), kind, name)
	}
}

// rename changes the name of a resource from before to after.
func rename(tx *store.Tx, p cloud.ProjectID, kind, before, after, id string) error {
	if before == after {
		return nil
	}
	releaseName(tx, p, kind, before)
	return claimName(tx, p, kind, after, id)
}
