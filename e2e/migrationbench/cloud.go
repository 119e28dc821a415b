package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/onehost"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/images/guest"
)

const (
	project = "default"
	// neighbourMiB is the memory of the guest that pings.
	neighbourMiB = 192
	// statePoll is the interval at which the state of a VM is polled.
	statePoll = 10 * time.Millisecond
)

// ours is a Trivet cloud with three members, two hosts, and a VPC. The hosts share a storage pool. The guest neighbour
// pings the guest that is moved.
type ours struct {
	*onehost.Cloud
	spaces  *lab.Hosts
	forward []*lab.Forwarder
	agents  [2]*lab.Agent
	nodes   [2]string // IDs of the hosts
	mounts  []string
	images  lab.GuestImages
	cmdline string
	vpc     string
	subnet  string
	// neighbour is on the second host.
	neighbour neighbour
}

func newOurs(ctx context.Context, b *bench) (_ *ours, err error) {
	c := &ours{}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	if c.cmdline, err = onehost.Cmdline(b.guest); err != nil {
		return nil, err
	}
	if c.Cloud, err = onehost.Start(ctx, filepath.Join(b.dir, "cloud"), b.bin); err != nil {
		return nil, err
	}
	if c.spaces, err = lab.NewHosts(1, 2); err != nil {
		return nil, err
	}
	for i := range c.agents {
		if err := c.startAgent(ctx, i); err != nil {
			return nil, err
		}
	}
	if c.images, err = lab.ImportGuest(ctx, c.Trio, c.Admin, b.guest); err != nil {
		return nil, err
	}
	if err := c.prepare(ctx); err != nil {
		return nil, err
	}
	_, c.neighbour.address, err = c.bootOn(ctx, "neighbour", 1, &vmv1.VmSpec{Memory: &vmv1.MemorySpec{SizeMib: neighbourMiB}})
	c.neighbour.namespace = fmt.Sprintf("/run/netns/host2-%s", c.vpc)
	return c, err
}

// startAgent starts the agent of a host, and waits until the host is READY.
func (c *ours) startAgent(ctx context.Context, i int) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	members := c.Addresses("")
	var ports []string
	for _, m := range members {
		ports = append(ports, m+":7443")
	}
	forward, err := lab.Forward(c.spaces.Net(i+1), ports...)
	if err != nil {
		return err
	}
	c.forward = append(c.forward, forward)
	name := fmt.Sprintf("host-%d", i+1)
	shared, at, local := c.Dir.Path("shared"), c.Dir.Path(name+"-shared"), c.Dir.Path(name+"-local")
	for _, dir := range []string{shared, at, local} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	if err := unix.Mount(shared, at, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	c.mounts = append(c.mounts, at)
	c.agents[i] = &lab.Agent{
		Dir: c.Dir, Bin: c.Trio.Bin, Name: name, Members: members, Cgroup: fmt.Sprintf("trivet-migrationbench-%d", i+1),
		UIDRange: fmt.Sprintf("%d-%d", 650_000+100*i, 650_099+100*i), Metrics: c.spaces.Address(i+1) + ":7444",
		Net: c.spaces.Net(i + 1), Underlay: c.spaces.Address(i + 1), Network: map[string]any{"prefix": fmt.Sprintf("host%d-", i+1)},
		Labels: map[string]string{"host": name},
		Pools:  []map[string]any{{"name": "local", "path": local}, {"name": "shared", "path": at, "shared": true}},
	}
	token, err := c.Admin.NodeToken(ctx)
	if err != nil {
		return err
	}
	if err := errors.Join(c.agents[i].Start(token), c.agents[i].Healthy(ctx)); err != nil {
		return err
	}
	node, err := c.Admin.AwaitNode(ctx, name)
	c.nodes[i] = node.GetId()
	return err
}

// prepare creates the VPC and the storage class of the shared pool.
func (c *ours) prepare(ctx context.Context) error {
	v, err := c.Admin.Networks().CreateVpc(ctx, &networkv1.CreateVpcRequest{OrgId: onehost.Org, ProjectId: project, Name: "bench", CidrBlock: "10.0.0.0/16"})
	if err != nil {
		return err
	}
	c.vpc = v.GetId()
	dhcp := true
	s, err := c.Admin.Networks().CreateSubnet(ctx, &networkv1.CreateSubnetRequest{
		OrgId: onehost.Org, ProjectId: project, Name: "bench", VpcId: c.vpc, CidrBlock: "10.0.1.0/24", DhcpEnabled: &dhcp,
	})
	if err != nil {
		return err
	}
	c.subnet = s.GetId()
	_, err = storagev1.NewStorageClassServiceClient(c.Admin.Conn()).CreateStorageClass(ctx, &storagev1.CreateStorageClassRequest{
		Name: "shared", Driver: vmv1.VolumeDriverKind_VOLUME_DRIVER_KIND_MANAGED, Pool: "shared",
	})
	return err
}

// bootOn creates a VM with a network interface on a host, and waits until its guest has an address, which it returns
// with the ID of the VM.
func (c *ours) bootOn(ctx context.Context, name string, host int, spec *vmv1.VmSpec) (id, address string, err error) {
	ctx, cancel := context.WithTimeout(ctx, onehost.BootWithin)
	defer cancel()
	spec.Boot = &vmv1.BootSpec{Kernel: c.images.Kernel, Initrd: c.images.Initrd, Cmdline: c.cmdline}
	spec.Network = []*vmv1.NetworkSpec{{Id: "nic0", SubnetId: c.subnet}}
	labels := map[string]string{"trivet/node-selector": "host=" + c.agents[host].Name}
	vm, err := c.Admin.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{Name: name, OrgId: onehost.Org, ProjectId: project, Spec: spec, Labels: labels})
	if err != nil {
		return "", "", err
	}
	id = vm.GetId()
	if _, err := c.Admin.VMs.StartVm(ctx, &vmv1.StartVmRequest{OrgId: onehost.Org, ProjectId: project, VmId: id}); err != nil {
		return id, "", err
	}
	line, err := c.Admin.Console(ctx, id, guest.Prefix+"NIC name=eth0 mac", 1)
	if err != nil {
		return id, "", err
	}
	nic, err := guest.ParseNIC(line)
	if err != nil {
		return id, "", err
	}
	// A VM with a host selector cannot be moved.
	_, err = c.Admin.VMs.UpdateVm(ctx, &vmv1.UpdateVmRequest{
		OrgId: onehost.Org, ProjectId: project, VmId: id, Labels: map[string]string{"trivet/node-selector": ""},
	})
	return id, nic.Address.Addr().String(), err
}

// close ends the guests, the agents and the members.
func (c *ours) close() error {
	var errs []error
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	for _, a := range c.agents {
		if a == nil {
			continue
		}
		if c.Dir.Running(a.Name) != 0 {
			errs = append(errs, c.Dir.Stop(a.Name, 12*time.Second))
		}
		_, err := a.EndGuests(ctx)
		errs = append(errs, err, a.RemoveNetworks())
	}
	for _, f := range c.forward {
		errs = append(errs, f.Close())
	}
	if c.Cloud != nil {
		errs = append(errs, c.Cloud.Close())
	}
	if c.spaces != nil {
		errs = append(errs, c.spaces.Close())
	}
	for _, at := range c.mounts {
		errs = append(errs, unix.Unmount(at, unix.MNT_DETACH))
	}
	return errors.Join(errs...)
}

// vm is a VM of Trivet that is moved.
type vm struct {
	c      *ours
	id, ip string
	host   int
}

func (c *ours) boot(ctx context.Context, kind string, size int) (mover, error) {
	v := &vm{c: c}
	spec := &vmv1.VmSpec{Memory: &vmv1.MemorySpec{SizeMib: uint64(size)}}
	disk := &vmv1.DiskSpec{
		Id: "data", SizeGib: 1, Bus: vmv1.DiskBus_DISK_BUS_VIRTIO, Cache: vmv1.DiskCache_DISK_CACHE_NONE,
		Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}},
	}
	name := fmt.Sprintf("%s-%d", kind, size)
	if kind == "shared" {
		made, err := c.Admin.Volumes.CreateVolume(ctx, &vmv1.CreateVolumeRequest{
			Name: name, OrgId: onehost.Org, ProjectId: project, SizeGib: 1, StorageClass: "shared",
		})
		if err != nil {
			return nil, err
		}
		disk.SizeGib = 0
		disk.Source = &vmv1.DiskSource{Source: &vmv1.DiskSource_VolumeId{VolumeId: made.GetId()}}
	}
	spec.Disks = []*vmv1.DiskSpec{disk}
	var err error
	if v.id, v.ip, err = c.bootOn(ctx, name, 0, spec); err != nil {
		return nil, err
	}
	return v, neighbour{fmt.Sprintf("/run/netns/host1-%s", c.vpc), v.ip}.fill(ctx)
}

func (v *vm) address() string { return v.ip }

func (v *vm) migrate(ctx context.Context) (m move, err error) {
	to := 1 - v.host
	began := time.Now()
	if _, err := v.c.Admin.VMs.MigrateVm(ctx, &vmv1.MigrateVmRequest{
		OrgId: onehost.Org, ProjectId: project, VmId: v.id, DestinationNodeId: v.c.nodes[to],
	}); err != nil {
		return m, err
	}
	for {
		now, err := v.c.Admin.VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: onehost.Org, ProjectId: project, VmId: v.id})
		switch {
		case err != nil:
			return m, err
		case now.GetState() == vmv1.VmState_VM_STATE_RUNNING && now.GetNodeId() == v.c.nodes[to]:
			m.total, v.host = time.Since(began), to
			r, err := v.c.Admin.Operator.GetMigration(ctx, &operatorv1.GetMigrationRequest{OrgId: onehost.Org, ProjectId: project, VmId: v.id})
			m.paused = time.Duration(r.GetMigration().GetDowntimeMs()) * time.Millisecond
			return m, err
		case now.GetState() != vmv1.VmState_VM_STATE_MIGRATING:
			return m, fmt.Errorf("the VM is %s on %s: %s", strings.ToLower(now.GetState().String()), now.GetNodeId(), now.GetStatus().GetLastError())
		}
		select {
		case <-time.After(statePoll):
		case <-ctx.Done():
			return m, ctx.Err()
		}
	}
}

func (v *vm) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	_, err := v.c.Admin.VMs.DeleteVm(ctx, &vmv1.DeleteVmRequest{OrgId: onehost.Org, ProjectId: project, VmId: v.id, Force: true})
	return err
}
