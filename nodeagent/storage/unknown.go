package storage

import (
	"fmt"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// logUnknown logs the files in the pools that belong to no volume, and the volumes that the assignment does not name.
// In a shared pool it logs no volumes, because other hosts may have them.
func (s *Storage) logUnknown() {
	for _, p := range s.Pools() {
		list, err := p.List()
		if err != nil {
			s.o.Log.Warn("cannot list a storage pool", "err", err)
			continue
		}
		s.mu.Lock()
		var volumes []string
		for _, v := range list.Volumes {
			if s.current && !p.Shared() && s.volumes[cloud.VolumeID(v.ID)] == nil {
				volumes = append(volumes, v.ID)
			}
		}
		text := fmt.Sprint(volumes, list.Unknown)
		changed := text != s.unknown[p.Name()]
		s.unknown[p.Name()] = text
		s.mu.Unlock()
		if changed && len(volumes)+len(list.Unknown) > 0 {
			s.o.Log.Warn("a storage pool has volumes or files that the control plane does not know; they are kept",
				"pool", p.Name(), "volumes", volumes, "files", list.Unknown)
		}
	}
}
