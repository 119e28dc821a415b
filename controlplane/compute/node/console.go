package node

import (
	"context"
	"time"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"

	"github.com/trivet-cloud/trivet/controlplane/records/leader"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Limits of reads from one host: in total, and of one project and one org. An agent has the same total limits.
const (
	maxConsoles         = 64
	maxProjectConsoles  = 4
	maxOrgConsoles      = 8
	maxSnapshots        = 16
	maxProjectSnapshots = 4
	maxOrgSnapshots     = 8
)

func newConsoleReads() *hostReads {
	return &hostReads{
		plural: "reads of console logs", object: "the VM", reason: "TOO_MANY_CONSOLES", perHost: maxConsoles, perProject: maxProjectConsoles,
		perOrg: maxOrgConsoles, open: map[string]*hostRead{},
	}
}

func newSnapshotReads() *hostReads {
	return &hostReads{
		plural: "reads of snapshots", object: "the volume", reason: "TOO_MANY_EXPORTS", perHost: maxSnapshots, perProject: maxProjectSnapshots,
		perOrg: maxOrgSnapshots, open: map[string]*hostRead{},
	}
}

type consoleRequest struct {
	Tenant cloud.Tenant
	Node   cloud.NodeID
	VM     cloud.VMID
	Follow bool
	Tail   uint64
}

// ReadConsole reads the console log of a tenant's VM from its host, and calls send with each part. It forwards the
// request to the leader, to which the host is connected. tail is the maximum size, in bytes, of the existing output
// that is sent. If follow is true, ReadConsole continues with new output until ctx ends.
func (s *Service) ReadConsole(ctx context.Context, t cloud.Tenant, node cloud.NodeID, vm cloud.VMID, follow bool, tail uint64, send func([]byte) error) error {
	return readConsoleCommand.Call(ctx, s.opts.Commands, consoleRequest{t, node, vm, follow, tail}, send)
}

var readConsoleCommand = leader.NewStream("node.console", (*Service).readConsoleOnLeader)

// readConsoleOnLeader implements ReadConsole on the leader.
func (s *Service) readConsoleOnLeader(ctx context.Context, q consoleRequest, send func([]byte) error) error {
	silence := acceptTimeout
	if q.Follow {
		silence = 0 // a console may print nothing for any time
	}
	return s.read(ctx, s.consoles, q.Node, q.Tenant, func(id string) hostRequest {
		return &agentv1.ConsoleRequest{RequestId: id, VmId: string(q.VM), Follow: q.Follow, TailBytes: q.Tail}
	}, func(id string) hostRequest {
		return &agentv1.ConsoleRequest{RequestId: id, Cancel: true}
	}, silence, send)
}

// SnapshotRead describes which part of the content of a snapshot is read.
type SnapshotRead struct {
	Tenant   cloud.Tenant
	Node     cloud.NodeID // the host of the volume
	Volume   cloud.VolumeID
	Snapshot cloud.SnapshotID
	// Since is an older snapshot of the volume, or empty. Offset is in bytes. Both have the meaning of the fields of
	// ExportSnapshotRequest in storage.v1.
	Since  cloud.SnapshotID
	Offset uint64
}

// snapshotSilence is the maximum wait for each further message with a part of a snapshot. An agent that is comparing
// snapshots sends empty messages more often.
const snapshotSilence = 30 * time.Second

// ReadSnapshot reads the content of a snapshot from its host, and calls send with each part of the stream that
// ExportSnapshot of storage.v1 describes. It forwards the request to the leader, to which the host is connected.
func (s *Service) ReadSnapshot(ctx context.Context, q SnapshotRead, send func([]byte) error) error {
	return readSnapshotCommand.Call(ctx, s.opts.Commands, q, send)
}

var readSnapshotCommand = leader.NewStream("node.read-snapshot", (*Service).readSnapshotOnLeader)

// readSnapshotOnLeader implements ReadSnapshot on the leader.
func (s *Service) readSnapshotOnLeader(ctx context.Context, q SnapshotRead, send func([]byte) error) error {
	return s.read(ctx, s.snapshots, q.Node, q.Tenant, func(id string) hostRequest {
		return &agentv1.SnapshotRequest{
			RequestId: id, VolumeId: string(q.Volume), SnapshotId: string(q.Snapshot), SinceSnapshotId: string(q.Since), Offset: q.Offset,
		}
	}, func(id string) hostRequest {
		return &agentv1.SnapshotRequest{RequestId: id, Cancel: true}
	}, snapshotSilence, send)
}
