package machine

import (
	"os"
	"syscall"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"

	"github.com/trivet-cloud/trivet/nodeagent/rbd/rbdtest"
	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// killHelpers kills the processes trivet-rbd that the test has started, and returns their number.
func (s *rbdStory) killHelpers() (killed int) {
	s.Helper()
	for _, pid := range rbdtest.Helpers(s, os.Getpid()) {
		if syscall.Kill(pid, syscall.SIGKILL) == nil {
			killed++
		}
	}
	return killed
}

// killHelper kills the helper trivet-rbd of the first host while it is idle, and then several times while the agent
// makes a volume and attaches it to the running guest, and while it grows the volume. The agent starts a new helper
// each time. The guest must have the volume with its new size in the end, and what it wrote before.
func (s *rbdStory) killHelper() {
	require.NotZero(s, s.killHelpers())
	third := grant(s.blank(3), s.one, "third")
	s.one = s.give(s.one, third, virtio, noCache)
	s.assignVolumes(s.lab, s.data, s.more, third)
	s.assign(s.one)
	killed := 0
	kill := func() {
		for begun := time.Now(); time.Since(begun) < 2*time.Second; time.Sleep(20 * time.Millisecond) {
			killed += s.killHelpers()
		}
	}
	kill()
	s.seesDisks(s.one, "data", "more", "third")
	s.seesSize(s.one, "vdc", 64*mib)
	s.write(s.one.VmId, "vdc", "third", 0)

	third = proto.CloneOf(third)
	third.Generation, third.SizeBytes = third.Generation+1, 96*mib
	s.one = s.replace(s.one, third)
	s.assignVolumes(s.lab, s.data, s.more, third)
	s.assign(s.one)
	kill()
	s.seesSize(s.one, "vdc", 96*mib)
	s.reads(s.one.VmId, "vdc", "third", 0)
	require.Greater(s, killed, 2)

	s.one = take(s.one, "third")
	s.assign(s.one)
	s.seesDisks(s.one, "data", "more")
	third = revoke(third)
	third.Deleted = true
	s.assignVolumes(s.lab, s.data, s.more, third)
	s.deleted(third)
}

// deleted waits until the first host has reported that it has deleted a volume.
func (s *rbdStory) deleted(v *agentv1.AssignedVolume) {
	s.Helper()
	require.Eventually(s, func() bool {
		s.volumeMu.Lock()
		defer s.volumeMu.Unlock()
		o := s.volumes[cloud.VolumeID(v.VolumeId)]
		return !o.Present && o.Generation == v.Generation && o.Error == ""
	}, 2*within, 20*time.Millisecond, "volume %s is deleted", v.VolumeId)
}
