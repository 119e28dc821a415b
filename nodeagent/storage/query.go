package storage

import (
	"maps"
	"slices"

	"github.com/trivet-cloud/trivet/nodeagent/volume"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Pools returns the pools that can be used, in the order of their names.
func (s *Storage) Pools() []*volume.Pool {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*volume.Pool
	for _, name := range slices.Sorted(maps.Keys(s.pools)) {
		out = append(out, s.pools[name])
	}
	return out
}

// UsedImages returns the SHA-256 sums of the images that volumes are based on.
func (s *Storage) UsedImages() (map[string]bool, error) {
	used := map[string]bool{}
	for _, p := range s.Pools() {
		list, err := p.List()
		if err != nil {
			return nil, err
		}
		for _, v := range list.Volumes {
			if v.Image != nil {
				used[v.Image.SHA256] = true
			}
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.volumes {
		if i := e.want.GetImage(); i != nil {
			used[i.GetSha256()] = true
		}
	}
	return used, nil
}

// Has reports whether the control plane has assigned a volume to this host.
func (s *Storage) Has(id cloud.VolumeID) bool { return s.desired(id) != nil }

// desired returns the desired state of a volume, or nil if it has none.
func (s *Storage) desired(id cloud.VolumeID) *agentv1.AssignedVolume {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.volumes[id]; e != nil {
		return e.want
	}
	return nil
}

// desiredNow returns the desired state of a volume, or nil if none is known. current is true if the assignment of all
// volumes has arrived from the control plane since the agent started.
func (s *Storage) desiredNow(id cloud.VolumeID) (want *agentv1.AssignedVolume, current bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.volumes[id]; e != nil {
		want = e.want
	}
	return want, s.current
}

// assigned returns the desired states of all volumes.
func (s *Storage) assigned() (out []*agentv1.AssignedVolume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.volumes {
		out = append(out, e.want)
	}
	return out
}
