package vm

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	capacityDesc    = prometheus.NewDesc("trivet_hosts_capacity", "Capacity of all hosts, by resource.", []string{"resource"}, nil)
	allocatableDesc = prometheus.NewDesc("trivet_hosts_allocatable", "Allocatable capacity of all hosts, by resource.", []string{"resource"}, nil)
	allocatedDesc   = prometheus.NewDesc("trivet_hosts_allocated", "Allocated capacity of all hosts, by resource.", []string{"resource"}, nil)
	losableDesc     = prometheus.NewDesc("trivet_any_host_can_be_lost",
		"1 if, for each host, the other hosts have room for those of its VMs that are restarted elsewhere when the "+
			"host is lost; otherwise 0.", nil, nil)
	unlosableDesc = prometheus.NewDesc("trivet_hosts_that_cannot_be_lost",
		"Hosts whose VMs would not all fit on the other hosts if the host were lost. VMs that are not restarted elsewhere "+
			"do not count.", nil, nil)
)

// surveyEvery is how long a CapacityCollector uses its values before it reads all hosts and VMs again.
const surveyEvery = time.Minute

// CapacityCollector exports the capacity of the hosts, and whether any one of them can be lost. Only the leader exports
// values, because only the leader knows which hosts are READY.
type CapacityCollector struct {
	vms   *Service
	hosts *store.Expiring[[]HostCapacity]
}

var _ prometheus.Collector = (*CapacityCollector)(nil)

// NewCapacityCollector returns a CapacityCollector of the hosts of s.
func NewCapacityCollector(s *Service) *CapacityCollector {
	return &CapacityCollector{s, store.NewExpiring(s.opts.Store, surveyEvery, s.capacity)}
}

// Describe implements prometheus.Collector.
func (c *CapacityCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{capacityDesc, allocatableDesc, allocatedDesc, losableDesc, unlosableDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector. It exports nothing if this member does not lead, or if the records cannot be
// read.
func (c *CapacityCollector) Collect(out chan<- prometheus.Metric) {
	if !c.vms.opts.Nodes.Leads() {
		return
	}
	hosts, err := c.hosts.Get()
	if err != nil || len(hosts) == 0 {
		return
	}
	var sums [3][5]float64
	unlosable := 0.0
	for _, h := range hosts {
		for i, c := range []cloud.Capacity{h.Capacity, h.Allocatable, h.Allocated} {
			for j, n := range amounts(c) {
				sums[i][j] += n
			}
		}
		if h.Loss != nil && h.Loss.Waiting > 0 {
			unlosable++
		}
	}
	for i, desc := range []*prometheus.Desc{capacityDesc, allocatableDesc, allocatedDesc} {
		for j, resource := range resources {
			out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, sums[i][j], resource)
		}
	}
	losable := 1.0
	if unlosable > 0 {
		losable = 0
	}
	out <- prometheus.MustNewConstMetric(losableDesc, prometheus.GaugeValue, losable)
	out <- prometheus.MustNewConstMetric(unlosableDesc, prometheus.GaugeValue, unlosable)
}
