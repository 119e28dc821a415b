package machine

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// StoppedWithLease returns the VMs that must not run after the host's lease has ended, and that may have a process. The
// parameter records is the directory of the VMs' records. The result includes the VMs
// whose record cannot be read. StoppedWithLease then also returns an error.
func StoppedWithLease(records string) (ids []cloud.VMID, err error) {
	files, err := os.ReadDir(records)
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	for _, f := range files {
		id, ok := strings.CutSuffix(f.Name(), ".json")
		if !ok || cloud.CheckUUID("id", id) != nil {
			continue
		}
		r, exists, readErr := readRecord(filepath.Join(records, f.Name()))
		if readErr != nil {
			err = errors.Join(err, readErr)
		}
		if readErr != nil || exists && r.needsLease() && r.Live {
			ids = append(ids, cloud.VMID(id))
		}
	}
	return ids, err
}
