package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Record is the state of a VM that the agent stores on disk, in addition to the VM's directory of package qemu
// (qemu.Home). It is written before a start, reset or reboot is executed, so that none is executed twice. If the agent
// crashes in between, they count as done.
type Record struct {
	// Version is the version of the format. The agent refuses records of other versions.
	Version int `json:"version"`
	// Built means that the disks are complete.
	Built bool `json:"built"`

	StartsDone uint64 `json:"starts_done"`
	// RebootsBegun is increased before the power button is pressed for a reboot. RebootsDone is increased before the
	// guest is launched again or reset, which completes the reboot.
	RebootsBegun uint64 `json:"reboots_begun"`
	RebootsDone  uint64 `json:"reboots_done"`
	ResetsDone   uint64 `json:"resets_done"`

	// Cluster is the id of the cluster that the counters belong to. It is empty in records that are older than this
	// field.
	Cluster string `json:"cluster,omitempty"`
	// Mark identifies the last start. The qemu.Record of that start has the same text in its field Owner.
	Mark string `json:"mark,omitempty"`

	// StopsWithLease means that the VM must not run after the host's lease has ended.
	StopsWithLease bool `json:"stops_with_lease,omitempty"`

	Migration Migrations `json:"migration,omitzero"`

	// Live is true from a start until the exit of the started process is written to End. The process may have ended
	// before that.
	Live bool `json:"live"`
	// End is how the last process ended. It is valid if Live is false.
	End End `json:"end"`
}

// End describes how a guest ended.
type End struct {
	Exit  cloud.Exit `json:"exit"`
	Error string     `json:"error,omitempty"`
}

// rebooting reports whether a reboot has begun and is not complete.
func (r Record) rebooting() bool { return r.RebootsBegun > r.RebootsDone }

// needsLease reports whether the VM must not run after the host's lease has ended. This is also the case for the target
// of a migration until the migration has ended: if the host is lost, the control plane may let the source continue the
// guest.
func (r Record) needsLease() bool { return r.StopsWithLease || r.Migration.Incoming != 0 }

const recordVersion = 1

// readRecord reads the record at path. It returns false if the file does not exist.
func readRecord(path string) (Record, bool, error) {
	r := Record{Version: recordVersion}
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return r, false, nil
	}
	if err != nil {
		return r, false, fmt.Errorf("read record: %w", err)
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return r, false, fmt.Errorf("read record: %w", err)
	}
	if r.Version != recordVersion {
		return r, false, fmt.Errorf("read record: version %d is unknown to this agent", r.Version)
	}
	return r, true, nil
}

// write replaces the record's file atomically and syncs it.
func (r Record) write(path string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	if err := atomicfile.WriteFile(path, append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return nil
}

// startMark returns the Mark of a start with the record's counters.
func (r Record) startMark() string {
	return fmt.Sprintf("start %d, reboot %d, cluster %s", r.StartsDone, r.RebootsDone, r.Cluster)
}

// matchesMark reports whether a qemu.Record describes the last start. The parameter owner is the field Owner of that
// qemu.Record.
func (r Record) matchesMark(owner string) bool {
	if r.Mark == "" { // An older agent, which had no field Mark, wrote the record.
		return owner == fmt.Sprintf("start %d, reboot %d", r.StartsDone, r.RebootsDone)
	}
	return owner == r.Mark
}

// withCountersOf returns r as a record of another cluster. The parameter want is the desired state of that cluster.
// Counters that are higher than those in want are lowered to them: the cluster's next request then has a higher counter
// than the record, and is executed.
func (r Record) withCountersOf(cluster string, want *agentv1.AssignedVm) Record {
	r.Cluster = cluster
	r.StartsDone = min(r.StartsDone, want.GetStarts())
	r.RebootsBegun, r.RebootsDone = min(r.RebootsBegun, want.GetReboots()), min(r.RebootsDone, want.GetReboots())
	r.ResetsDone = min(r.ResetsDone, want.GetResets())
	if r.Migration.Incoming == 0 && !r.Migration.sending() { // Attempts are generations of the cluster.
		r.Migration = Migrations{}
	}
	if want.GetPower() == agentv1.Power_POWER_ON && !r.Live && r.StartsDone > 0 && r.End.Exit == cloud.ExitRequested {
		r.End.Error = msgStoppedSinceBackup
	}
	return r
}
