package live

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/trivet-cloud/trivet/controlplane/accounts/tenant"
	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/network"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
)

// createResources creates an image, the storage classes cephClass and sharedClass, and two to four hosts, and waits
// until they are ready.
func (f *fleet) createResources(ctx context.Context) error {
	if err := os.MkdirAll(f.imports, 0o700); err != nil {
		return err
	}
	source := filepath.Join(f.imports, "small.raw")
	if err := os.WriteFile(source, make([]byte, 64<<10), 0o600); err != nil {
		return err
	}
	p := f.slots[0].current()
	admin := func() (context.Context, error) {
		caller, err := p.identities.Verify(ctx, f.token)
		return auth.With(ctx, caller, auth.RPC), err
	}
	if err := within(30*time.Second, func() error {
		ctx, err := admin()
		if err != nil {
			return err
		}
		made, err := p.images.Create(ctx, cloud.Image{
			Name: "small", Org: tenant.Default.Org, Format: cloud.FormatRaw, Source: "file://" + source,
		}, [32]byte{})
		f.image = made.Image.ID
		return err
	}); err != nil {
		return fmt.Errorf("create the image: %w", err)
	}
	if err := within(time.Minute, func() error {
		i, err := p.images.Get(ctx, tenant.Default.Org, f.image)
		if err == nil && i.Status != cloud.ImageAvailable {
			err = fmt.Errorf("it is %s", i.Status)
		}
		return err
	}); err != nil {
		return fmt.Errorf("wait for the image: %w", err)
	}
	create := func(class cloud.StorageClass, key string) error {
		err := within(30*time.Second, func() error {
			ctx, err := admin()
			if err != nil {
				return err
			}
			_, err = p.classes.Create(ctx, class, key, [32]byte{})
			if fault.Is(err, fault.AlreadyExists) {
				return nil
			}
			return err
		})
		if err != nil {
			return fmt.Errorf("create the storage class %s: %w", class.Name, err)
		}
		return nil
	}
	ceph := cloud.StorageClass{Name: cephClass, Driver: cloud.DriverRBD, RBD: &cloud.RBDPool{
		FSID: "0190a000-0000-4000-8000-000000000001", Monitors: []string{"192.0.2.1"}, Pool: "vms", User: "trivet",
	}}
	if err := create(ceph, "AQDq3rNlAAAAABAAv7k8q5Yq1mYc2o0J7l5h3g=="); err != nil {
		return err
	}
	if err := create(cloud.StorageClass{Name: sharedClass, Driver: cloud.DriverManaged, Pool: sharedClass}, ""); err != nil {
		return err
	}
	for n := range 2 + f.rng.IntN(3) {
		h, err := newHost(f, n+1, f.source(uint64(100+n)))
		if err != nil {
			return err
		}
		if err := within(30*time.Second, func() (err error) {
			h.token, _, err = p.nodes.NewToken(ctx, string(h.name), 0)
			return err
		}); err != nil {
			return fmt.Errorf("make a join token: %w", err)
		}
		f.hosts = append(f.hosts, h)
		f.behind.Go(h.guardLease)
		h.boot()
	}
	if err := within(time.Minute, func() error {
		f.audit.mu.Lock()
		defer f.audit.mu.Unlock()
		ready := 0
		for id, n := range f.audit.nodes {
			if h := f.hostOf(id); h != nil && n.Allocatable == h.room {
				ready++
			}
		}
		if ready < len(f.hosts) {
			return fmt.Errorf("%d of %d hosts are ready", ready, len(f.hosts))
		}
		return nil
	}); err != nil {
		return err
	}
	return f.beginNetworks(ctx, p)
}

// beginNetworks creates an external network. It also creates a VPC, a subnet and a floating IP and deletes them, so
// that the records exist that remain after deletions, such as the project's default security group. Then it lets the
// witness count the records.
func (f *fleet) beginNetworks(ctx context.Context, p *process) error {
	if err := within(time.Minute, func() error {
		vpc, err := p.networks.CreateVPC(ctx, tenant.Default, network.VPCRequest{CIDR: netip.MustParsePrefix("10.1.0.0/16")}, [32]byte{})
		if err != nil {
			return err
		}
		subnet, err := p.networks.CreateSubnet(ctx, tenant.Default, network.SubnetRequest{
			VPC: vpc.Value.ID, CIDR: netip.MustParsePrefix(subnetPrefixes[0]),
		}, [32]byte{})
		if err != nil {
			return err
		}
		if _, err = p.networks.DeleteSubnet(ctx, tenant.Default, subnet.Value.ID, [32]byte{}); err != nil {
			return err
		}
		if _, err = p.networks.DeleteVPC(ctx, tenant.Default, vpc.Value.ID, [32]byte{}); err != nil {
			return err
		}
		caller, err := p.identities.Verify(ctx, f.token)
		if err != nil {
			return err
		}
		_, err = p.networks.CreateExternalNetwork(auth.With(ctx, caller, auth.RPC), externalNetwork, [32]byte{})
		if err != nil && !fault.Is(err, fault.AlreadyExists) {
			return err
		}
		floating, err := p.networks.CreateFloatingIP(ctx, tenant.Default, network.FloatingRequest{}, [32]byte{})
		if err != nil {
			return err
		}
		_, err = p.networks.DeleteFloatingIP(ctx, tenant.Default, floating.Value.ID, [32]byte{})
		return err
	}); err != nil {
		return fmt.Errorf("create and delete a VPC: %w", err)
	}
	return within(2*network.RestTime+time.Minute, func() error {
		f.audit.mu.Lock()
		defer f.audit.mu.Unlock()
		f.audit.networks.begin()
		return f.audit.networks.ready()
	})
}
