package qemu

import (
	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// eventRate is the maximum number of QEMU's events that are handled per second on average, and eventBurst the maximum
// number that are handled at once. Each event may cause a QMP query and wakes the VM's reconcile loop, so a compromised
// QEMU could otherwise use much CPU. A normal QEMU sends a few events a minute. Excess events are dropped from the
// connection's log, and QEMU is queried for its state once instead.
const eventRate, eventBurst = 20, 200

// followEvents reads QEMU's events until p.life ends. When the connection ends, it opens a new one.
func (p *Process) followEvents() {
	for p.life.Err() == nil {
		conn, err := p.inspect.Conn(p.life)
		if err == nil {
			err = p.readEvents(conn)
		}
		if err != nil && p.life.Err() == nil {
			pause(p.life, retryPause)
		}
	}
}

// readEvents handles the events of one connection until that ends. It queries the run state at first, after each event
// that may change the run state, and when events were dropped.
func (p *Process) readEvents(conn *qmp.Conn) error {
	events := conn.Subscribe(conn.Mark())
	if err := p.handleRunState(conn); err != nil {
		return err
	}
	pace := rate.NewLimiter(eventRate, eventBurst)
	for {
		if err := pace.Wait(p.life); err != nil {
			return err
		}
		e, err := events.Next(p.life)
		if err != nil {
			return err
		}
		again := e.Dropped > 0
		switch e.Name {
		case "SHUTDOWN", "STOP", "GUEST_PANICKED":
			again = true
		case "BLOCK_JOB_COMPLETED":
			p.recordFlattenError(e)
		case "BLOCK_IO_ERROR":
			p.recordDiskError(e)
		}
		if again {
			if err := p.handleRunState(conn); err != nil {
				return err
			}
		}
		p.notify()
	}
}
