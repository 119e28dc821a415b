package image

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	countDesc = prometheus.NewDesc("trivet_images", "Images in this member's records, by status.", []string{"status"}, nil)
	bytesDesc = prometheus.NewDesc("trivet_image_bytes",
		"Total size of the images in this member's records, by status. Each image counts once, however many members store it.",
		[]string{"status"}, nil)
	copiesDesc = prometheus.NewDesc("trivet_image_copies",
		"Copies of images that members store and have verified, according to this member's records, by the status of the image.",
		[]string{"status"}, nil)
)

// Collector exports the number, the total size and the number of copies of the images, by status. Each member exports
// the values in its own copy of the records. The copy of a member that is behind in the raft log is outdated.
type Collector struct {
	totals *store.Expiring[map[string]total] // by the text of the status
}

type total struct{ images, bytes, copies uint64 }

var _ prometheus.Collector = (*Collector)(nil)

// NewCollector returns a Collector of the images in s.
func NewCollector(s *store.Store) *Collector {
	return &Collector{store.NewExpiring(s, store.MetricsTTL, count)}
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{countDesc, bytesDesc, copiesDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector. If the records cannot be read, it exports nothing.
func (c *Collector) Collect(out chan<- prometheus.Metric) {
	totals, err := c.totals.Get()
	if err != nil {
		return
	}
	for status, n := range totals {
		for desc, value := range map[*prometheus.Desc]uint64{countDesc: n.images, bytesDesc: n.bytes, copiesDesc: n.copies} {
			out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(value), status)
		}
	}
}

// count returns the totals of the images, by the text of their status. The result has each status, even if no image has
// it. Two statuses can have the same text, if a member of another version has written one that this version lacks.
func count(v *store.View) (map[string]total, error) {
	values := map[string]total{}
	for _, s := range []cloud.ImageStatus{cloud.ImagePending, cloud.ImageUploading, cloud.ImageAvailable, cloud.ImageError} {
		values[s.String()] = total{}
	}
	all, _, err := Images.List(v, 0)
	for _, r := range all {
		status := r.Value.Status.String()
		n := values[status]
		values[status] = total{n.images + 1, n.bytes + r.Value.SizeBytes, n.copies + uint64(len(r.Value.Holders))}
	}
	return values, err
}
