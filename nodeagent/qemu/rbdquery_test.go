package qemu

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/nodeagent/qmp"
)

// serveQMP answers the commands at c like a QEMU without jobs, nodes and descriptor sets. It calls check with the
// name of each command.
func serveQMP(c net.Conn, check func(command string)) {
	fmt.Fprint(c, `{"QMP":{"version":{"qemu":{"micro":0,"minor":2,"major":7},"package":""},"capabilities":[]}}`+"\n")
	in := bufio.NewScanner(c)
	for in.Scan() {
		var q struct {
			Execute string `json:"execute"`
			ID      uint64 `json:"id"`
		}
		if json.Unmarshal(in.Bytes(), &q) != nil {
			return
		}
		check(q.Execute)
		result := "{}"
		if strings.HasPrefix(q.Execute, "query-") {
			result = "[]"
		}
		fmt.Fprintf(c, `{"return":%s,"id":%d}`+"\n", result, q.ID)
	}
}

// TestQueriesReadFromNoImage checks the cleanup of copies, which every restart of the agent causes, and the search
// for a disk error of a VM with an RBD image. They must not send the commands for which QEMU 7.2 reads from each
// image, because QEMU would hang while the Ceph cluster is away.
func TestQueriesReadFromNoImage(t *testing.T) {
	ours, theirs := net.Pipe()
	var sent []string
	done := make(chan struct{})
	go func() {
		defer close(done)
		serveQMP(theirs, func(command string) { sent = append(sent, command) })
	}()
	conn, err := qmp.New(t.Context(), ours)
	require.NoError(t, err)
	p := &Process{life: t.Context(), wake: make(chan struct{}, 1)}
	p.record.Spec.Disks = []Disk{{ID: "data", RBD: &RBDImage{}}}
	require.NoError(t, deleteCopyNodes(t.Context(), conn))
	require.NoError(t, p.findDiskError(conn))
	require.Equal(t, "a disk had an error; the guest is stopped", p.LastError())
	require.NoError(t, conn.Close())
	_ = theirs.Close()
	<-done
	require.Contains(t, sent, "query-fdsets")
	require.NotContains(t, sent, "query-named-block-nodes")
	require.NotContains(t, sent, "query-block")
}
