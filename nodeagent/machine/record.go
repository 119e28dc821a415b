package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

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

// mark names a start, in the home's record, so that it is not taken for another one.
func (r Record) mark() string { return fmt.Sprintf("start %d, reboot %d", r.StartsDone, r.RebootsDone) }
