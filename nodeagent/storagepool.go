package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/nodeagent/machine"
	"github.com/trivet-cloud/trivet/nodeagent/metrics"
	"github.com/trivet-cloud/trivet/nodeagent/storage"
	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/qcow2"
)

// StoragePool is a directory for volumes.
type StoragePool struct {
	// Name is the name by which storage classes refer to the pool.
	Name string `yaml:"name"`
	// Path is the directory. It must exist, belong to root, and be writable by no other user.
	Path string `yaml:"path"`
	// Shared means that other hosts use the same directory.
	Shared bool `yaml:"shared"`
}

const (
	// defaultPool is the name of the pool of a host whose configuration has none. poolDir is its directory in the data
	// directory.
	defaultPool = "local"
	poolDir     = "volumes"
	maxPools    = 64
)

var validPool = regexp.MustCompile(`^[a-z][a-z0-9-]{0,62}$`)

// validateStorage returns an error that names the invalid setting of the storage pools. It does not look at the
// directories.
func (c *Config) validateStorage() error {
	if len(c.StoragePools) > maxPools {
		return fmt.Errorf("storage_pools: %d pools are more than %d", len(c.StoragePools), maxPools)
	}
	names, paths := map[string]bool{}, map[string]bool{}
	for _, p := range c.StoragePools {
		switch {
		case !validPool.MatchString(p.Name):
			return fmt.Errorf("storage_pools: the name %q is not 1 to 63 characters of a-z, 0-9 and -, beginning with a letter", p.Name)
		case !filepath.IsAbs(p.Path) || filepath.Clean(p.Path) != p.Path:
			return fmt.Errorf("storage_pools: %s: %q is not an absolute path in its shortest form", p.Name, p.Path)
		case names[p.Name] || paths[p.Path]:
			return fmt.Errorf("storage_pools: %s: another pool has this name or path", p.Name)
		}
		names[p.Name], paths[p.Path] = true, true
	}
	return nil
}

// parsePools parses the flag form of the setting: name=path[:shared], comma-separated.
func parsePools(s string) (out []StoragePool, err error) {
	for _, text := range splitList(s) {
		name, path, ok := strings.Cut(text, "=")
		if !ok {
			return nil, fmt.Errorf("%q is not name=path[:shared]", text)
		}
		path, shared := strings.CutSuffix(path, ":shared")
		out = append(out, StoragePool{Name: name, Path: path, Shared: shared})
	}
	return out, nil
}

// openStorage opens the host's storage pools. It makes the directory of the default pool.
func (a *agent) openStorage(ctx context.Context) error {
	pools := a.config.StoragePools
	if len(pools) == 0 {
		pools = []StoragePool{{Name: defaultPool, Path: a.dir(poolDir)}}
		if err := os.Mkdir(pools[0].Path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("open storage pool: %w", err)
		}
	}
	if err := os.MkdirAll(a.dir("pools"), 0o700); err != nil {
		return fmt.Errorf("open storage pools: %w", err)
	}
	o := storage.Options{
		Images: a.images, Report: a.link.ObserveVolume, Forget: a.link.ForgetVolume, Log: a.log,
		Copy: func(ctx context.Context, vm cloud.VMID, targets []volume.CopyTarget) (volume.Copied, error) {
			return a.machines.CopyVolumes(ctx, vm, targets)
		},
	}
	for _, p := range pools {
		o.Pools = append(o.Pools, volume.Options{
			Name: p.Name, Host: a.config.Name, Path: p.Path, Shared: p.Shared, State: filepath.Join(a.dir("pools"), p.Name+".json"), Images: a.images,
			Format: a.formatVolume,
		})
	}
	if a.servesRBD {
		o.RBD, o.Encrypter = a.rbdOptions(), newEncrypter(a)
	}
	a.storage = storage.New(ctx, o)
	return nil
}

// formatVolume implements volume.Options.Format.
func (a *agent) formatVolume(ctx context.Context, id string, size uint64, key []byte) (*os.File, error) {
	return a.qemu.Format(ctx, a.homes, id, size, key)
}

// largestVolume is the size in bytes of the largest volume that may be attached to a running guest.
const largestVolume = uint64(min(cloud.MaxDiskGiB<<30, qcow2.MaxVirtualSize))

// pools returns the storage pools that can be used, as reported to the control plane.
func (a *agent) pools() (out []*agentv1.StoragePool) {
	for _, p := range a.storage.Pools() {
		space, err := p.Space()
		if err != nil {
			a.log.Warn("cannot report a storage pool", "err", err)
			continue
		}
		total := facts.Resources{StorageGiB: space.Total >> 30}
		var reserve facts.Resources
		if a.onDataDir(p) {
			reserve.StorageGiB = a.config.Reserve.StorageGiB
		}
		free := facts.Allocatable(total, reserve, facts.Overcommit(a.config.Overcommit))
		out = append(out, &agentv1.StoragePool{
			Name: p.Name(), AllocatableGib: min(free.StorageGiB, 1<<32), Encryption: true, PoolId: p.ID(), Shared: p.Shared(),
		})
	}
	return out
}

// onDataDir reports whether a pool is on the file system of the data directory, of which the host keeps a reserve.
func (a *agent) onDataDir(p *volume.Pool) bool {
	var pool, data unix.Stat_t
	return unix.Stat(p.Path(), &pool) == nil && unix.Stat(a.config.DataDir, &data) == nil && pool.Dev == data.Dev
}

// storageMetrics returns the storage pools and volumes of the host for /metrics.
func storageMetrics(s *storage.Storage, machines *machine.MachineSet) metrics.Storage {
	var out metrics.Storage
	out.Snapshots, out.FailedSnapshots = s.SnapshotCounts()
	io := machines.VolumeStats()
	for _, p := range s.Pools() {
		if space, err := p.Space(); err == nil {
			out.Pools = append(out.Pools, metrics.Pool{Name: p.Name(), Bytes: space.Total, Free: space.Free})
		}
		list, err := p.List()
		if err != nil {
			continue
		}
		for _, v := range list.Volumes {
			if p.Shared() && !s.Has(cloud.VolumeID(v.ID)) {
				continue // Another host of the pool exports the metrics of the volume.
			}
			one := metrics.Volume{ID: cloud.VolumeID(v.ID), Bytes: v.Size, Allocated: v.Allocated, Failed: v.Error != ""}
			if stats, ok := io[one.ID]; ok {
				one.IO = &metrics.VolumeIO{
					ReadBytes: stats.ReadBytes, WrittenBytes: stats.WriteBytes, Reads: stats.Reads, Writes: stats.Writes,
				}
			}
			out.Volumes = append(out.Volumes, one)
		}
	}
	return out
}
