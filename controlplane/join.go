package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/records/transport"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// ownKeyFile is the cluster key in the data directory: that of a lone member, or one that a join token brought.
const ownKeyFile = "cluster.key"

// clusterKey reads the key that all members share. A lone member makes its own; one that joins by a token gets it, once.
func clusterKey(ctx context.Context, c Config, log *slog.Logger) (*clusterkey.Key, error) {
	own := filepath.Join(c.DataDir, ownKeyFile)
	switch {
	case c.ClusterKey != "":
		return clusterkey.Load(c.ClusterKey)
	case len(c.Join) == 0:
		return clusterkey.LoadOrMake(own)
	}
	key, err := clusterkey.Load(own)
	if !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = ofToken(c, key)
		}
		return key, err
	}
	if c.JoinToken == "" {
		return nil, errors.New("a member that joins needs join_token, from `trivet cluster token`, or cluster_key, the file that the others have")
	}
	if err := jointoken.Bring(ctx, c.inviters(), c.JoinToken, own, log); err != nil {
		return nil, err
	}
	return clusterkey.Load(own)
}

// ofToken refuses a key that an earlier run of another cluster has left. A token that is gone by now is no longer needed.
func ofToken(c Config, key *clusterkey.Key) error {
	if c.JoinToken == "" {
		return nil
	}
	_, pin, err := jointoken.ReadToken(c.JoinToken)
	if err != nil {
		return nil
	}
	authority, err := key.Authority()
	if err == nil && mtls.Pin(authority.Certificate()) != pin {
		err = fmt.Errorf("%s holds the key of cluster %s, and the join token is of another: give an empty data directory", c.DataDir, key.Cluster())
	}
	return err
}

// idFile keeps the id that a member was told, in its data directory.
const idFile = "node-id"

// whoAmI is this member's id, and whether its directory is to be that of a member that joins. A member of the first
// configuration joins, too, when its directory is new and the others wait for a new one: it was replaced.
func whoAmI(ctx context.Context, c Config, authority *mtls.Authority, log *slog.Logger) (id uint64, joins bool, err error) {
	fresh, err := isFresh(c.DataDir)
	if err != nil {
		return 0, false, err
	}
	asker, err := transport.New(transport.Options{Self: c.NodeID, Certificate: leaf(authority, c.NodeID, clock.Wall), Authority: authority, Log: log, Now: clock.Wall})
	if err != nil {
		return 0, false, err
	}
	if len(c.Join) == 0 {
		joins = fresh && len(c.Cluster) > 1 && membership.Expected(ctx, asker, c.seeds(), c.NodeID, address(c, c.Ports.Peers))
		return c.NodeID, joins, nil
	}
	if c.NodeID != 0 {
		return c.NodeID, true, nil
	}
	path := filepath.Join(c.DataDir, idFile)
	switch text, err := os.ReadFile(path); {
	case err == nil:
		id, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 63)
		if err != nil {
			return 0, false, fmt.Errorf("%s does not hold a member's id: %w", path, err)
		}
		return id, true, nil
	case !errors.Is(err, fs.ErrNotExist):
		return 0, false, fmt.Errorf("read the member's id: %w", err)
	}
	if id, err = membership.Locate(ctx, asker, c.seeds(), address(c, c.Ports.Peers), log); err != nil {
		return 0, false, fmt.Errorf("find out which member this is: %w", err)
	}
	if err := os.WriteFile(path, []byte(strconv.FormatUint(id, 10)+"\n"), 0o600); err != nil {
		return 0, false, fmt.Errorf("keep the member's id: %w", err)
	}
	return id, true, nil
}

// isFresh says that nothing was ever written to the data directory by consensus.
func isFresh(dataDir string) (bool, error) {
	_, err := os.Stat(filepath.Join(dataDir, "raft", "log"))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return false, err
}

// consensusMembers is the first configuration; none for one that joins.
func consensusMembers(c Config, joins bool) []uint64 {
	if joins {
		return nil
	}
	return slices.Sorted(maps.Keys(c.members()))
}

// firstMembers are the records of the first configuration.
func firstMembers(c Config) (out []membership.Member) {
	for id, host := range c.members() {
		out = append(out, membership.Member{
			ID: id, Name: "node-" + strconv.FormatUint(id, 10), RaftAddr: "https://" + net.JoinHostPort(host, strconv.Itoa(int(c.Ports.Peers))),
			ClientURLs: []string{clientURL(c, host)},
		})
	}
	return out
}

// clientURL is where a member serves clients. The ports are the same on all.
func clientURL(c Config, host string) string {
	return c.TLS.Scheme() + "://" + net.JoinHostPort(host, strconv.Itoa(int(c.Ports.GRPC)))
}

// enter makes a member that joins known to the others. An error is for good: it will not be one with this directory.
func enter(ctx context.Context, c Config, host *consensus.Host, mesh *transport.Mesh, log *slog.Logger) error {
	seeds := c.seeds()
	for _, a := range mesh.Members() {
		if !slices.Contains(seeds, a) {
			seeds = append(seeds, a)
		}
	}
	if len(seeds) == 0 {
		return nil // it has been one for long, or is told where the others are by its records
	}
	q := membership.JoinRequest{ID: c.NodeID, Birth: host.DirID(), ClientURLs: []string{clientURL(c, c.Listen)}}
	addresses, err := membership.Enter(ctx, mesh, seeds, q, log)
	if err != nil {
		return err
	}
	log.Info("let in as a member", "id", c.NodeID)
	known := mesh.Members()
	for id, a := range addresses {
		known[id] = a
	}
	return mesh.SetMembers(known, nil)
}
