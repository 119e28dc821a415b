package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// joinTime is the maximum time to wait until the cluster reports the ID of a member that was added.
const joinTime = 20 * time.Second

// joinID returns the node id that the cluster gave to the member with this peer URL. The id is stored in the data
// directory, since the cluster may be unavailable when the member starts again.
func (p plan) joinID() (uint64, error) {
	file := filepath.Join(p.dataDir, "etcd-flags-id")
	if text, err := os.ReadFile(file); err == nil {
		return strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	}
	seeds, err := p.seeds()
	if err != nil {
		return 0, err
	}
	id, err := findID(seeds, p.peer.String())
	if err != nil {
		return 0, fmt.Errorf("get the ID of %s from %s: %w", p.peer, strings.Join(seeds, ", "), err)
	}
	return id, os.WriteFile(file, fmt.Appendln(nil, id), 0o600)
}

func findID(seeds []string, peer string) (uint64, error) {
	ctx, cancel := context.WithTimeout(context.Background(), joinTime)
	defer cancel()
	client, err := clientv3.New(clientv3.Config{Endpoints: seeds, Logger: zap.NewNop()})
	if err != nil {
		return 0, err
	}
	defer client.Close()
	for {
		one, cancel := context.WithTimeout(ctx, 2*time.Second)
		list, err := client.MemberList(one)
		cancel()
		if err == nil {
			for _, m := range list.Members {
				if slices.Contains(m.PeerURLs, peer) {
					return m.ID, nil
				}
			}
			err = fmt.Errorf("no member has this peer URL")
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return 0, err
		}
	}
}
