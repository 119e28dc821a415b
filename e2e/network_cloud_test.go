package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// networkCloud is a cloud of three members and several hosts, each host in a network namespace of its own.
type networkCloud struct {
	*world
	hosts  []*lab.Agent
	ids    []string // of hosts
	images lab.GuestImages
	spaces *lab.Hosts // the network namespaces of the hosts
	// external is the external network "internet" of all hosts.
	external *lab.External
	// networks and vms call member 1 as the tenant ada of the project default.
	networks networkv1.NetworkServiceClient
	vms      vmv1.VmServiceClient
}

// newNetworkCloud starts a cloud with count hosts that are READY and have a network. It calls the functions in change for
// each agent before the agent is started.
func newNetworkCloud(t *testing.T, count int, change ...func(*world, *lab.Agent)) *networkCloud {
	w := newWorld(t, func(w *world) { w.trio.Extra = lab.Unlimited }, scraped)
	c := &networkCloud{world: w}
	numbers := make([]int, count)
	for i := range numbers {
		numbers[i] = i + 1
	}
	spaces, err := lab.NewHosts(numbers...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, spaces.Close()) })
	c.spaces = spaces
	c.external, err = lab.NewExternal(spaces)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.external.Close()) })
	ctx := w.context(2 * time.Minute)
	for _, n := range numbers {
		forward, err := lab.Forward(spaces.Net(n), "127.0.0.1:7443", "127.0.0.2:7443", "127.0.0.3:7443")
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, forward.Close()) })
		first := 640_000 + lab.RunID()%1000*1000 + n*100
		agent := &lab.Agent{
			Dir: w.dir, Bin: w.trio.Bin, Name: fmt.Sprintf("host-%d", n), Members: []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"},
			Cgroup: fmt.Sprintf("trivet-e2e-%d-%d", lab.RunID(), n), UIDRange: fmt.Sprintf("%d-%d", first, first+99),
			Metrics: spaces.Address(n) + ":7444", Net: spaces.Net(n), Underlay: spaces.Address(n),
			Labels:   map[string]string{"host": fmt.Sprintf("host-%d", n)},
			External: c.external.Connection(n),
			Network:  map[string]any{"prefix": fmt.Sprintf("host%d-", n)},
		}
		for _, f := range change {
			f(w, agent)
		}
		c.hosts = append(c.hosts, agent)
		token, err := w.admin.NodeToken(ctx)
		require.NoError(t, err)
		t.Cleanup(func() { c.stop(agent) })
		require.NoError(t, agent.Start(token))
	}
	for _, agent := range c.hosts {
		require.NoError(t, agent.Healthy(ctx))
		node, err := w.admin.AwaitNode(ctx, agent.Name)
		require.NoError(t, err)
		c.ids = append(c.ids, node.GetId())
	}
	c.images, err = lab.ImportGuest(ctx, w.trio, w.admin, guest(t))
	require.NoError(t, err)
	tenant := w.dial(1, w.tenant("ada", "default", "default", "project:member"))
	c.networks, c.vms = tenant.Networks(), tenant.VMs
	return c
}

// run runs a part of a test, whose failures are that part's.
func (c *networkCloud) run(name string, f func(t *testing.T)) {
	whole := c.t
	whole.Run(name, func(t *testing.T) {
		c.t = t
		defer func() { c.t = whole }()
		f(t)
	})
}

// stop ends an agent, its guests and its namespaces.
func (c *networkCloud) stop(agent *lab.Agent) {
	if c.dir.Running(agent.Name) != 0 {
		require.NoError(c.t, c.dir.Stop(agent.Name, 12*time.Second))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	_, err := agent.EndGuests(ctx)
	require.NoError(c.t, err)
	require.NoError(c.t, agent.RemoveNetworks())
}

// vpc creates a VPC with one subnet per prefix, and returns the IDs of the VPC and of its subnets.
func (c *networkCloud) vpc(name, cidr string, prefixes ...string) (vpc string, subnets []string) {
	ctx := c.context(30 * time.Second)
	v, err := c.networks.CreateVpc(ctx, &networkv1.CreateVpcRequest{Name: name, CidrBlock: cidr})
	require.NoError(c.t, err)
	for i, p := range prefixes {
		s, err := c.networks.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{Name: fmt.Sprintf("%s-%d", name, i), VpcId: v.GetId(), CidrBlock: p, DhcpEnabled: ptr(true)})
		require.NoError(c.t, err)
		subnets = append(subnets, s.GetId())
	}
	return v.GetId(), subnets
}

func ptr[T any](v T) *T { return &v }
