package machine

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// StoppedWithLease returns the VMs whose record in the directory records says that they must not run without a lease,
// and that may have a process.
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
		r, exists, err := readRecord(filepath.Join(records, f.Name()))
		if err != nil {
			return nil, err
		}
		if exists && r.needsLease() && r.Live {
			ids = append(ids, cloud.VMID(id))
		}
	}
	return ids, nil
}
