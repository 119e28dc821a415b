package vm

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/controlplane/records/store"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

var (
	hostsDesc = prometheus.NewDesc("trivet_hosts", "Hosts, by state.", []string{"state"}, nil)
	vmsDesc   = prometheus.NewDesc("trivet_vms", "VMs, by org, project and state.", []string{"org", "project", "state"}, nil)

	hostInfoDesc = prometheus.NewDesc("trivet_host_info", "Name and versions of a host, as labels. The value is 1.",
		[]string{"host", "name", "agent_version", "qemu_version"}, nil)
	hostStateDesc = prometheus.NewDesc("trivet_host_state",
		"1 for the current state of the host. The other states have no series.", []string{"host", "state"}, nil)
	heartbeatDesc = prometheus.NewDesc("trivet_host_last_heartbeat_timestamp_seconds",
		"Time of the last heartbeat of the host to the leader, in Unix time; absent if this leader has received none.",
		[]string{"host"}, nil)
	hostAllocatableDesc = prometheus.NewDesc("trivet_host_allocatable", "Allocatable capacity of the host, by resource.",
		[]string{"host", "resource"}, nil)
	hostAllocatedDesc = prometheus.NewDesc("trivet_host_allocated", "Allocated capacity of the host, by resource.",
		[]string{"host", "resource"}, nil)
	vmInfoDesc = prometheus.NewDesc("trivet_vm_info", "Name, tenant and host of a VM, as labels. The value is 1.",
		[]string{"vm", "name", "org", "project", "host"}, nil)
)

// InventoryCollector exports the hosts and the VMs of the cloud, with their names, and the results of placements. Only
// the leader exports hosts and VMs, because only the leader knows which hosts are READY. The values of VMs are at most
// 30 seconds old.
type InventoryCollector struct {
	vms     *Service
	records *store.Expiring[[]inventoryVM]
}

// inventoryVM has the fields of a VM that are labels of metrics.
type inventoryVM struct {
	id     cloud.VMID
	name   string
	tenant cloud.Tenant
	host   cloud.NodeID
	state  cloud.State
}

var _ prometheus.Collector = (*InventoryCollector)(nil)

// NewInventoryCollector returns an InventoryCollector of the hosts and VMs of s.
func NewInventoryCollector(s *Service) *InventoryCollector {
	return &InventoryCollector{s, store.NewExpiring(s.opts.Store, store.MetricsTTL, listInventory)}
}

// Describe implements prometheus.Collector.
func (c *InventoryCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		hostsDesc, vmsDesc, hostInfoDesc, hostStateDesc, heartbeatDesc, hostAllocatableDesc, hostAllocatedDesc, vmInfoDesc,
		placementsDesc, refusedHostsDesc,
	} {
		out <- d
	}
}

// Collect implements prometheus.Collector. If this member does not lead, it exports the results of placements only.
func (c *InventoryCollector) Collect(out chan<- prometheus.Metric) {
	c.vms.placements.collect(out)
	if !c.vms.opts.Nodes.Leads() {
		return
	}
	c.collectHosts(out)
	c.collectVMs(out)
}

// hostStates are the states that trivet_hosts always exports, with the value 0 if no host is in the state.
var hostStates = []cloud.NodeState{cloud.NodeReady, cloud.NodeNotReady, cloud.NodeCordoned, cloud.NodeDraining, cloud.NodeMaintenance}

func (c *InventoryCollector) collectHosts(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	count := map[cloud.NodeState]int{}
	for _, s := range hostStates {
		count[s] = 0
	}
	heartbeats := c.vms.opts.Nodes.LastHeartbeats()
	for _, h := range c.vms.opts.Nodes.Fleet() {
		n, id := &h.Node, string(h.Node.ID)
		count[h.State]++
		gauge(hostInfoDesc, 1, id, n.Name, n.AgentVersion, n.QEMUVersion)
		gauge(hostStateDesc, 1, id, h.State.String())
		if at, ok := heartbeats[n.ID]; ok {
			gauge(heartbeatDesc, float64(at.UnixMilli())/1000, id)
		}
		for i, amount := range amounts(n.AllAllocatable()) {
			gauge(hostAllocatableDesc, amount, id, resources[i])
		}
		for i, amount := range amounts(n.Allocated) {
			gauge(hostAllocatedDesc, amount, id, resources[i])
		}
	}
	for state, n := range count {
		gauge(hostsDesc, float64(n), state.String())
	}
}

func (c *InventoryCollector) collectVMs(out chan<- prometheus.Metric) {
	records, err := c.records.Get()
	if err != nil {
		return
	}
	type series struct {
		tenant cloud.Tenant
		state  cloud.State
	}
	count := map[series]int{}
	for _, vm := range records {
		count[series{vm.tenant, vm.state}]++
		out <- prometheus.MustNewConstMetric(vmInfoDesc, prometheus.GaugeValue, 1,
			string(vm.id), vm.name, string(vm.tenant.Org), string(vm.tenant.Project), string(vm.host))
	}
	for s, n := range count {
		out <- prometheus.MustNewConstMetric(vmsDesc, prometheus.GaugeValue, float64(n),
			string(s.tenant.Org), string(s.tenant.Project), s.state.String())
	}
}

// listInventory returns all VMs.
func listInventory(v *store.View) (out []inventoryVM, err error) {
	all, _, err := VMs.List(v, 0)
	for _, r := range all {
		out = append(out, inventoryVM{r.Value.ID, r.Value.Name, r.Value.Tenant(), r.Value.Node, r.Value.State})
	}
	return out, err
}

// resources are the values of the label resource, in the order of amounts.
var resources = []string{"vcpus", "memory_bytes", "storage_bytes", "hugepages_bytes", "dedicated_vcpus"}

// amounts returns the amounts of the resources in c, in the order of resources. Memory and storage are in bytes.
func amounts(c cloud.Capacity) []float64 {
	return []float64{
		float64(c.VCPUs), float64(c.MemoryMiB << 20), float64(c.StorageGiB << 30), float64(c.HugepagesMiB << 20), float64(c.DedicatedVCPUs),
	}
}
