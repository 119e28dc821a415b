package machine

import (
	"github.com/trivet-cloud/trivet/nodeagent/disk"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
)

// growths returns a ResizeDisk for each disk, except volumes, that is smaller than desired. The parameter have has the
// sizes of the process's disks in bytes.
func growths(want *agentv1.AssignedVm, have map[string]uint64) (out []diskChange) {
	for _, d := range want.GetDisks() {
		if size, known := have[d.GetId()]; known && d.GetVolume() == nil && size < d.GetSizeBytes() {
			out = append(out, diskChange{ResizeDisk, d.GetId()})
		}
	}
	return out
}

// observeSizes updates v.sizes. A disk whose size cannot be read is not grown.
func (v *VM) observeSizes() {
	v.sizes = nil
	if v.guest != Running && v.guest != Waiting {
		return
	}
	for _, d := range v.process.Record().Spec.Disks {
		if d.Volume != "" || d.ReadOnly {
			continue
		}
		if size, err := disk.Size(v.home.Disks(), d.ID); err == nil {
			if v.sizes == nil {
				v.sizes = map[string]uint64{}
			}
			v.sizes[d.ID] = size
		}
	}
}
