package volume

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/compute/storageclass"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	countDesc = prometheus.NewDesc("trivet_volumes", "Volumes in this member's records, by storage class and status.",
		[]string{"storage_class", "status"}, nil)
	bytesDesc = prometheus.NewDesc("trivet_volume_bytes",
		"Total size of the volumes in this member's records, by storage class and status. The files of volumes may be smaller.",
		[]string{"storage_class", "status"}, nil)
)

// Collector exports the number and the total size of the volumes, by storage class and status. Each member exports the
// values in its own copy of the records. The copy of a member that is behind in the raft log is outdated.
type Collector struct {
	totals *store.Expiring[map[series]total]
}

// series has the values of the labels of one time series.
type series struct {
	class  string
	status cloud.VolumeStatus
}

type total struct{ volumes, bytes uint64 }

var _ prometheus.Collector = (*Collector)(nil)

// NewCollector returns a Collector of the volumes in s.
func NewCollector(s *store.Store) *Collector {
	return &Collector{store.NewExpiring(s, store.MetricsTTL, count)}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	out <- countDesc
	out <- bytesDesc
}

// Collect implements prometheus.Collector. If the records cannot be read, it exports nothing.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	totals, err := c.totals.Get()
	if err != nil {
		return
	}
	for s, n := range totals {
		out <- prometheus.MustNewConstMetric(countDesc, prometheus.GaugeValue, float64(n.volumes), s.class, s.status.String())
		out <- prometheus.MustNewConstMetric(bytesDesc, prometheus.GaugeValue, float64(n.bytes), s.class, s.status.String())
	}
}

// count returns the number and the total size of the volumes, by class and status. For each class, the result has the
// statuses AVAILABLE, IN_USE and ERROR even if no volume has them.
func count(v *store.View) (map[series]total, error) {
	classes, _, err := storageclass.Classes.List(v, 0)
	if err != nil {
		return nil, err
	}
	values := map[series]total{}
	for _, class := range classes {
		for _, status := range []cloud.VolumeStatus{cloud.VolumeAvailable, cloud.VolumeInUse, cloud.VolumeError} {
			values[series{class.Value.Name, status}] = total{}
		}
	}
	all, _, err := Volumes.List(v, 0)
	for _, r := range all {
		at := series{r.Value.Class, r.Value.Status()}
		n := values[at]
		values[at] = total{n.volumes + 1, n.bytes + r.Value.SizeBytes()}
	}
	return values, err
}
