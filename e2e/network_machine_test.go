package e2e

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
	small "github.com/trivet-cloud/trivet/images/guest"
)

// machine is a running guest.
type machine struct {
	c    *networkCloud
	vm   *vmv1.VirtualMachine
	nic  small.NIC // as the guest printed it
	host int       // index into networkCloud.hosts
}

// boot creates a VM on a host, starts it, and waits until the guest has an address on its first NIC.
func (c *networkCloud) boot(name string, host int, nics ...*vmv1.NetworkSpec) *machine {
	return c.bootWith(name, host, nil, nics...)
}

func (c *networkCloud) bootWith(name string, host int, metadata map[string]string, nics ...*vmv1.NetworkSpec) *machine {
	c.t.Helper()
	return c.bootFrom(name, host, func(r *vmv1.CreateVmRequest) { r.Metadata = metadata }, nics...)
}

// bootFrom is boot for a VM whose request the function change changes.
func (c *networkCloud) bootFrom(name string, host int, change func(*vmv1.CreateVmRequest), nics ...*vmv1.NetworkSpec) *machine {
	c.t.Helper()
	m := c.begin(name, host, change, nics...)
	m.waitForBoot()
	return m
}

// begin is bootFrom, but does not wait until the guest has booted.
func (c *networkCloud) begin(name string, host int, change func(*vmv1.CreateVmRequest), nics ...*vmv1.NetworkSpec) *machine {
	c.t.Helper()
	ctx := c.context(5 * time.Minute)
	for i, n := range nics {
		if n.Id == "" {
			n.Id = fmt.Sprintf("nic%d", i)
		}
	}
	r := &vmv1.CreateVmRequest{
		Name: name, Labels: map[string]string{"trivet/node-selector": "host=" + c.hosts[host].Name},
		Spec: &vmv1.VmSpec{
			Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 192}, Network: nics,
			Boot: &vmv1.BootSpec{Kernel: c.images.Kernel, Initrd: c.images.Initrd, Cmdline: guestCmdline},
		},
	}
	change(r)
	vm, err := c.vms.CreateVm(ctx, r)
	require.NoError(c.t, err)
	require.Equal(c.t, c.ids[host], vm.GetNodeId())
	_, err = c.vms.StartVm(ctx, &vmv1.StartVmRequest{VmId: vm.GetId()})
	require.NoError(c.t, err)
	return &machine{c: c, vm: vm, host: host}
}

// waitForBoot waits until the guest has an address on its first NIC, if it has one.
func (m *machine) waitForBoot() {
	m.c.t.Helper()
	if len(m.vm.GetSpec().GetNetwork()) == 0 {
		return
	}
	line, err := m.c.admin.Console(m.c.context(5*time.Minute), m.vm.GetId(), small.Prefix+"NIC name=eth0 mac", 1)
	require.NoError(m.c.t, err)
	m.nic, err = small.ParseNIC(line)
	require.NoError(m.c.t, err)
}

// port is the ID of the port of the first NIC.
func (m *machine) port() string { return m.vm.GetSpec().GetNetwork()[0].GetPortId() }

// namespace is the path of the network namespace of the VPC of the machine's first NIC on its host.
func (m *machine) namespace() string {
	return fmt.Sprintf("/run/netns/host%d-%s", m.host+1, m.vm.GetSpec().GetNetwork()[0].GetNetworkId())
}

// try runs a shell script in the guest.
func (m *machine) try(ctx context.Context, script string) (string, error) {
	return lab.RunInGuest(ctx, m.namespace(), m.nic.Address.Addr().String(), script)
}

// run runs a shell script in the guest, which must succeed, and returns its output.
func (m *machine) run(script string) string {
	m.c.t.Helper()
	out, err := m.try(m.c.context(time.Minute), script)
	require.NoError(m.c.t, err)
	return strings.TrimSpace(out)
}

// eventually runs a shell script in the guest until it succeeds. Each run has a timeout of ten seconds: a change of the
// network may drop packets of a connection of the script, or of the connection to the guest, without an error.
func (m *machine) eventually(what, script string) {
	m.c.t.Helper()
	defer func(began time.Time) { m.c.t.Logf("%s after %v", what, time.Since(began)) }(time.Now())
	require.NoError(m.c.t, lab.Until(m.c.context(time.Minute), what, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err := m.try(ctx, script)
		return err
	}))
}
