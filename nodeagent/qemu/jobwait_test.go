package qemu

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// serveJob answers the commands at c like a QEMU with one job. At each query for the jobs, the job changes once: in
// turn just before the query, between the query and the reply, and just after the reply. After the given number of
// changes there is no job. Each change has one event. serveJob returns the number of queries.
func serveJob(c net.Conn, changes int) (queries int) {
	fmt.Fprint(c, `{"QMP":{"version":{"qemu":{"micro":0,"minor":2,"major":7},"package":""},"capabilities":[]}}`+"\n")
	in := bufio.NewScanner(c)
	for in.Scan() {
		var q struct {
			Execute string `json:"execute"`
			ID      uint64 `json:"id"`
		}
		if json.Unmarshal(in.Bytes(), &q) != nil {
			return queries
		}
		change := func() {
			if changes > 0 {
				changes--
				fmt.Fprint(c, `{"event":"JOB_STATUS_CHANGE","data":{"id":"copy-a","status":"running"},"timestamp":{"seconds":1,"microseconds":0}}`+"\n")
			}
		}
		if q.Execute != "query-jobs" {
			fmt.Fprintf(c, `{"return":{},"id":%d}`+"\n", q.ID)
			continue
		}
		queries++
		when := queries % 2
		result := `[{"id":"copy-a","status":"running"}]`
		if changes == 0 {
			result = "[]"
		}
		if when == 0 { // The reply is older than the event that precedes it.
			change()
		}
		fmt.Fprintf(c, `{"return":%s,"id":%d}`+"\n", result, q.ID)
		if when == 1 {
			change()
		}
	}
	return queries
}

// TestJobWaitLosesNoChange waits for a job that ends after many changes. Each change has only one event, which comes
// before or after the reply to a query. If jobWait lost one of them, it would wait for an hour.
func TestJobWaitLosesNoChange(t *testing.T) {
	const changes = 100
	ours, theirs := net.Pipe()
	queries := make(chan int, 1)
	go func() { queries <- serveJob(theirs, changes) }()
	conn, err := qmp.New(t.Context(), ours)
	require.NoError(t, err)
	w := newJobWait()
	w.limit = time.Hour
	for {
		var jobs []job
		w.begin(conn)
		require.NoError(t, conn.Do(t.Context(), "query-jobs", nil, &jobs))
		if len(jobs) == 0 {
			break
		}
		w.wait(t.Context())
	}
	require.NoError(t, conn.Close())
	_ = theirs.Close()
	require.Equal(t, changes+1, <-queries, "one query after each change")
}

// TestJobWaitOfEndedConnection checks that a wait ends with its connection, so that the caller opens a new one.
func TestJobWaitOfEndedConnection(t *testing.T) {
	ours, theirs := net.Pipe()
	go serveJob(theirs, 0)
	conn, err := qmp.New(t.Context(), ours)
	require.NoError(t, err)
	w := newJobWait()
	w.limit = time.Hour
	w.begin(conn)
	require.NoError(t, conn.Close())
	w.wait(t.Context())
	require.NoError(t, t.Context().Err())
}
