package vm

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/compute/drain"
	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	drainVMsDesc    = prometheus.NewDesc("trivet_drain_vms", "VMs of a host that is being drained, by status.", []string{"host", "status"}, nil)
	drainFailedDesc = prometheus.NewDesc("trivet_drain_failed_tries",
		"Failed attempts to migrate the VMs that are still on the host that is being drained.", []string{"host"}, nil)
	drainDeadlineDesc = prometheus.NewDesc("trivet_drain_deadline_timestamp_seconds",
		"Time at which the drain of a host times out, even if VMs still run on the host, in Unix time.",
		[]string{"host"}, nil)
)

// DrainCollector exports the progress of the drains that are under way. It does not export why a VM cannot be moved,
// because the number of such texts is not limited: GetDrain returns them. Only the leader exports values.
type DrainCollector struct{ vms *Service }

var _ prometheus.Collector = (*DrainCollector)(nil)

// NewDrainCollector returns a DrainCollector of the hosts of s.
func NewDrainCollector(s *Service) *DrainCollector { return &DrainCollector{vms: s} }

// Describe implements prometheus.Collector.
func (c *DrainCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{drainVMsDesc, drainFailedDesc, drainDeadlineDesc} {
		out <- d
	}
}

// Collect implements prometheus.Collector. It exports nothing if this member does not lead, or if the records cannot be
// read.
func (c *DrainCollector) Collect(out chan<- prometheus.Metric) {
	if !c.vms.opts.Nodes.Leads() {
		return
	}
	drains, err := c.read()
	if err != nil {
		return
	}
	gauge := func(desc *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	for id, d := range drains {
		host := string(id)
		failed := 0
		status := map[drain.Status]int{}
		for _, vm := range d.VMs {
			status[vm.Status]++
			if vm.Status != drain.Moved {
				failed += vm.Tries
			}
		}
		for s := drain.Waiting; s <= drain.ShutDownDone; s++ {
			gauge(drainVMsDesc, float64(status[s]), host, s.String())
		}
		gauge(drainFailedDesc, float64(failed), host)
		gauge(drainDeadlineDesc, float64(d.Drain.Deadline)/1000, host)
	}
}

// read returns the drains that are under way, by the IDs of the hosts.
func (c *DrainCollector) read() (map[cloud.NodeID]DrainProgress, error) {
	out := map[cloud.NodeID]DrainProgress{}
	return out, c.vms.opts.Store.Local(func(v *store.View) error {
		for _, id := range c.vms.opts.Nodes.Draining() {
			d, err := c.vms.readDrained(v, id)
			if err != nil {
				return err
			}
			if d == nil || !d.host.Draining() { // the drain has ended since the call of Draining
				continue
			}
			vms, err := c.vms.describeDrained(v, d)
			if err != nil {
				return err
			}
			out[id] = DrainProgress{Drain: d.host.Drain, VMs: vms}
		}
		return nil
	})
}
