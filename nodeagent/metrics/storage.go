package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Storage has the storage pools and the volumes of this host.
type Storage struct {
	Pools   []Pool
	Volumes []Volume
	// Snapshots is the number of snapshots that were made since the agent started, and FailedSnapshots the number that
	// failed.
	Snapshots, FailedSnapshots uint64
}

// Pool is a storage pool. Its name comes from the operator's configuration.
type Pool struct {
	Name        string
	Bytes, Free uint64 // size of its file system, and free space
}

// Volume is a volume in a storage pool of this host.
type Volume struct {
	ID        cloud.VolumeID
	Bytes     uint64 // as the guest sees it
	Allocated uint64 // bytes that the volume takes in its pool
	Failed    bool   // the volume cannot be used
	IO        *VolumeIO
}

// VolumeIO has the counters of a volume that a guest uses, since the volume was attached or QEMU was started. It is nil
// for other volumes.
type VolumeIO struct{ ReadBytes, WrittenBytes, Reads, Writes uint64 }

var (
	poolBytes       = desc("pool_bytes", "Size of the file system of the storage pool.", "pool")
	poolFree        = desc("pool_free_bytes", "Free space of the file system of the storage pool.", "pool")
	volumeBytes     = desc("volume_bytes", "Virtual size of the volume.", "volume")
	volumeAllocated = desc("volume_allocated_bytes", "Bytes that the volume takes in its storage pool.", "volume")
	volumeFailed    = desc("volume_failed", "1 if the volume cannot be used.", "volume")
	volumeRead      = desc("volume_read_bytes_total", "Bytes that the guest read from the volume.", "volume")
	volumeWritten   = desc("volume_written_bytes_total", "Bytes that the guest wrote to the volume.", "volume")
	volumeReads     = desc("volume_reads_total", "Reads of the guest from the volume.", "volume")
	volumeWrites    = desc("volume_writes_total", "Writes of the guest to the volume.", "volume")
	snapshots       = desc("snapshots_total", "Snapshots of volumes, by result.", "result")
)

var storageDescs = []*prometheus.Desc{
	poolBytes, poolFree, volumeBytes, volumeAllocated, volumeFailed, volumeRead, volumeWritten, volumeReads, volumeWrites,
	snapshots,
}

func collectStorage(s Storage, gauge, counter func(*prometheus.Desc, float64, ...string)) {
	counter(snapshots, float64(s.Snapshots), "made")
	counter(snapshots, float64(s.FailedSnapshots), "failed")
	for _, p := range s.Pools {
		gauge(poolBytes, float64(p.Bytes), p.Name)
		gauge(poolFree, float64(p.Free), p.Name)
	}
	for _, v := range s.Volumes {
		id := string(v.ID)
		failed := 0.0
		if v.Failed {
			failed = 1
		}
		gauge(volumeBytes, float64(v.Bytes), id)
		gauge(volumeAllocated, float64(v.Allocated), id)
		gauge(volumeFailed, failed, id)
		if v.IO == nil {
			continue
		}
		counter(volumeRead, float64(v.IO.ReadBytes), id)
		counter(volumeWritten, float64(v.IO.WrittenBytes), id)
		counter(volumeReads, float64(v.IO.Reads), id)
		counter(volumeWrites, float64(v.IO.Writes), id)
	}
}
