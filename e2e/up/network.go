package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os/exec"
	"strings"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// The external network of the cloud: a pair of veth devices, of which one end has an address of the host and the other
// belongs to the node agent. The addresses are for documentation (RFC 5737), so they are not in use elsewhere.
const (
	externalName = "demo"
	externalCIDR = "203.0.113.0/24"
	routerAddr   = "203.0.113.1"
	agentAddr    = "203.0.113.2/24"
	firstAddr    = "203.0.113.100"
	lastAddr     = "203.0.113.199"
	hostDevice   = "trivet-ext0"
	agentDevice  = "trivet-ext1"
)

// external is the node agent's setting for the external network.
var external = map[string]any{
	externalName: map[string]any{"interface": agentDevice, "address": agentAddr, "gateway": routerAddr},
}

// connectExternal makes the devices of the external network unless they exist.
func connectExternal() error {
	if _, err := net.InterfaceByName(hostDevice); err == nil {
		return nil
	}
	for _, line := range []string{
		"ip link add " + hostDevice + " type veth peer name " + agentDevice, "ip addr add " + routerAddr + "/24 dev " + hostDevice,
		"ip link set " + hostDevice + " up", "ip link set " + agentDevice + " up",
	} {
		words := strings.Fields(line)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", line, err, out)
		}
	}
	return nil
}

// disconnectExternal removes the devices of the external network, if they exist.
func disconnectExternal() error {
	if _, err := net.InterfaceByName(hostDevice); err != nil {
		return nil
	}
	if out, err := exec.Command("ip", "link", "del", hostDevice).CombinedOutput(); err != nil {
		return fmt.Errorf("remove %s: %w: %s", hostDevice, err, out)
	}
	return nil
}

// publish gives the VM a floating IP, permits HTTP to it, and waits until the guest's web server answers there. It does
// only what is still needed, and returns the address. The address is empty if the VM has no NIC, because an earlier
// version created it.
func (c *cloud) publish(ctx context.Context, admin *lab.GRPC, token string, vm *lab.VM) (string, error) {
	tenant, err := lab.Dial(c.trio.Members[1], token)
	if err != nil {
		return "", err
	}
	defer tenant.Close()
	networks := tenant.Networks()
	ports, err := networks.ListPorts(ctx, &networkv1.ListPortsRequest{DeviceId: vm.ID})
	if err != nil || len(ports.GetPorts()) == 0 {
		return "", err
	}
	port := ports.GetPorts()[0]
	if err := permitHTTP(ctx, networks, port); err != nil {
		return "", err
	}
	if _, err := admin.Networks().GetExternalNetwork(ctx, &networkv1.GetExternalNetworkRequest{Name: externalName}); err != nil {
		if _, err := admin.Networks().CreateExternalNetwork(ctx, &networkv1.CreateExternalNetworkRequest{
			Name: externalName, CidrBlock: externalCIDR, GatewayIp: routerAddr, Pools: []*networkv1.AddressRange{{First: firstAddr, Last: lastAddr}},
		}); err != nil {
			return "", fmt.Errorf("create external network: %w", err)
		}
	}
	address, err := floatingIP(ctx, networks, port.GetId())
	if err != nil {
		return "", err
	}
	return address, lab.Until(ctx, "http://"+address+" answers", func(ctx context.Context) error { return askName(ctx, address, vm.Name) })
}

// permitHTTP adds a rule for TCP port 80 to the first security group of a port, unless it has one.
func permitHTTP(ctx context.Context, networks networkv1.NetworkServiceClient, port *networkv1.Port) error {
	if len(port.GetSecurityGroups()) == 0 {
		return errors.New("the VM's port has no security group")
	}
	group, err := networks.GetSecurityGroup(ctx, &networkv1.GetSecurityGroupRequest{Id: port.GetSecurityGroups()[0]})
	if err != nil {
		return err
	}
	for _, r := range group.GetRules() {
		if r.GetDirection() == networkv1.Direction_DIRECTION_INGRESS && r.GetPortMin() == 80 {
			return nil
		}
	}
	_, err = networks.AddSecurityGroupRule(ctx, &networkv1.AddSecurityGroupRuleRequest{SecurityGroupId: group.GetId(), Rule: &networkv1.SecurityGroupRule{
		Direction: networkv1.Direction_DIRECTION_INGRESS, Ethertype: networkv1.Ethertype_ETHERTYPE_IPV4, Protocol: "tcp", PortMin: 80, PortMax: 80,
		RemoteCidr: "0.0.0.0/0", Description: "web server of make up",
	}})
	return err
}

// floatingIP returns the address of the port's floating IP, which it creates if there is none.
func floatingIP(ctx context.Context, networks networkv1.NetworkServiceClient, port string) (string, error) {
	list, err := networks.ListFloatingIps(ctx, &networkv1.ListFloatingIpsRequest{})
	if err != nil {
		return "", err
	}
	for _, f := range list.GetFloatingIps() {
		if f.GetPortId() == port {
			return f.GetAddress(), nil
		}
	}
	f, err := networks.CreateFloatingIp(ctx, &networkv1.CreateFloatingIpRequest{Name: vmName, ExternalNetwork: externalName, PortId: port})
	return f.GetAddress(), err
}

// askName returns an error unless the guest's web server answers with the VM's name.
func askName(ctx context.Context, address, name string) error {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+address+"/", nil)
	if err != nil {
		return err
	}
	reply, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	text, err := io.ReadAll(io.LimitReader(reply.Body, 1<<10))
	if err == nil && strings.TrimSpace(string(text)) != name {
		err = fmt.Errorf("the answer is %q", text)
	}
	return err
}
