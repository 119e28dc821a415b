package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
)

// The metrics of the host as a whole are few: node_exporter has the details, under names that begin with node_.
var (
	hostMemory    = desc("host_memory_bytes", "Memory of the host.")
	hostAvailable = desc("host_memory_available_bytes", "Memory of the host that new programs and VMs could use without swapping.")
	hostCPU       = desc("host_cpu_seconds_total", "Time that all CPUs of the host together have spent since the host was started, by mode: user (with guests), system, iowait, steal or idle.", "mode")
)

var hostDescs = []*prometheus.Desc{hostMemory, hostAvailable, hostCPU}

// collectHost sends nothing if the load is zero, because it could not be read.
func collectHost(l facts.Load, gauge, counter func(*prometheus.Desc, float64, ...string)) {
	if l.MemoryBytes == 0 {
		return
	}
	gauge(hostMemory, float64(l.MemoryBytes))
	gauge(hostAvailable, float64(l.AvailableBytes))
	for _, mode := range facts.CPUModes {
		counter(hostCPU, l.CPUSeconds[mode], mode)
	}
}
