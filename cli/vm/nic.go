package vm

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/trivet-cloud/trivet/cli/list"
	"github.com/trivet-cloud/trivet/cli/network"
	"github.com/trivet-cloud/trivet/cli/session"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// nic is a NIC as given on the command line, by the flag --network or by those of `trivet vm nic attach`. At most one
// of subnet, vpc and port is not empty; each is a name or an ID. Without them, the NIC is in the project's default VPC.
type nic struct {
	id, subnet, vpc, port string
	ip, mac               string
	groups                []string
	model                 string
	// named is true if the user has given the id.
	named bool
}

const (
	nicForm    = "SUBNET[,ip=ADDRESS][,mac=MAC][,group=NAME|ID]...[,model=virtio-net|e1000][,id=ID]"
	noNetwork  = "none"
	defaultVPC = "default"
	modelForm  = "virtio-net or e1000"
)

var models = map[string]vmv1.NicModel{
	"virtio-net": vmv1.NicModel_NIC_MODEL_VIRTIO_NET, "e1000": vmv1.NicModel_NIC_MODEL_E1000,
}

// parseNICs parses the values of the flag --network. Without a value, the VM has one NIC in the default VPC. The single
// value "none" is no NIC.
func parseNICs(texts []string) ([]nic, error) {
	if len(texts) == 0 {
		texts = []string{defaultVPC}
	}
	if len(texts) == 1 && texts[0] == noNetwork {
		return nil, nil
	}
	nics := make([]nic, len(texts))
	for n, text := range texts {
		if text == noNetwork {
			return nil, session.Usagef("--network none cannot be combined with another --network")
		}
		var err error
		if nics[n], err = parseNIC(n, text); err != nil {
			return nil, err
		}
	}
	return nics, nil
}

// parseNIC parses text, the value of the n-th flag --network, counted from 0. The NIC's ID is "nic" followed by n,
// unless text contains an ID.
func parseNIC(n int, text string) (nic, error) {
	bad := func(format string, args ...any) (nic, error) {
		return nic{}, session.Usagef("--network %q: %s: want %s", text, fmt.Sprintf(format, args...), nicForm)
	}
	where, options, more := strings.Cut(text, ",")
	x := nic{id: "nic" + strconv.Itoa(n)}
	kind, name, prefixed := strings.Cut(where, ":")
	switch {
	case where == "" || prefixed && name == "":
		return bad("the subnet is missing")
	case where == defaultVPC:
	case !prefixed:
		x.subnet = where
	case kind == "port":
		x.port = name
	case kind == "vpc":
		x.vpc = name
	default:
		return bad("%q is not a subnet, port:NAME, vpc:NAME or default", where)
	}
	var seen []string
	for option := range strings.SplitSeq(options, ",") {
		if !more {
			break
		}
		key, value, _ := strings.Cut(option, "=")
		if slices.Contains(seen, key) && key != "group" {
			return bad("%s is given twice", key)
		}
		seen = append(seen, key)
		switch key {
		case "ip":
			x.ip = value
		case "mac":
			x.mac = value
		case "group":
			x.groups = append(x.groups, value)
		case "model":
			x.model = value
		case "id":
			x.id, x.named = value, true
		default:
			return bad("%q is unknown", option)
		}
		if value == "" {
			return bad("%s has no value", key)
		}
	}
	if err := x.check(""); err != nil {
		return nic{}, session.Usagef("--network %q: %v", text, err)
	}
	return x, nil
}

// check returns an error that names the part of the NIC that is not valid. dashes is "--" if the parts are flags, else
// empty.
func (x *nic) check(dashes string) error {
	if x.port != "" && (x.ip != "" || x.mac != "" || len(x.groups) > 0) {
		return fmt.Errorf("the port has its own address, MAC and groups: leave out %[1]sip, %[1]smac and %[1]sgroup", dashes)
	}
	if x.ip != "" {
		if _, err := cloud.ParseAddr(dashes+"ip", x.ip); err != nil {
			return err
		}
	}
	if x.mac != "" {
		if _, err := cloud.ParseMAC(dashes+"mac", x.mac); err != nil {
			return err
		}
	}
	if _, known := models[cmp.Or(x.model, "virtio-net")]; !known {
		return fmt.Errorf("%smodel %q: want %s", dashes, x.model, modelForm)
	}
	return nil
}

// spec returns the NIC as a field of a request. It looks up the subnet, VPC or port, and the security groups. If only the
// security groups are not found, it returns the NIC without them, and the error.
func (x *nic) spec(ctx context.Context, r *network.Resolver) (spec *vmv1.NetworkSpec, err error) {
	spec = &vmv1.NetworkSpec{Id: x.id, IpAddress: x.ip, MacAddress: x.mac, Model: models[cmp.Or(x.model, "virtio-net")]}
	switch {
	case x.port != "":
		spec.PortId, err = r.FindPort(ctx, x.port)
	case x.subnet != "":
		spec.SubnetId, err = r.FindSubnet(ctx, x.subnet)
	case x.vpc != "":
		spec.NetworkId, err = r.FindVPC(ctx, x.vpc)
	default:
		spec.NetworkId = defaultVPC
	}
	if err != nil {
		return nil, err
	}
	spec.SecurityGroups, err = r.FindGroups(ctx, x.groups)
	return spec, err
}

// freeNICID returns the first of nic0, nic1, … that no NIC has.
func freeNICID(nics []*vmv1.NetworkSpec) string {
	for n := 0; ; n++ {
		id := "nic" + strconv.Itoa(n)
		if !slices.ContainsFunc(nics, func(x *vmv1.NetworkSpec) bool { return x.GetId() == id }) {
			return id
		}
	}
}

// nicColumns returns the columns of a table of NICs of a VM. They read the VM's ports for IPv6 addresses and the status.
func nicColumns(ctx context.Context, r *network.Resolver, vmID func() string) []list.Column[*vmv1.NetworkSpec] {
	type spec = *vmv1.NetworkSpec
	ports := sync.OnceValue(func() map[string]*networkv1.Port { return r.PortsOfVM(ctx, vmID()) })
	port := func(x spec) *networkv1.Port { return ports()[x.GetPortId()] }
	return []list.Column[spec]{
		{Name: "NIC", Text: spec.GetId},
		{Name: "NETWORK", Text: func(x spec) string { return r.VPCName(cmp.Or(port(x).GetVpcId(), x.GetNetworkId())) }, Max: 16},
		{Name: "SUBNET", Text: func(x spec) string { return r.SubnetName(cmp.Or(port(x).GetSubnetId(), x.GetSubnetId())) }, Max: 16},
		{Name: "ADDRESS", Text: func(x spec) string { return cmp.Or(x.GetIpAddress(), port(x).GetIpv6Address()) }},
		{Name: "IPV6 ADDRESS", Text: func(x spec) string { return port(x).GetIpv6Address() }, In: list.InWide},
		{Name: "MAC", Text: spec.GetMacAddress, In: list.InWide},
		{Name: "MODEL", Text: func(x spec) string { return modelName(x.GetModel()) }},
		{Name: "STATUS", Text: func(x spec) string { return network.PortStatus(port(x)) }},
		{Name: "PORT ID", Text: spec.GetPortId, In: list.InWide},
	}
}

// modelName returns the value of --model for a model; empty if it is unspecified.
func modelName(m vmv1.NicModel) string {
	for name, model := range models {
		if model == m {
			return name
		}
	}
	return ""
}
