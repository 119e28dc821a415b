package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Record is what the agent remembers of a VM besides what its home says. It is written before what it speaks of is done,
// so that no start, reset or reboot is done twice: what was recorded and then not done, for a crash, counts as done.
type Record struct {
	// Version of this form; others are refused.
	Version int `json:"version"`
	// Built means that the disks are complete.
	Built bool `json:"built"`

	StartsDone uint64 `json:"starts_done"`
	// A reboot is begun before the guest is asked for it, and done before it is launched or reset.
	RebootsBegun uint64 `json:"reboots_begun"`
	RebootsDone  uint64 `json:"reboots_done"`
	ResetsDone   uint64 `json:"resets_done"`

	// Cluster that the counts are of, empty in a record that is older than this field.
	Cluster string `json:"cluster,omitempty"`
	// Mark names the last start in the home's record, so that it is not taken for another one.
	Mark string `json:"mark,omitempty"`

	// Live means that the last start has no recorded end: there is a process, or was one.
	Live bool `json:"live"`
	// End of the last start that has one.
	End End `json:"end"`
}

// End is how a guest ended.
type End struct {
	Exit  cloud.Exit `json:"exit"`
	Error string     `json:"error,omitempty"`
}

func (r Record) rebooting() bool { return r.RebootsBegun > r.RebootsDone }

const recordVersion = 1

// readRecord reads a record; it reports false when there is none.
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

// write makes the record durable: after a crash it is the old one or the new one.
func (r Record) write(path string) error {
	data, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	defer f.Close()
	if _, err := f.Write(append(data, '\n')); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync record: %w", err)
	}
	if err := os.Rename(f.Name(), path); err != nil {
		return fmt.Errorf("write record: %w", err)
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	defer d.Close()
	if err := d.Sync(); err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return nil
}

// startMark is the Mark of a start that is about to be made.
func (r Record) startMark() string {
	return fmt.Sprintf("start %d, reboot %d, cluster %s", r.StartsDone, r.RebootsDone, r.Cluster)
}

// matchesMark says whether the home's record is of the last start.
func (r Record) matchesMark(owner string) bool {
	if r.Mark == "" { // made by an agent that did not keep it
		return owner == fmt.Sprintf("start %d, reboot %d", r.StartsDone, r.RebootsDone)
	}
	return owner == r.Mark
}

// withCountersOf is the record with the counts of another cluster, whose wish is want: of what that has not asked for, nothing
// counts as done, so that its next wish is carried out.
func (r Record) withCountersOf(cluster string, want *agentv1.AssignedVm) Record {
	r.Cluster = cluster
	r.StartsDone = min(r.StartsDone, want.GetStarts())
	r.RebootsBegun, r.RebootsDone = min(r.RebootsBegun, want.GetReboots()), min(r.RebootsDone, want.GetReboots())
	r.ResetsDone = min(r.ResetsDone, want.GetResets())
	if want.GetPower() == agentv1.Power_POWER_ON && !r.Live && r.StartsDone > 0 && r.End.Exit == cloud.ExitAsked {
		r.End.Error = stoppedSince
	}
	return r
}
