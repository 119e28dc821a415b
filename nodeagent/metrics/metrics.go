// Package metrics serves metrics of the agent and its guests over HTTP: GET /metrics for Prometheus, GET /health for
// liveness checks.
//
// Requests for /metrics need a token if one is configured. Requests for /health need no token. To block DNS rebinding
// by web pages, the Host header of a request must be an IP address, localhost, or one of the host's own names.
//
// Each request for /metrics reads the values from the functions in [Sources]; nothing is cached. Only the histograms in
// [Durations] are updated when a step ends. Labels hold only ids
// of VMs, VPCs and volumes, and names that operators chose: an id reveals nothing to a reader who may not see the VM.
package metrics

import (
	"encoding/json"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/scrape"
)

// Sources supplies the values of the metrics. All fields are required. The functions must return quickly and be safe
// for concurrent use.
type Sources struct {
	Version string
	Uplink  func() Uplink
	VMs     func() []VM
	Counts  func() Counts
	// Durations are the histograms of steps of VMs.
	Durations *Durations
	// Networks returns the VPCs of this host.
	Networks func() Networks
	// Storage returns the storage pools and volumes of this host.
	Storage func() Storage
	// Host returns the memory and processor time in use on this host, or a zero Load if they cannot be read.
	Host func() facts.Load
	// Images returns the size, the limit and the counters of this host's image cache.
	Images func() Images
}

// Networks has totals of all VPCs since the agent started, and the VPCs.
type Networks struct {
	Applied, Failures uint64 // times that a VPC was applied, and could not be applied
	// Repairs counts the times that a change of the kernel's state by somebody else was repaired.
	Repairs uint64
	Writes  uint64 // changes of the kernel's state
	// ApplyTime is the time that applying took.
	ApplyTime time.Duration
	VPCs      []VPC
}

// VPC is a VPC on this host.
type VPC struct {
	ID           cloud.VPCID
	Ports, Rules int
	Failed       bool // the last attempt to apply the VPC failed, or left records out
	// Filter is nil until the counters of the VPC's packet filter have been read once.
	Filter *Filter
}

// Filter has the counters of the packet filter of a VPC.
type Filter struct {
	Drops                        []Drop
	Connections, ConnectionLimit uint64
}

// Drop is the number of packets that were dropped for a reason.
type Drop struct {
	Reason  string // one of a few constants
	Packets uint64
}

// Uplink is the state of the connection to the control plane.
type Uplink struct {
	Connected bool
	Term      uint64
	Revision  int64
	Sessions  uint64 // connections that a member of the control plane accepted
	Failures  uint64 // connections and attempts that ended with an error
	// Lease is the remaining time of the host's lease. It is negative after the lease has ended, and 0 if the host
	// never had a lease.
	Lease time.Duration
	// Certificate is the time at which the host's certificate expires, or the zero time if the host has none.
	Certificate time.Time
}

// VM is the last report of one VM on this host.
type VM struct {
	ID       cloud.VMID
	Observed cloud.Observed
	// Usage is nil if the VM has no process or was not measured yet. CPU is the processor time of the VM's processes
	// since they started.
	Usage *cloud.Usage
	CPU   time.Duration
	Guest *GuestMemory // nil if the guest does not report it
}

// GuestMemory is the memory of a guest in bytes, as the guest's balloon driver reports it.
type GuestMemory struct{ Total, Available uint64 }

// Counts holds totals since the agent started.
type Counts struct {
	Launches, LaunchFailures uint64
	Builds, BuildFailures    uint64
	// Deaths counts the QEMU processes that ended with cloud.ExitFailed: neither on request nor because the guest
	// powered itself off.
	Deaths uint64
}

// observed maps values of cloud.Observed to their names in agent.v1, in lower case.
var observed = [...]string{
	cloud.ObservedAbsent: "absent", cloud.ObservedBuilding: "building", cloud.ObservedBuilt: "built",
	cloud.ObservedLaunching: "launching", cloud.ObservedRunning: "running", cloud.ObservedStopping: "stopping",
	cloud.ObservedBuildFailed: "build_failed", cloud.ObservedEnded: "ended",
}

// newRegistry returns a registry of all metrics of the agent.
func newRegistry(s Sources) *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collector{s}, s.Durations.Launch, s.Durations.Build, s.Durations.Stop,
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	return registry
}

// Access defines which requests Handler accepts.
type Access struct {
	// Hosts are the names that a request may have in its Host header, besides IP addresses and localhost.
	Hosts []string
	// Token returns the token that a request for /metrics must have in its header Authorization. If Token is nil,
	// requests need no token.
	Token func() (string, error)
}

// Handler serves /metrics and /health to requests that have an accepted Host header; other requests get 403. Requests
// for /metrics without the required token get 401.
func Handler(s Sources, access Access, log *slog.Logger) http.Handler {
	registry := newRegistry(s)
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", scrape.RequireToken(access.Token, log, promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn), MaxRequestsInFlight: 4, Timeout: 10 * time.Second,
	})))
	mux.HandleFunc("GET /health", health)
	return onlyFor(access.Hosts, mux)
}

// onlyFor returns a handler that passes requests to next if their Host header is an IP address, localhost or one of
// names. It responds to all others with 403.
func onlyFor(names []string, next http.Handler) http.Handler {
	allowed := map[string]bool{"localhost": true}
	for _, name := range names {
		allowed[strings.ToLower(name)] = true
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host := r.Host
		if h, _, err := net.SplitHostPort(host); err == nil {
			host = h
		}
		if net.ParseIP(strings.Trim(host, "[]")) == nil && !allowed[strings.ToLower(host)] {
			http.Error(w, "this host does not serve its metrics by that name: use its IP address or its host name, or add the name to "+
				"metrics_hosts in the agent's configuration", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// health serves GET /health. The JSON body has the same form as in the REST API of the control plane.
func health(w http.ResponseWriter, _ *http.Request) {
	id := uuid.NewString()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Request-Id", id)
	// An error means that the client has disconnected, so it is ignored.
	_ = json.NewEncoder(w).Encode(map[string]any{
		"data": map[string]string{"status": "healthy"},
		"meta": map[string]string{"request_id": id, "timestamp": time.Now().UTC().Format(time.RFC3339Nano)},
	})
}

// collector is the prometheus.Collector of the agent's metrics. It reads the Sources at each scrape.
type collector struct{ s Sources }

var _ prometheus.Collector = collector{}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("trivet_agent_"+name, help, labels, nil)
}

var (
	build      = desc("build_info", "Version of the agent, as a label. The value is 1.", "version")
	connected  = desc("uplink_connected", "1 while the host is connected to the leader of the control plane, otherwise 0.")
	term       = desc("uplink_term", "Highest raft term of the control plane that the agent has received.")
	revision   = desc("uplink_revision", "Revision of the control plane's records from which the agent's assignment was computed.")
	sessions   = desc("uplink_sessions_total", "Sessions with the control plane that a member has accepted.")
	failures   = desc("uplink_failures_total", "Sessions, and attempts to open one, that ended with an error.")
	lease      = desc("lease_seconds", "Remaining time of the host's lease; 0 if it has ended or the host has none.")
	expiry     = desc("certificate_expiry_timestamp_seconds", "Time at which the host's certificate for the control plane expires, in Unix time.")
	vms        = desc("vms", "VMs on this host, by the state that the agent observes.", "observed")
	launches   = desc("launches_total", "Starts of QEMU, by result.", "result")
	builds     = desc("builds_total", "Creations of the disks of a VM, by result.", "result")
	deaths     = desc("guest_deaths_total", "QEMU processes that ended neither on request nor because the guest powered itself off.")
	cpu        = desc("vm_cpu_seconds_total", "Processor time of the VM's processes since they started.", "vm")
	memory     = desc("vm_memory_bytes", "Memory of the VM's processes.", "vm")
	guestTotal = desc("vm_guest_memory_bytes", "Memory that the guest's kernel manages, as the guest's balloon driver reports it.", "vm")
	guestFree  = desc("vm_guest_memory_available_bytes", "Memory that new programs in the guest could use, as the guest's balloon driver reports it.", "vm")
	read       = desc("vm_disk_read_bytes_total", "Bytes that the guest read from its disks.", "vm")
	applies    = desc("vpc_applies_total", "Number of times that the agent configured a VPC in the kernel, by result.", "result")
	applyTime  = desc("vpc_apply_seconds_total", "Time that applying VPCs took.")
	repairs    = desc("vpc_repairs_total", "Repairs of VPCs whose kernel configuration another program had changed.")
	netWrites  = desc("vpc_writes_total", "Changes of the kernel's state of VPCs.")
	vpcPorts   = desc("vpc_ports", "Ports of the VPC on this host.", "vpc")
	vpcRules   = desc("vpc_rules", "Rules of the security groups of the VPC's ports on this host.", "vpc")
	vpcFailed  = desc("vpc_failed", "1 if the VPC could not be applied completely.", "vpc")
	vpcDrops   = desc("vpc_dropped_packets_total", "Packets of the VPC that this host dropped, by reason.", "vpc", "reason")
	vpcConns   = desc("vpc_connections", "Connections of the VPC that this host tracks.", "vpc")
	vpcLimit   = desc("vpc_connection_limit", "Maximum number of connections of the VPC that this host tracks.", "vpc")
	written    = desc("vm_disk_written_bytes_total", "Bytes that the guest wrote to its disks.", "vm")
	received   = desc("vm_network_received_bytes_total", "Bytes that the guest received through its network interfaces.", "vm")
	sent       = desc("vm_network_sent_bytes_total", "Bytes that the guest sent through its network interfaces.", "vm")
)

// Describe sends the descriptions of all metrics, as prometheus.Collector requires.
func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		build, connected, term, revision, sessions, failures, lease, expiry, vms, launches, builds, deaths, cpu, memory, guestTotal, guestFree, read, written,
		received, sent, applies, applyTime, repairs, netWrites, vpcPorts, vpcRules, vpcFailed, vpcDrops, vpcConns, vpcLimit,
	} {
		to <- d
	}
	for _, d := range slices.Concat(storageDescs, imageDescs, hostDescs) {
		to <- d
	}
}

// Collect sends the present values of all metrics, as prometheus.Collector requires.
func (c collector) Collect(to chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	counter := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
	}
	gauge(build, 1, c.s.Version)
	u := c.s.Uplink()
	up := 0.0
	if u.Connected {
		up = 1
	}
	gauge(connected, up)
	gauge(term, float64(u.Term))
	gauge(revision, float64(u.Revision))
	gauge(lease, max(0, u.Lease.Seconds()))
	if !u.Certificate.IsZero() {
		gauge(expiry, float64(u.Certificate.Unix()))
	}
	counter(sessions, float64(u.Sessions))
	counter(failures, float64(u.Failures))

	n := c.s.Counts()
	counter(launches, float64(n.Launches), "ok")
	counter(launches, float64(n.LaunchFailures), "failed")
	counter(builds, float64(n.Builds), "ok")
	counter(builds, float64(n.BuildFailures), "failed")
	counter(deaths, float64(n.Deaths))

	var by [len(observed)]int
	for _, vm := range c.s.VMs() {
		if int(vm.Observed) < len(by) {
			by[vm.Observed]++
		}
		if vm.Usage == nil {
			continue
		}
		id := string(vm.ID)
		counter(cpu, vm.CPU.Seconds(), id)
		gauge(memory, float64(vm.Usage.MemoryMiB<<20), id)
		if vm.Guest != nil {
			gauge(guestTotal, float64(vm.Guest.Total), id)
			gauge(guestFree, float64(vm.Guest.Available), id)
		}
		counter(read, float64(vm.Usage.DiskReadBytes), id)
		counter(written, float64(vm.Usage.DiskWriteBytes), id)
		counter(received, float64(vm.Usage.NetworkReceivedBytes), id)
		counter(sent, float64(vm.Usage.NetworkTransmitBytes), id)
	}
	for level, name := range observed {
		if name != "" {
			gauge(vms, float64(by[level]), name)
		}
	}
	collectNetworks(c.s.Networks(), gauge, counter)
	collectStorage(c.s.Storage(), gauge, counter)
	collectImages(c.s.Images(), gauge, counter)
	collectHost(c.s.Host(), gauge, counter)
}

func collectNetworks(n Networks, gauge, counter func(*prometheus.Desc, float64, ...string)) {
	counter(applies, float64(n.Applied), "ok")
	counter(applies, float64(n.Failures), "failed")
	counter(applyTime, n.ApplyTime.Seconds())
	counter(repairs, float64(n.Repairs))
	counter(netWrites, float64(n.Writes))
	for _, v := range n.VPCs {
		failed := 0.0
		if v.Failed {
			failed = 1
		}
		gauge(vpcPorts, float64(v.Ports), string(v.ID))
		gauge(vpcRules, float64(v.Rules), string(v.ID))
		gauge(vpcFailed, failed, string(v.ID))
		if v.Filter == nil {
			continue
		}
		for _, d := range v.Filter.Drops {
			counter(vpcDrops, float64(d.Packets), string(v.ID), d.Reason)
		}
		gauge(vpcConns, float64(v.Filter.Connections), string(v.ID))
		gauge(vpcLimit, float64(v.Filter.ConnectionLimit), string(v.ID))
	}
}
