package qemu

import (
	"context"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

const (
	balloonPath = "/machine/peripheral/balloon"
	// statsInterval is the interval, in seconds, at which QEMU asks the guest's balloon driver for statistics.
	statsInterval = 10
	// statsValid is the age at which statistics are no longer used. A guest that has stopped answers no more.
	statsValid = time.Minute
)

// GuestMemory is the memory of a guest in bytes, as the guest's balloon driver reports it.
type GuestMemory struct {
	// Total is the memory that the guest's kernel manages. Available is the part that new programs could use.
	Total, Available uint64
}

// GuestMemory returns what the guest's balloon driver reported last, and false if it has not reported within
// statsValid. The guest can report any values. Values that are larger than the VM's memory are ignored. The first call
// for a QEMU makes it ask the driver for reports.
func (p *Process) GuestMemory(ctx context.Context) (m GuestMemory, known bool, err error) {
	var reply struct {
		Stats struct {
			Total     uint64 `json:"stat-total-memory"`
			Available uint64 `json:"stat-available-memory"`
		} `json:"stats"`
		At int64 `json:"last-update"` // in Unix seconds, by the host's clock
	}
	err = p.call(ctx, p.inspect, func(ctx context.Context, conn *qmp.Conn) error {
		if !p.statsAsked.Load() {
			interval := object{"path": balloonPath, "property": "guest-stats-polling-interval", "value": statsInterval}
			if err := conn.Do(ctx, "qom-set", interval, nil); err != nil {
				return err
			}
			p.statsAsked.Store(true)
		}
		return conn.Do(ctx, "qom-get", object{"path": balloonPath, "property": "guest-stats"}, &reply)
	})
	if err != nil {
		return m, false, err
	}
	m = GuestMemory{reply.Stats.Total, reply.Stats.Available}
	// QEMU gives the largest uint64 for a value that the driver does not report.
	known = time.Since(time.Unix(reply.At, 0)) < statsValid &&
		m.Total <= p.Record().Spec.MemoryMiB<<20 && m.Available <= m.Total
	return m, known, nil
}
