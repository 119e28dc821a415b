package qemu

import (
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/console"
)

// trimLogs limits the size of console.log and stderr.log until p.life ends. It kills a QEMU that writes to a log faster
// than a guest's serial port can.
func (p *Process) trimLogs() {
	logs := []*console.Log{p.home.Console(), p.home.stderr()}
	seen := []growth{lengthOf(logs[0]), lengthOf(logs[1])}
	t := time.NewTicker(trimEvery)
	defer t.Stop()
	for {
		select {
		case <-t.C:
		case <-p.life.Done():
			return
		}
		for i, l := range logs {
			now := lengthOf(l)
			if seen[i].floods(now) {
				p.killFlooding()
				return
			}
			// An error is ignored, because Trim is called again after trimEvery.
			_ = l.Trim()
			seen[i] = lengthOf(l)
		}
	}
}

// A log that grows between two measurements by more than floodBytes, and faster than floodRate bytes a second, is not a
// guest's console output: an emulated serial port carries less than 1 MB a second.
const (
	floodBytes = 32 << 20
	floodRate  = 4 << 20
)

// growth is a measurement of the length of a log, in bytes, with its time. It is zero if the length could not be read.
// The first measurement is made after this agent has started or adopted the process, so data written while no agent ran
// does not count as growth.
type growth struct {
	length int64
	at     time.Time
}

func lengthOf(l *console.Log) growth {
	n, err := l.Length()
	if err != nil {
		return growth{}
	}
	return growth{n, time.Now()}
}

func (g growth) floods(now growth) bool {
	grown := now.length - g.length
	return !g.at.IsZero() && !now.at.IsZero() && grown > floodBytes && float64(grown) > floodRate*now.at.Sub(g.at).Seconds()
}

// killFlooding records exitFlooded and kills QEMU.
func (p *Process) killFlooding() {
	p.mu.Lock()
	if p.exit.Reason == "" {
		p.exit = exitFlooded
		// If the write fails, the next Adopt determines the exit again.
		_ = p.home.write("exit.json", p.exit)
	}
	p.mu.Unlock()
	_ = p.killNow(p.life)
}
