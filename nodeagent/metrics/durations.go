package metrics

import "github.com/prometheus/client_golang/prometheus"

// Durations are the histograms of the steps of VMs that can take long, in seconds. The caller observes each step when it
// has ended.
type Durations struct{ Launch, Build, Stop prometheus.Histogram }

// NewDurations returns empty histograms.
func NewDurations() *Durations {
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "trivet_agent_" + name + "_duration_seconds", Help: help,
			// From the start of a small VM to the fetch of a large image, and the longest time for which a stop waits.
			Buckets: []float64{.05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600},
		})
	}
	return &Durations{
		Launch: histogram("launch",
			"Duration of the successful starts of QEMU, with the opening of network interfaces and volumes."),
		Build: histogram("build",
			"Duration of the successful creations of the disks of a VM, with the fetch of images that the host did not have."),
		Stop: histogram("stop",
			"Time from the request to stop a VM until its process has ended, including the time that the guest gets to shut down."),
	}
}
