package qemu

import (
	"context"
	"time"

	"golang.org/x/time/rate"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

const (
	// jobPause is the maximum time between two queries for the state of QEMU's background jobs. It protects against a
	// QEMU that sends no event.
	jobPause = 2 * time.Second
	// lostPause is the pause before the next query after a connection has ended or events were dropped.
	lostPause = 100 * time.Millisecond
)

// jobWait waits for changes of QEMU's background jobs, between queries for their state. Before each query, its user
// calls begin with the connection of the query. Because of that, wait misses no change since the query.
//
// After many changes, wait pauses longer, because a compromised QEMU could otherwise use much CPU of the agent (see
// eventRate).
type jobWait struct {
	conn  *qmp.Conn
	from  qmp.Mark
	pace  *rate.Limiter
	limit time.Duration // jobPause, more in tests
}

func newJobWait() *jobWait {
	return &jobWait{pace: rate.NewLimiter(eventRate, eventBurst), limit: jobPause}
}

// begin makes the next wait return after the first change from now on.
func (j *jobWait) begin(conn *qmp.Conn) { j.conn, j.from = conn, conn.Mark() }

// wait returns after the first change of any job since begin, after jobPause, or when ctx ends. It also returns when
// events were dropped or the connection has ended. The user then queries the jobs again.
func (j *jobWait) wait(ctx context.Context) {
	bounded, cancel := context.WithTimeout(ctx, j.limit)
	defer cancel()
	_, err := j.conn.Wait(bounded, j.from, func(e qmp.Event) bool { return e.Name == "JOB_STATUS_CHANGE" })
	if err != nil && bounded.Err() == nil {
		pause(ctx, lostPause)
	}
	_ = j.pace.Wait(ctx)
}
