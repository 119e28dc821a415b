package network

import (
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// validRequests has, for each RPC, requests that succeed, as JSON. $NAME is the ID of a resource of the caller from
// project.create. The requests of an RPC together set each field that refers to a resource of a tenant.
// TestReferencesToOtherTenants fails for a field that is missing here.
var validRequests = map[string][]string{
	"CreateVpc": {`{"cidr_block": "10.6.0.0/16"}`}, "ListVpcs": {`{}`},
	"GetVpc": {`{"id": "$vpc"}`}, "UpdateVpc": {`{"id": "$vpc", "name": "new"}`}, "DeleteVpc": {`{"id": "$spare-vpc"}`},
	"CreateSubnet": {`{"vpc_id": "$vpc", "cidr_block": "10.0.9.0/24"}`},
	"GetSubnet":    {`{"id": "$subnet"}`}, "ListSubnets": {`{"vpc_id": "$vpc"}`},
	"UpdateSubnet": {`{"id": "$subnet", "name": "new"}`}, "DeleteSubnet": {`{"id": "$spare-subnet"}`},
	"CreatePort": {`{"subnet_id": "$subnet", "security_groups": {"ids": ["$group"]}}`},
	"GetPort":    {`{"id": "$port"}`}, "DeletePort": {`{"id": "$spare-port"}`},
	"ListPorts": {`{"vpc_id": "$vpc", "subnet_id": "$subnet", "device_id": "$vm",
		"security_group_id": "$group"}`},
	"UpdatePort":          {`{"id": "$port", "security_groups": {"ids": ["$group"]}}`},
	"CreateSecurityGroup": {`{"rules": [{"direction": "DIRECTION_INGRESS", "remote_group_id": "$group"}]}`},
	"GetSecurityGroup":    {`{"id": "$group"}`}, "ListSecurityGroups": {`{}`},
	"UpdateSecurityGroup": {`{"id": "$group", "name": "new"}`}, "DeleteSecurityGroup": {`{"id": "$spare-group"}`},
	"AddSecurityGroupRule": {
		`{"security_group_id": "$group", "rule": {"direction": "DIRECTION_INGRESS", "remote_group_id": "$spare-group"}}`,
	},
	"RemoveSecurityGroupRule": {`{"security_group_id": "$group", "rule_id": "$rule"}`},
	"CreateRouteTable": {
		`{"vpc_id": "$vpc", "subnet_ids": ["$spare-subnet"],
		"routes": [{"destination": "192.0.2.0/24", "target_type": "ROUTE_TARGET_PORT", "target_id": "$router"}]}`,
		`{"vpc_id": "$vpc",
		"routes": [{"destination": "192.0.2.0/24", "target_type": "ROUTE_TARGET_NAT_GATEWAY", "target_id": "$nat"}]}`,
		`{"vpc_id": "$vpc",
		"routes": [{"destination": "10.9.0.0/16", "target_type": "ROUTE_TARGET_PEERING", "target_id": "$peering"}]}`,
	},
	"GetRouteTable": {`{"id": "$table"}`}, "ListRouteTables": {`{"vpc_id": "$vpc"}`},
	"UpdateRouteTable": {
		`{"id": "$table", "subnet_ids": {"ids": ["$spare-subnet"]}, "routes": {"routes": [
		{"destination": "192.0.2.0/24", "target_type": "ROUTE_TARGET_PORT", "target_id": "$router"}]}}`,
	},
	"DeleteRouteTable": {`{"id": "$table"}`},
	"CreateNatGateway": {`{"vpc_id": "$vpc"}`},
	"UpdateNatGateway": {`{"id": "$nat", "description": "x"}`},
	"GetNatGateway":    {`{"id": "$nat"}`}, "ListNatGateways": {`{"vpc_id": "$vpc"}`},
	"DeleteNatGateway": {`{"id": "$nat"}`},
	"CreateFloatingIp": {`{"port_id": "$port"}`, `{"service_ip_id": "$service"}`},
	"GetFloatingIp":    {`{"id": "$floating"}`}, "ListFloatingIps": {`{"port_id": "$vm-port"}`},
	"UpdateFloatingIp": {`{"id": "$floating", "port_id": "$port"}`, `{"id": "$floating", "service_ip_id": "$service"}`},
	"DeleteFloatingIp": {`{"id": "$floating"}`},
	"CreateServiceIp": {
		`{"vpc_id": "$vpc", "subnet_id": "$subnet", "ports": [{"protocol": "tcp", "port": 80}],
		"backends": [{"port_id": "$port"}]}`,
		`{"subnet_id": "$subnet", "ports": [{"protocol": "tcp", "port": 80}], "backends": [{"port_id": "$port"}]}`,
	},
	"GetServiceIp": {`{"id": "$service"}`}, "ListServiceIps": {`{"vpc_id": "$vpc"}`},
	"UpdateServiceIp": {`{"id": "$service", "ports": [{"protocol": "tcp", "port": 80}], "backends": [{"port_id": "$port"}]}`},
	"DeleteServiceIp": {`{"id": "$service"}`},
	"CreatePeering":   {`{"vpc_id": "$vpc", "peer_vpc_id": "$third-vpc"}`},
	"AcceptPeering":   {`{"id": "$peering"}`}, "GetPeering": {`{"id": "$peering"}`},
	"UpdatePeering": {`{"id": "$peering", "name": "x"}`},
	"ListPeerings":  {`{"vpc_id": "$vpc"}`}, "DeletePeering": {`{"id": "$peering"}`},
	"ListExternalNetworks": {`{}`}, "GetExternalNetwork": {`{"name": "internet"}`},
	"ExplainPath": {
		`{"from_port_id": "$port", "to_port_id": "$vm-port"}`, `{"from_vm_id": "$vm", "to_address": "10.0.1.1"}`,
		`{"from_port_id": "$port", "to_vm_id": "$vm"}`,
	},
}

// withoutReferences has the reasons why fields do not refer to a resource of a tenant although isReference matches
// their names.
var withoutReferences = map[string]string{
	"org_id":          "TestReferencesToOtherTenants tests it for each RPC",
	"project_id":      "TestReferencesToOtherTenants tests it for each RPC",
	"peer_org_id":     "a peering is between projects, and the other one must accept it",
	"peer_project_id": "a peering is between projects, and the other one must accept it",
	"rules.id":        "is set by the service only",
	"rule.id":         "is set by the service only",
}

// ofOperators are the RPCs that tenants must not call.
var ofOperators = []string{
	"CreateExternalNetwork", "UpdateExternalNetwork", "DeleteExternalNetwork", "ListAllVpcs", "ListAllSubnets", "ListAllPorts",
	"ListAllSecurityGroups", "ListAllRouteTables", "ListAllNatGateways", "ListAllFloatingIps", "ListAllServiceIps", "ListAllPeerings",
}

// isReference matches the names of fields that have the ID or the IDs of a resource.
var isReference = regexp.MustCompile(`(^|_)ids?$`)

// references returns the paths of the fields of a message that refer to resources, such as "rules.remote_group_id".
func references(m protoreflect.MessageDescriptor, prefix string) (paths []string) {
	for i := range m.Fields().Len() {
		f := m.Fields().Get(i)
		path := prefix + string(f.Name())
		switch {
		case f.Message() != nil:
			paths = append(paths, references(f.Message(), path+".")...)
		case f.Kind() == protoreflect.StringKind && isReference.MatchString(string(f.Name())) &&
			withoutReferences[path] == "":
			paths = append(paths, path)
		}
	}
	return paths
}

// texts calls visit for each string in a value that was decoded from JSON, with the path of its field and a function
// that replaces it.
func texts(value any, path string, visit func(path, text string, replace func(string))) {
	switch v := value.(type) {
	case map[string]any:
		for name, inner := range v {
			at := strings.TrimPrefix(path+"."+name, ".")
			if text, ok := inner.(string); ok {
				visit(at, text, func(s string) { v[name] = s })
			} else {
				texts(inner, at, visit)
			}
		}
	case []any:
		for i, inner := range v {
			if text, ok := inner.(string); ok {
				visit(path, text, func(s string) { v[i] = s })
			} else {
				texts(inner, path, visit)
			}
		}
	}
}

// createProject creates resources of each kind for a tenant, and returns their IDs by name.
func createProject(t *testing.T, s *script, at cloud.Tenant) map[string]string {
	ids := map[string]string{}
	create := func(name, method, request string) proto.Message {
		out, err := s.request(at, method, expand(request, ids))
		require.NoError(t, err, name)
		ids[name] = out.ProtoReflect().Get(out.ProtoReflect().Descriptor().Fields().ByName("id")).String()
		return out
	}
	create("vpc", "CreateVpc", `{"cidr_block": "10.0.0.0/16"}`)
	create("peer-vpc", "CreateVpc", `{"cidr_block": "10.9.0.0/16"}`)
	create("third-vpc", "CreateVpc", `{"cidr_block": "10.8.0.0/16"}`)
	create("spare-vpc", "CreateVpc", `{"cidr_block": "10.7.0.0/16"}`)
	create("subnet", "CreateSubnet", `{"vpc_id": "$vpc", "cidr_block": "10.0.1.0/24"}`)
	create("spare-subnet", "CreateSubnet", `{"vpc_id": "$vpc", "cidr_block": "10.0.2.0/24"}`)
	group := create("group", "CreateSecurityGroup", `{}`).(*networkv1.SecurityGroup)
	ids["rule"] = group.GetRules()[0].GetId()
	create("spare-group", "CreateSecurityGroup", `{}`)
	create("port", "CreatePort", `{"subnet_id": "$subnet", "security_groups": {"ids": ["$group"]}}`)
	create("spare-port", "CreatePort", `{"subnet_id": "$subnet"}`)
	create("router", "CreatePort", `{"subnet_id": "$subnet", "port_security": false}`)
	vm, err := newID()
	require.NoError(t, err)
	ids["vm"] = vm
	s.update(func(tx *store.Tx) error {
		nic := cloud.NIC{ID: "nic0", SubnetID: ids["subnet"], SecurityGroups: []string{ids["group"]}}
		claimed, err := ClaimNIC(tx, at, cloud.VMID(vm), &nic, "nic")
		ids["vm-port"] = string(claimed.Port.ID)
		return err
	})
	create("nat", "CreateNatGateway", `{"vpc_id": "$vpc"}`)
	create("floating", "CreateFloatingIp", `{"port_id": "$vm-port"}`)
	create("service", "CreateServiceIp",
		`{"vpc_id": "$vpc", "subnet_id": "$subnet", "ports": [{"protocol": "tcp", "port": 80}]}`)
	create("peering", "CreatePeering", `{"vpc_id": "$vpc", "peer_vpc_id": "$peer-vpc"}`)
	create("table", "CreateRouteTable", `{"vpc_id": "$vpc"}`)
	return ids
}

// expand replaces $NAME by the ID with that name. It leaves unknown names as they are.
func expand(text string, ids map[string]string) string {
	return regexp.MustCompile(`\$[a-z-]+`).ReplaceAllStringFunc(text, func(name string) string {
		if id := ids[name[1:]]; id != "" {
			return id
		}
		return name
	})
}

// request calls an RPC as a project member of the tenant.
func (s *script) request(at cloud.Tenant, method, input string) (proto.Message, error) {
	f := reflect.ValueOf(s.server).MethodByName(method)
	in := reflect.New(f.Type().In(1).Elem()).Interface().(proto.Message)
	if err := protojson.Unmarshal([]byte(input), in); err != nil {
		return nil, err
	}
	ctx := s.as(at, "")
	out := f.Call([]reflect.Value{reflect.ValueOf(&ctx).Elem(), reflect.ValueOf(in)})
	if err, _ := out[1].Interface().(error); err != nil {
		return nil, err
	}
	return out[0].Interface().(proto.Message), nil
}

// newProjects returns a service with an external network and resources of the tenants evil and acme.
func newProjects(t *testing.T) (s *script, own, foreign map[string]string) {
	s = &script{world: newWorld(t)}
	s.server = &server{s: s.networks}
	_, err := s.server.CreateExternalNetwork(s.asAdmin(""), &networkv1.CreateExternalNetworkRequest{
		Name: "internet", CidrBlock: "203.0.113.0/24",
		Pools: []*networkv1.AddressRange{{First: "203.0.113.10", Last: "203.0.113.99"}},
	})
	require.NoError(t, err)
	return s, createProject(t, s, evil), createProject(t, s, acme)
}

// TestReferencesToOtherTenants sets each field of each request that refers to a resource to the ID of another tenant's
// resource. The result must be the same as for an ID that does not exist: NotFound with the same text, or an empty
// list. No record may change. Afterwards the same request with the caller's own IDs must succeed.
func TestReferencesToOtherTenants(t *testing.T) {
	methods := networkv1.File_network_v1_network_proto.Services().Get(0).Methods()
	unknown, err := newID()
	require.NoError(t, err)
	tried := 0
	for i := range methods.Len() {
		method := methods.Get(i)
		name := string(method.Name())
		if slices.Contains(ofOperators, name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			missing := references(method.Input(), "")
			require.NotEmpty(t, validRequests[name], "no valid request")
			for _, template := range validRequests[name] {
				s, own, foreign := newProjects(t)
				var request any
				require.NoError(t, json.Unmarshal([]byte(template), &request))
				encode := func() string {
					text, err := json.Marshal(request)
					require.NoError(t, err)
					return expand(string(text), own)
				}
				texts(request, "", func(path, text string, replace func(string)) {
					id, isID := strings.CutPrefix(text, "$")
					if !isID {
						return
					}
					missing = slices.DeleteFunc(missing, func(p string) bool { return p == path })
					require.NotEmpty(t, foreign[id], text)
					tried++
					replace(unknown)
					want := s.outcome(name, encode())
					replace(foreign[id])
					revision := s.store.Revision()
					got := s.outcome(name, encode())
					require.Equal(t, strings.ReplaceAll(want, unknown, "ID"), strings.ReplaceAll(got, foreign[id], "ID"), path)
					require.Equal(t, revision, s.store.Revision(), "%s: records were changed", path)
					replace(text)
				})
				if !strings.Contains(name, "ExternalNetwork") { // external networks have no tenant
					s.requireTenantChecked(t, name, request, own)
				}
				_, err := s.request(evil, name, encode())
				require.NoError(t, err, "the request with the caller's own IDs: %s", template)
			}
			require.Empty(t, missing, "validRequests has no request with these fields")
		})
	}
	require.Greater(t, tried, 50)
}

// outcome returns the error of a call as text. It is empty for an empty list, which is the only success that may be the
// result of an unknown ID.
func (s *script) outcome(method, request string) string {
	out, err := s.request(evil, method, request)
	if f, ok := fault.From(err); ok {
		require.Equal(s.t, fault.NotFound, f.Kind, "%s %s: %v", method, request, err)
		return fmt.Sprintf("%s field=%s reason=%s details=%v", f.Message, f.Field, f.Reason, f.Details)
	}
	require.NoError(s.t, err, request)
	require.Zero(s.t, proto.Size(out), "%s %s: %v", method, request, out)
	return ""
}

// requireTenantChecked requires that a request for another tenant's project is refused and changes nothing.
func (s *script) requireTenantChecked(t *testing.T, method string, request any, own map[string]string) {
	text, err := json.Marshal(request)
	require.NoError(t, err)
	for _, fields := range []string{`"org_id": "acme", "project_id": "web"`, `"project_id": "web"`, `"org_id": "acme"`} {
		with := "{" + fields + strings.TrimSuffix(", "+string(text[1:]), ", }")
		if len(text) == 2 {
			with = "{" + fields + "}"
		}
		revision := s.store.Revision()
		_, err := s.request(evil, method, expand(with, own))
		f, ok := fault.From(err)
		require.True(t, ok, "%s: %v", with, err)
		require.Contains(t, []fault.Kind{fault.PermissionDenied, fault.NotFound}, f.Kind, "%s: %v", with, err)
		require.Equal(t, revision, s.store.Revision(), with)
	}
}
