package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// manyPorts is the number of ports that manyClients clients create in killLeaderDuringCreation. The test kills the
// leader when killAfter ports were acknowledged.
const manyPorts, manyClients, killAfter = 500, 8, 150

// killLeaderDuringCreation kills the leader while clients create ports. They repeat calls with the same idempotency key
// until an answer arrives. Afterwards each acknowledged port must exist, no two ports may have the same address, no
// call may have created two ports, and the packet filter on the host of m must contain the addresses of all ports: like
// m's port, they are in the group default.
func (c *networkCloud) killLeaderDuringCreation(vpc string, m *machine) {
	t, ctx := c.t, c.context(3*time.Minute)
	subnet, err := c.networks.CreateSubnet(ctx, &networkv1.CreateSubnetRequest{VpcId: vpc, CidrBlock: "10.0.16.0/20"})
	require.NoError(t, err)
	clients := make([]networkv1.NetworkServiceClient, 3)
	for i := range clients {
		clients[i] = c.dial(i+1, c.tenantToken).Networks()
	}
	leader := c.leader(1)
	ports := &acknowledged{reached: make(chan struct{})}
	group, creating := errgroup.WithContext(ctx)
	for n := range manyClients {
		group.Go(func() error {
			for i := n; i < manyPorts; i += manyClients {
				port, err := createPort(creating, clients, i, subnet.GetId())
				if err != nil {
					return err
				}
				ports.add(port)
			}
			return nil
		})
	}
	select {
	case <-ports.reached:
	case <-creating.Done():
		require.NoError(t, group.Wait())
	}
	require.NoError(t, c.dir.Kill(c.trio.Name(leader)))
	killed := ports.count()
	require.NoError(t, group.Wait())
	t.Logf("%d of %d ports were acknowledged when the leader was dead", killed, manyPorts)
	require.Less(t, killed, manyPorts, "the leader was killed too late")
	require.NoError(t, c.trio.Start(leader))
	c.ready()

	stored := c.portsOf(ctx, subnet.GetId())
	addresses, macs := map[string]string{}, map[string]bool{}
	for id, p := range stored {
		require.Empty(t, addresses[p.GetIpAddress()], "ports with one address")
		require.False(t, macs[p.GetMacAddress()], "ports with one MAC address")
		addresses[p.GetIpAddress()], macs[p.GetMacAddress()] = id, true
	}
	require.Len(t, ports.all, manyPorts)
	for _, p := range ports.all {
		require.Equal(t, p.GetIpAddress(), stored[p.GetId()].GetIpAddress(), "an acknowledged port")
	}
	require.Len(t, stored, manyPorts, "ports that no client knows")
	require.NoError(t, lab.Until(ctx, "the host knows the ports", func(ctx context.Context) error {
		return c.compareMembers(ctx, m, addresses, true)
	}))
	c.deletePorts(ctx, clients, ports.all)
	require.NoError(t, lab.Until(ctx, "the host has forgotten the ports", func(ctx context.Context) error {
		return c.compareMembers(ctx, m, addresses, false)
	}))
	_, err = c.networks.DeleteSubnet(ctx, &networkv1.DeleteSubnetRequest{Id: subnet.GetId()})
	require.NoError(t, err)
}

// acknowledged are the ports whose creation was acknowledged.
type acknowledged struct {
	reached chan struct{} // closed when there are killAfter ports

	mu  sync.Mutex // guards all
	all []*networkv1.Port
}

func (a *acknowledged) add(p *networkv1.Port) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all = append(a.all, p)
	if len(a.all) == killAfter {
		close(a.reached)
	}
}

func (a *acknowledged) count() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.all)
}

// createPort creates a port. While calls fail with an error that may be temporary, it repeats the call with the same
// idempotency key at one member after the other.
func createPort(
	ctx context.Context, clients []networkv1.NetworkServiceClient, n int, subnet string,
) (*networkv1.Port, error) {
	keyed := lab.WithKey(ctx, fmt.Sprint("many-ports-", n))
	for try := n; ; try++ {
		short, cancel := context.WithTimeout(keyed, 5*time.Second)
		port, err := clients[try%len(clients)].CreatePort(short, &networkv1.CreatePortRequest{SubnetId: subnet})
		cancel()
		switch status.Code(err) {
		case codes.OK:
			return port, nil
		case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.ResourceExhausted, codes.Canceled:
		default:
			return nil, err
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return nil, fmt.Errorf("create port %d: %w: %w", n, err, ctx.Err())
		}
	}
}

// portsOf returns all ports of a subnet, by ID.
func (c *networkCloud) portsOf(ctx context.Context, subnet string) map[string]*networkv1.Port {
	all := map[string]*networkv1.Port{}
	for token := ""; ; {
		page, err := c.networks.ListPorts(ctx, &networkv1.ListPortsRequest{SubnetId: subnet, PageSize: 200, PageToken: token})
		require.NoError(c.t, err)
		for _, p := range page.GetPorts() {
			all[p.GetId()] = p
		}
		if token = page.GetNextPageToken(); token == "" {
			return all
		}
	}
}

// compareMembers compares addresses with the members of the ipsets on the host of a machine. It returns an error unless
// all addresses are members (present is true), or none is (present is false).
func (c *networkCloud) compareMembers(
	ctx context.Context, m *machine, addresses map[string]string, present bool,
) error {
	save, err := exec.CommandContext(ctx, "nsenter", "--net="+m.namespace(), "ipset", "save").Output()
	if err != nil {
		return fmt.Errorf("list ipsets: %w", err)
	}
	members := map[string]bool{}
	for line := range strings.Lines(string(save)) {
		if words := strings.Fields(line); len(words) > 2 && words[0] == "add" {
			members[words[2]] = true
		}
	}
	for address := range addresses {
		if members[address] != present {
			return fmt.Errorf("%s is a member of an ipset: %t", address, members[address])
		}
	}
	return nil
}

// deleteTimeout is how long one call that deletes a port may take.
const deleteTimeout = 20 * time.Second

// deletePorts deletes ports with several clients. It repeats calls that are not answered within deleteTimeout.
func (c *networkCloud) deletePorts(
	ctx context.Context, clients []networkv1.NetworkServiceClient, ports []*networkv1.Port,
) {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(manyClients)
	for i, p := range ports {
		group.Go(func() error {
			for {
				call, cancel := context.WithTimeout(ctx, deleteTimeout)
				_, err := clients[i%len(clients)].DeletePort(call, &networkv1.DeletePortRequest{Id: p.GetId()})
				cancel()
				switch status.Code(err) {
				case codes.ResourceExhausted, codes.Unavailable: // more calls than a tenant may make in a second
				case codes.DeadlineExceeded:
				case codes.NotFound: // a call without an answer has deleted the port
					return nil
				default:
					return err
				}
				select {
				case <-time.After(100 * time.Millisecond):
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		})
	}
	require.NoError(c.t, group.Wait())
}
