package main

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"
	"google.golang.org/grpc"

	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/nodeagent/vpc"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// hostNetworks are the records of networks that a controlPlane sends to its agent. The mutex of the control plane
// guards them.
type hostNetworks struct {
	records      *agentv1.SyncNetworksResponse
	acknowledged int64 // the newest revision that the agent has acknowledged on the present stream
	streams      int   // number of streams that the agent has opened
}

// SyncNetworks sends the records at the beginning of a stream, and again when their revision changes.
func (c *controlPlane) SyncNetworks(
	stream grpc.BidiStreamingServer[agentv1.SyncNetworksRequest, agentv1.SyncNetworksResponse],
) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	c.change(func() { c.networks.streams++; c.networks.acknowledged = 0 })
	go func() {
		for {
			r, err := stream.Recv()
			if err != nil {
				return
			}
			c.change(func() { c.networks.acknowledged = r.GetAppliedRevision() })
		}
	}()
	sent := int64(-1)
	for {
		c.mu.Lock()
		records, moved := c.networks.records, c.moved
		c.mu.Unlock()
		if records != nil && records.GetRevision() != sent {
			sent = records.GetRevision()
			if err := stream.Send(records); err != nil {
				return err
			}
		}
		select {
		case <-moved:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

const (
	restartVPC   = "00000000-0000-4000-8000-00000000000a"
	restartGroup = "00000000-0000-4000-8000-00000000000b"
)

// restartNetwork is a VPC whose ports are all on the host n1 and may send to each other. Its subnets are /20.
func restartNetwork(ports int, revision int64) *agentv1.SyncNetworksResponse {
	m := &agentv1.SyncNetworksResponse{
		Term: 1, Revision: revision, Complete: true,
		Vpcs: []*agentv1.HostVpc{{
			Vpc: &networkv1.Vpc{Id: restartVPC, ProjectId: "p", CidrBlock: "10.0.0.0/16", Mtu: 1450}, Domain: "p.internal",
		}},
		Subnets: []*agentv1.HostSubnet{{Vni: 100, Subnet: &networkv1.Subnet{
			Id: restartSubnet(0), VpcId: restartVPC, CidrBlock: "10.0.0.0/20", GatewayIp: "10.0.0.1", DhcpEnabled: true,
		}}, {Vni: 101, Subnet: &networkv1.Subnet{
			Id: restartSubnet(1), VpcId: restartVPC, CidrBlock: "10.0.16.0/20", GatewayIp: "10.0.16.1", DhcpEnabled: true,
		}}},
		SecurityGroups: []*networkv1.SecurityGroup{{Id: restartGroup, ProjectId: "p", Rules: []*networkv1.SecurityGroupRule{
			{Id: restartID(1), Direction: networkv1.Direction_DIRECTION_EGRESS, Protocol: "any"},
			{Id: restartID(2), Direction: networkv1.Direction_DIRECTION_INGRESS, Protocol: "any", RemoteGroupId: restartGroup},
		}}},
	}
	for _, r := range m.GetSecurityGroups()[0].GetRules() {
		r.Ethertype = networkv1.Ethertype_ETHERTYPE_IPV4
	}
	for i := range ports {
		p := restartPort(i)
		record := &networkv1.Port{
			Id: string(p.ID), VpcId: restartVPC, SubnetId: restartSubnet(i % 2), MacAddress: p.MAC.String(),
			IpAddress: p.IP.String(), SecurityGroups: []string{restartGroup}, PortSecurity: true, NodeId: "n1",
		}
		m.Ports = append(m.Ports, &agentv1.HostPort{
			Vtep: "192.0.2.1", HostName: fmt.Sprint("h", i), BindingGeneration: 1, Port: record,
		})
	}
	return m
}

func restartID(n int) string { return fmt.Sprintf("00000000-0000-4000-9000-%012x", n) }

func restartSubnet(n int) string { return fmt.Sprintf("00000000-0000-4000-a000-%012x", n) }

// restartPort returns port number i as the host knows it. Ports are in the two subnets in turn, so that packets between
// consecutive ports are routed.
func restartPort(i int) cloud.HostPort {
	id := cloud.PortID(restartID(1000 + i))
	host := 10 + i/2
	return cloud.HostPort{
		ID: id, Device: vpc.DeviceName(id), MAC: cloud.MAC{2, 0, 0, byte(i % 2), byte(host >> 8), byte(host)}, Secured: true,
		IP: netip.AddrFrom4([4]byte{10, 0, byte(i%2*16 + host>>8), byte(host)}),
	}
}

// restartRig is a rig whose agent has a VPC with many ports. The guests of the ports are network namespaces.
type restartRig struct {
	*rig
	prefix string // of all namespaces
	ports  int
	host   *netdev.Host
}

func newRestartRig(t *testing.T, ports int) *restartRig {
	testenv.NeedRoot(t)
	prefix := fmt.Sprintf("tagent%d-", os.Getpid())
	t.Cleanup(func() {
		paths, _ := filepath.Glob(filepath.Join(nsthread.Dir, prefix+"*"))
		for _, path := range paths {
			require.NoError(t, netns.DeleteNamed(filepath.Base(path)))
		}
	})
	name := prefix + "host"
	_, err := nsthread.Create(name)
	require.NoError(t, err)
	for _, line := range []string{
		"link set lo up", "link add eth0 type veth peer name eth1", "address add 192.0.2.1/24 dev eth0", "link set eth0 up",
		"link set eth1 up",
	} {
		out, err := exec.Command("ip", append([]string{"-n", name}, strings.Fields(line)...)...).CombinedOutput()
		require.NoError(t, err, "%s: %s", line, out)
	}
	r := &restartRig{rig: newRigIn(t, name), prefix: prefix, ports: ports}
	r.flags = []string{"--underlay", "eth0", "--network-prefix", prefix + "vpc-"}
	r.program = filepath.Join(r.dir, "trivet-nodeagent")
	r.install()
	r.host, err = netdev.New(netdev.Options{
		VTEP: netip.MustParseAddr("192.0.2.1"), Device: "eth0", Namespace: filepath.Join(nsthread.Dir, name),
		Prefix: prefix + "vpc-",
	})
	require.NoError(t, err)
	t.Cleanup(r.host.Close)
	return r
}

// install replaces the program of the agent, as an upgrade does.
func (r *restartRig) install() {
	r.Helper()
	from, err := os.Open(os.Args[0])
	require.NoError(r, err)
	defer from.Close()
	to, err := os.OpenFile(r.program+".new", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	require.NoError(r, err)
	_, err = io.Copy(to, from)
	require.NoError(r, errors.Join(err, to.Close(), os.Rename(r.program+".new", r.program)))
}

// send sends the records with a revision to the agent.
func (r *restartRig) send(revision int64) {
	records := restartNetwork(r.ports, revision)
	r.change(func() { r.networks.records = records })
}

// applied waits until the agent has opened at least the given number of streams, and has acknowledged the revision.
func (r *restartRig) applied(streams int, revision int64) {
	r.Helper()
	r.until(fmt.Sprintf("an acknowledgment of networks at revision %d", revision), func() bool {
		return r.networks.streams >= streams && r.networks.acknowledged >= revision
	})
}

// guest returns the name of the namespace of a port's guest.
func (r *restartRig) guest(port int) string { return fmt.Sprintf("%sg%d", r.prefix, port) }

// attach makes a namespace for each port and attaches it, with the code with which an agent attaches containers.
func (r *restartRig) attach() {
	r.Helper()
	description := cloud.HostVPC{ID: restartVPC, MTU: 1450, CIDR: netip.MustParsePrefix("10.0.0.0/16")}
	for i, s := range restartNetwork(0, 0).GetSubnets() {
		description.Subnets = append(description.Subnets, cloud.HostSubnet{
			ID: cloud.SubnetID(s.GetSubnet().GetId()), VNI: s.GetVni(),
			CIDR:    netip.MustParsePrefix(s.GetSubnet().GetCidrBlock()),
			Gateway: netip.MustParseAddr(s.GetSubnet().GetGatewayIp()),
		})
		for port := i; port < r.ports; port += 2 {
			description.Subnets[i].Ports = append(description.Subnets[i].Ports, restartPort(port))
		}
	}
	for port := range r.ports {
		_, err := nsthread.Create(r.guest(port))
		require.NoError(r, err)
		e := netdev.Endpoint{Namespace: filepath.Join(nsthread.Dir, r.guest(port)), Device: "eth0"}
		require.NoError(r, r.host.AttachVeth(r.Context(), description, restartPort(port).ID, e))
	}
}

// paths returns a path from each port to the next one.
func (r *restartRig) paths() (paths []nettest.Path) {
	for port := range r.ports {
		next := (port + 1) % r.ports
		paths = append(paths, nettest.Path{From: r.guest(port), To: r.guest(next), Address: restartPort(next).IP})
	}
	return paths
}

// vpcState returns the bridge ports, ipsets and sysctls of the VPC's namespace. nettest.Writes does not record changes
// of these.
func (r *restartRig) vpcState() string {
	r.Helper()
	var lines []string
	for _, command := range []string{
		"bridge -d link show", "ipset save",
		"sysctl net.ipv4.conf net.ipv6.conf net.bridge net.ipv4.ip_forward net.netfilter.nf_conntrack_tcp_loose",
	} {
		args := append([]string{"netns", "exec", r.prefix + "vpc-" + restartVPC}, strings.Fields(command)...)
		out, err := exec.CommandContext(r.Context(), "ip", args...).Output()
		require.NoError(r, err, command)
		lines = append(lines, strings.Split(string(out), "\n")...)
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// TestRestartWithPorts kills the agent's program and upgrades it while guests of many ports (TRIVET_VPC_PORTS, default
// 30) send to each other. No datagram is lost, and the new process changes nothing in the kernel.
func TestRestartWithPorts(t *testing.T) {
	ports := 30
	if text := os.Getenv("TRIVET_VPC_PORTS"); text != "" {
		var err error
		ports, err = strconv.Atoi(text)
		require.NoError(t, err)
	}
	r := newRestartRig(t, ports)
	r.start()
	r.send(1)
	r.applied(1, 1)
	r.attach()
	r.send(2) // the agent sets the devices of the ports up
	r.applied(1, 2)

	streams := nettest.StartStreams(t, 50*time.Millisecond, r.paths()...)
	writes := nettest.WatchWrites(t, r.prefix+"vpc-"+restartVPC)
	writes.Settle()
	state := r.vpcState()
	for i, restart := range []func(){
		func() { r.kill(syscall.SIGKILL) },
		func() { require.NoError(t, r.kill(syscall.SIGTERM)); r.install() },
	} {
		restart()
		streams.Flow()
		r.start()
		r.applied(2+i, 2)
		streams.Flow()
		require.Contains(t, r.get("/metrics"), "trivet_agent_vpc_writes_total 0")
		require.Empty(t, writes.Take(), "changes that the kernel announced")
		require.Equal(t, state, r.vpcState())
	}
	t.Logf("%d datagrams on %d paths", streams.Sent(), ports)
	streams.RequireComplete()

	// The checks above can fail: a change of the records makes the agent write.
	r.change(func() {
		r.networks.records = restartNetwork(r.ports, 3)
		group := r.networks.records.GetSecurityGroups()[0]
		group.Rules = group.GetRules()[:1]
	})
	r.applied(3, 3)
	require.NotEmpty(t, writes.Take())
	require.NotContains(t, r.get("/metrics"), "trivet_agent_vpc_writes_total 0")
}
