package storage

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/rbd"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	errNoRBD = errors.New("this host does not serve RBD volumes")
	errNoKey = errors.New("the key of the Ceph cluster has not arrived from the control plane yet")
)

// ceph has the connections to the Ceph clusters of assigned volumes. There is one connection for each combination of
// cluster, monitors, user and key. Each connection has its own helper process trivet-rbd. If the monitors, the user or
// the key of a storage class change, the control plane assigns its volumes again, with another RbdPool and the same
// generation. The next call for a volume then uses a new connection. QEMU processes keep their connections.
type ceph struct {
	options   rbd.Options
	images    *disk.Images
	encrypter volume.Encrypter
	log       *slog.Logger

	closing  sync.WaitGroup
	mu       sync.Mutex
	clusters map[string]*rbd.Cluster // by clusterKey
}

func newCeph(o Options) *ceph {
	return &ceph{options: o.RBD, images: o.Images, encrypter: o.Encrypter, log: o.Log, clusters: map[string]*rbd.Cluster{}}
}

// clusterKey returns the key of a pool's connection in ceph.clusters. Pools with the same key share a connection.
func clusterKey(at *agentv1.RbdPool) string {
	return strings.Join([]string{at.GetFsid(), at.GetUser(), at.GetKey(), strings.Join(at.GetMonitors(), ",")}, "\x00")
}

// pool returns a pool of a Ceph cluster. It does not connect to the cluster: the first call to the pool starts the
// helper trivet-rbd.
func (c *ceph) pool(at *agentv1.RbdPool) (*volume.RBDPool, error) {
	switch {
	case c.options.Program == "":
		return nil, errNoRBD
	case at.GetKey() == "":
		return nil, errNoKey
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	key := clusterKey(at)
	cluster := c.clusters[key]
	if cluster == nil {
		cluster = rbd.New(c.options, &rbdv1.ConnectRequest{
			Fsid: at.GetFsid(), Monitors: at.GetMonitors(), User: at.GetUser(), Key: at.GetKey(),
		})
		c.clusters[key] = cluster
	}
	return volume.NewRBDPool(volume.RBDOptions{
		Client: rbdv1.NewRbdServiceClient(cluster), Monitors: at.GetMonitors(), Pool: at.GetPool(), User: at.GetUser(),
		Key: at.GetKey(), Images: c.images, Encrypter: c.encrypter,
	}), nil
}

// sweep deletes unused base images and the remains of deleted volumes from all Ceph pools in which the given volumes
// are stored.
func (c *ceph) sweep(ctx context.Context, volumes []*agentv1.AssignedVolume) {
	swept := map[string]bool{}
	for _, v := range volumes {
		at := v.GetRbd()
		key := clusterKey(at) + "\x00" + at.GetPool()
		if at == nil || swept[key] {
			continue
		}
		swept[key] = true
		p, err := c.pool(at)
		if err != nil {
			continue // The volumes are reported with the error.
		}
		bounded, cancel := context.WithTimeout(ctx, sweepWithin)
		err = p.RemoveUnusedBases(bounded, keepBases)
		cancel()
		if err != nil && ctx.Err() == nil {
			c.log.Warn("cannot delete unused base images of a Ceph pool", "pool", at.GetPool(), "err", err)
		}
		bounded, cancel = context.WithTimeout(ctx, sweepWithin)
		err = p.SweepDeletions(bounded, keepDeletions)
		cancel()
		if err != nil && ctx.Err() == nil {
			c.log.Warn("cannot remove the remains of deleted volumes from a Ceph pool", "pool", at.GetPool(), "err", err)
		}
	}
}

// keep closes the connections that no volume in volumes needs. A running call on a closed connection fails. If its
// volume is assigned again, Storage repeats the call on a new connection.
func (c *ceph) keep(volumes map[cloud.VolumeID]*agentv1.AssignedVolume) {
	needed := map[string]bool{}
	for _, v := range volumes {
		if v.GetRbd() != nil {
			needed[clusterKey(v.GetRbd())] = true
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for key, cluster := range c.clusters {
		if !needed[key] {
			c.closing.Go(cluster.Close) // Close waits for the end of the helper, and the caller must not wait.
			delete(c.clusters, key)
		}
	}
}

// close closes all connections.
func (c *ceph) close() {
	defer c.closing.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, cluster := range c.clusters {
		cluster.Close()
	}
}
