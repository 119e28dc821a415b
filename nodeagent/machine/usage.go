package machine

import (
	"context"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qemu"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

const (
	// measureWithin bounds the questions to one QEMU.
	measureWithin = 2 * time.Second
	// measureAtOnce is how many are asked at a time, so that some mute ones do not hold up the rest for long.
	measureAtOnce = 8
)

// sample is a VM's last measurement.
type sample struct {
	at    time.Time
	cpu   time.Duration
	usage *cloud.Usage
}

// Seen is a VM as it was last seen and measured.
type Seen struct {
	ID       cloud.VMID
	Observed cloud.Observed
	Usage    *cloud.Usage // nil when nothing was measured
	CPU      time.Duration
}

// Seen tells of all VMs without looking at them.
func (s *MachineSet) Seen() []Seen {
	var out []Seen
	for _, v := range s.machines() {
		v.mu.Lock()
		out = append(out, Seen{ID: v.id, Observed: v.seen.Observed, Usage: v.sample.usage, CPU: v.sample.cpu})
		v.mu.Unlock()
	}
	return out
}

// Measure asks what every VM uses that has a process. CPUPercent is of one processor, since the last measurement.
func (s *MachineSet) Measure(ctx context.Context) map[cloud.VMID]cloud.Usage {
	var mu sync.Mutex
	out := map[cloud.VMID]cloud.Usage{}
	var asking sync.WaitGroup
	places := make(chan struct{}, measureAtOnce)
	for _, v := range s.machines() {
		v.mu.Lock()
		p := v.process
		v.mu.Unlock()
		if p == nil {
			continue
		}
		places <- struct{}{} // given back within measureWithin
		asking.Go(func() {
			defer func() { <-places }()
			if u, ok := v.measure(ctx, p); ok {
				mu.Lock()
				defer mu.Unlock()
				out[v.id] = u
			}
		})
	}
	asking.Wait()
	return out
}

func (v *VM) measure(ctx context.Context, p *qemu.Process) (cloud.Usage, bool) {
	ctx, cancel := context.WithTimeout(ctx, measureWithin)
	defer cancel()
	now := time.Now()
	whole, err := p.Usage()
	if err != nil {
		return cloud.Usage{}, false // it has just ended
	}
	u := cloud.Usage{MemoryMiB: whole.Memory >> 20}
	stats, err := p.DiskStats(ctx)
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.process != p {
		return cloud.Usage{}, false
	}
	for _, s := range stats {
		u.DiskReadBytes += s.ReadBytes
		u.DiskWriteBytes += s.WriteBytes
	}
	if err != nil && v.sample.usage != nil { // a QEMU that does not answer did not begin anew
		u.DiskReadBytes, u.DiskWriteBytes = v.sample.usage.DiskReadBytes, v.sample.usage.DiskWriteBytes
	}
	used, over := whole.CPU-v.sample.cpu, now.Sub(v.sample.at)
	if v.sample.at.IsZero() {
		used, over = whole.CPU, now.Sub(p.Record().Started)
	}
	if over > 0 && used > 0 {
		u.CPUPercent = 100 * float64(used) / float64(over)
	}
	v.sample = sample{at: now, cpu: whole.CPU, usage: &u}
	return u, true
}
