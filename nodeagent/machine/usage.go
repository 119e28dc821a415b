package machine

import (
	"context"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// measureWithin is the maximum time of the queries to one QEMU.
	measureWithin = 2 * time.Second
	// measureAtOnce is the maximum number of VMs that are measured concurrently. It is above 1, so that a few
	// unresponsive VMs do not delay the others.
	measureAtOnce = 8
)

// sample is a VM's last measurement.
type sample struct {
	at    time.Time
	cpu   time.Duration
	usage *cloud.Usage
	disks []qemu.DiskStats // the counters from the last successful query
	guest *qemu.GuestMemory
}

// LastReport is the last observation and measurement of a VM.
type LastReport struct {
	ID       cloud.VMID
	Observed cloud.Observed
	Usage    *cloud.Usage // nil if there is no measurement
	CPU      time.Duration
	Guest    *qemu.GuestMemory // nil if the guest's balloon driver reports nothing
}

// LastReports returns the last observation and measurement of all VMs. It does not measure again.
func (s *MachineSet) LastReports() []LastReport {
	var out []LastReport
	for _, v := range s.machines() {
		v.mu.Lock()
		out = append(out, LastReport{ID: v.id, Observed: v.seen.Observed, Usage: v.sample.usage, CPU: v.sample.cpu, Guest: v.sample.guest})
		v.mu.Unlock()
	}
	return out
}

// VolumeStats returns the last measured I/O counters of the volumes of running VMs.
func (s *MachineSet) VolumeStats() map[cloud.VolumeID]qemu.DiskStats {
	out := map[cloud.VolumeID]qemu.DiskStats{}
	for _, v := range s.machines() {
		v.mu.Lock()
		for _, d := range v.sample.disks {
			if d.Volume != "" {
				out[cloud.VolumeID(d.Volume)] = d
			}
		}
		v.mu.Unlock()
	}
	return out
}

// Measure measures the resource usage of all VMs that have a process. CPUPercent is the average since the last
// measurement, or since the start of the process; 100 is one fully used CPU. The bytes of disks and networks are
// counted since the start of the process, for the disks and network interfaces that the VM has now.
func (s *MachineSet) Measure(ctx context.Context) map[cloud.VMID]cloud.Usage {
	var mu sync.Mutex
	out := map[cloud.VMID]cloud.Usage{}
	var asking sync.WaitGroup
	places := make(chan struct{}, measureAtOnce)
	ports := s.portCounters(ctx)
	for _, v := range s.machines() {
		v.mu.Lock()
		p := v.process
		v.mu.Unlock()
		if p == nil {
			continue
		}
		places <- struct{}{} // Blocks for at most measureWithin.
		asking.Go(func() {
			defer func() { <-places }()
			if u, ok := v.measure(ctx, p, ports); ok {
				mu.Lock()
				defer mu.Unlock()
				out[v.id] = u
			}
		})
	}
	asking.Wait()
	return out
}

// portCounters returns the counters of the host's ports. It reads them for all VMs together, because the kernel lists
// all devices of a VPC at once.
func (s *MachineSet) portCounters(ctx context.Context) map[cloud.PortID]cloud.PortCounters {
	if s.o.Taps == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, measureWithin)
	defer cancel()
	return s.o.Taps.PortCounters(ctx)
}

// addPorts adds to u the bytes that the guest has received and sent through its network interfaces. It returns false if
// the counters of an interface are missing.
func addPorts(u *cloud.Usage, nics []qemu.NIC, ports map[cloud.PortID]cloud.PortCounters) (complete bool) {
	complete = true
	for _, n := range nics {
		c, known := ports[cloud.PortID(n.Port)]
		u.NetworkReceivedBytes += c.ReceivedBytes
		u.NetworkTransmitBytes += c.SentBytes
		complete = complete && known
	}
	return complete
}

func (v *VM) measure(
	ctx context.Context, p *qemu.Process, ports map[cloud.PortID]cloud.PortCounters,
) (cloud.Usage, bool) {
	ctx, cancel := context.WithTimeout(ctx, measureWithin)
	defer cancel()
	now := time.Now()
	usage, err := p.Usage()
	if err != nil {
		return cloud.Usage{}, false // The process has just ended.
	}
	u := cloud.Usage{MemoryMiB: usage.Memory >> 20}
	stats, err := p.DiskStats(ctx)
	var guest *qemu.GuestMemory
	if m, known, err := p.GuestMemory(ctx); err == nil && known {
		guest = &m
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.process != p {
		return cloud.Usage{}, false
	}
	for _, s := range stats {
		u.DiskReadBytes += s.ReadBytes
		u.DiskWriteBytes += s.WriteBytes
	}
	if err != nil && v.sample.usage != nil { // Keep the last counters of a QEMU that does not answer.
		u.DiskReadBytes, u.DiskWriteBytes = v.sample.usage.DiskReadBytes, v.sample.usage.DiskWriteBytes
	}
	if last := v.sample.usage; !addPorts(&u, p.Record().Spec.NICs, ports) && last != nil {
		u.NetworkReceivedBytes, u.NetworkTransmitBytes = last.NetworkReceivedBytes, last.NetworkTransmitBytes
	}
	used, over := usage.CPU-v.sample.cpu, now.Sub(v.sample.at)
	if v.sample.at.IsZero() {
		used, over = usage.CPU, now.Sub(p.Record().Started)
	}
	if over > 0 && used > 0 {
		u.CPUPercent = 100 * float64(used) / float64(over)
	}
	if err != nil {
		stats = v.sample.disks
	}
	u.GuestAddresses = v.addresses.valid()
	v.sample = sample{at: now, cpu: usage.CPU, usage: &u, disks: stats, guest: guest}
	return u, true
}
