package main

import (
	"context"
	"sync"
	"time"

	"github.com/trivet-cloud/trivet/shared/version"
)

const (
	// versionCommand is the name of the command by which a member requests the version of another member's program.
	versionCommand = "member.version"
	// versionTime is the timeout of such a request.
	versionTime = time.Second
	// longestVersion is the maximum length in bytes of another member's version.
	longestVersion = 100
)

// answerVersion handles the command versionCommand.
func answerVersion(context.Context, uint64, []byte) ([]byte, error) {
	return []byte(version.Version()), nil
}

// versions returns the versions of the programs of all members that answer within versionTime, by member ID. Members of
// versions without the command versionCommand are missing.
func (m *member) versions(ctx context.Context) map[uint64]string {
	ctx, cancel := context.WithTimeout(ctx, versionTime)
	defer cancel()
	out := map[uint64]string{m.config.NodeID: version.Version()}
	var mu sync.Mutex
	var asking sync.WaitGroup
	for id := range m.mesh.Members() {
		if id == m.config.NodeID {
			continue
		}
		asking.Go(func() {
			answer, err := m.mesh.Direct(ctx, id, versionCommand, nil)
			if err != nil || len(answer) > longestVersion {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			out[id] = string(answer)
		})
	}
	asking.Wait()
	return out
}
