package main

import (
	"errors"
	"fmt"
	"maps"

	"golang.org/x/sys/unix"

	"github.com/trivet-cloud/trivet/nodeagent/disk"
	"github.com/trivet-cloud/trivet/nodeagent/metrics"
)

const (
	// defaultCacheShare is the part of the data directory's file system that the image cache may occupy by default, in
	// percent.
	defaultCacheShare = 20
	// keepFree is the minimum free space of this file system, in percent. Below this minimum, unused images are removed
	// even if the cache is within its limit.
	keepFree = 15
)

// imageCacheLimit returns the maximum number of bytes that the image cache may occupy. The parameter size is the number
// of bytes that the cache occupies now.
func (a *agent) imageCacheLimit(size int64) (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(a.config.DataDir, &fs); err != nil {
		return 0, fmt.Errorf("read size of the file system of %s: %w", a.config.DataDir, err)
	}
	total, free := int64(fs.Blocks)*fs.Bsize, int64(fs.Bavail)*fs.Bsize
	return cacheLimit(a.config.ImageCacheBytes, size, total, free), nil
}

// cacheLimit returns the limit, in bytes, of an image cache that occupies size bytes. The file system has total bytes,
// of which free bytes are free. The parameter configured is the limit in the configuration; 0 means the default share
// of the file system. If less than keepFree percent of the file system is free, the limit is at most size minus the
// missing bytes.
func cacheLimit(configured uint64, size, total, free int64) int64 {
	limit := total / 100 * defaultCacheShare
	if configured > 0 {
		limit = int64(min(configured, maxImageCache))
	}
	if missing := total/100*keepFree - free; missing > 0 {
		limit = min(limit, size-missing)
	}
	return max(limit, 0)
}

// maxImageCache is the largest configurable limit of the image cache, in bytes.
const maxImageCache = 1 << 60

var errNoAssignment = errors.New("the control plane has not sent an assignment yet")

// usedImages returns the SHA-256 sums of the images that must stay in the cache: the base images of the disks and
// volumes on this host, and the images in the newest assignment.
func (a *agent) usedImages() (map[string]bool, error) {
	assigned := a.assigned.Load()
	if assigned == nil {
		return nil, errNoAssignment
	}
	used, err := a.machines.UsedImages()
	if err != nil {
		return nil, err
	}
	more, err := a.storage.UsedImages()
	if err != nil {
		return nil, err
	}
	maps.Copy(used, more)
	for _, sum := range assigned.Images {
		used[sum] = true
	}
	for _, vm := range assigned.VMs {
		for _, d := range vm.GetDisks() {
			used[d.GetImage().GetSha256()], used[d.GetVolume().GetImage().GetSha256()] = true, true
		}
		used[vm.GetKernel().GetSha256()], used[vm.GetInitrd().GetSha256()] = true, true
	}
	return used, nil
}

// imageMetrics returns the size and the counters of the image cache for /metrics.
func imageMetrics(images *disk.Images) metrics.Images {
	s, err := images.Stats()
	if err != nil {
		return metrics.Images{}
	}
	return metrics.Images(s)
}
