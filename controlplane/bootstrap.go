package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/controlplane/cluster/jointoken"
	"github.com/trivet-cloud/trivet/controlplane/cluster/membership"
	"github.com/trivet-cloud/trivet/controlplane/config"
	"github.com/trivet-cloud/trivet/controlplane/engine/clock"
	"github.com/trivet-cloud/trivet/controlplane/engine/clusterkey"
	"github.com/trivet-cloud/trivet/controlplane/engine/datadir"
	"github.com/trivet-cloud/trivet/controlplane/engine/layout"
	"github.com/trivet-cloud/trivet/controlplane/records/transport"
	"github.com/trivet-cloud/trivet/shared/atomicfile"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// clusterKey loads the key that all members share. On its first start, a single member creates the key, and a member
// with a join token gets the key from one of the members in c.Join.
func clusterKey(ctx context.Context, c config.Config, log *slog.Logger) (*clusterkey.Key, error) {
	if c.ClusterKey != "" || len(c.Join) == 0 {
		return datadir.LoadKey(c.DataDir, c.ClusterKey)
	}
	own := filepath.Join(c.DataDir, layout.ClusterKeyFile)
	key, err := clusterkey.Load(own)
	if !errors.Is(err, fs.ErrNotExist) {
		if err == nil {
			err = checkKeyMatchesToken(c, key)
		}
		return key, err
	}
	if c.JoinToken == "" {
		return nil, errors.New("a member that joins needs join_token, from `trivet cluster token`, or cluster_key, the file that the others have")
	}
	if err := jointoken.Bring(ctx, c.AgentAddresses(), c.JoinToken, own, log); err != nil {
		return nil, err
	}
	return clusterkey.Load(own)
}

// checkKeyMatchesToken returns an error if the key, which an earlier start has stored, and the join token belong to
// different clusters. If the token file can no longer be read, it checks nothing.
func checkKeyMatchesToken(c config.Config, key *clusterkey.Key) error {
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

// resolveMemberID returns this member's ID and whether the member joins an existing cluster. A member with c.Join
// always joins. A member that is listed in c.Cluster joins only if an operator has replaced it: its data directory is
// new, and the other members expect it with a new directory.
func resolveMemberID(ctx context.Context, c config.Config, authority *mtls.Authority, log *slog.Logger) (id uint64, joins bool, err error) {
	fresh, err := isNewDataDir(c.DataDir)
	if err != nil {
		return 0, false, err
	}
	asker, err := transport.New(transport.Options{Self: c.NodeID, Certificate: memberCertificate(authority, c.NodeID, clock.Wall, log), Authority: authority, Log: log, Now: clock.Wall})
	if err != nil {
		return 0, false, err
	}
	if len(c.Join) == 0 {
		joins = fresh && len(c.Cluster) > 1 && membership.Expected(ctx, asker, c.SeedAddresses(), c.NodeID, c.Address(c.Ports.Peers))
		return c.NodeID, joins, nil
	}
	if c.NodeID != 0 {
		return c.NodeID, true, nil
	}
	path := filepath.Join(c.DataDir, layout.NodeIDFile)
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
	if id, err = membership.Locate(ctx, asker, c.SeedAddresses(), c.Address(c.Ports.Peers), log); err != nil {
		return 0, false, fmt.Errorf("find out which member this is: %w", err)
	}
	if err := atomicfile.WriteFile(path, []byte(strconv.FormatUint(id, 10)+"\n"), 0o600); err != nil {
		return 0, false, fmt.Errorf("keep the member's id: %w", err)
	}
	return id, true, nil
}

// isNewDataDir reports whether the data directory is new: it has no raft log.
func isNewDataDir(dataDir string) (bool, error) {
	_, err := os.Stat(filepath.Join(dataDir, layout.RaftLogDir))
	if errors.Is(err, fs.ErrNotExist) {
		return true, nil
	}
	return false, err
}

// firstMembers returns the records of the members with which a new cluster starts.
func firstMembers(c config.Config) (out []membership.Member) {
	for id, host := range c.InitialMembers() {
		out = append(out, membership.Member{
			ID: id, Name: "node-" + strconv.FormatUint(id, 10), RaftAddr: "https://" + net.JoinHostPort(host, strconv.Itoa(int(c.Ports.Peers))),
			ClientURLs: []string{c.ClientURL(host)},
		})
	}
	return out
}

// joinCluster sends a join request to the other members and connects to them. It does nothing if this member did not
// join an existing cluster, or if it has no addresses of other members. An error is permanent: the member cannot join
// with this data directory.
func (m *member) joinCluster(ctx context.Context) error {
	if !m.host.Joined() {
		return nil
	}
	seeds := m.config.SeedAddresses()
	for _, a := range m.mesh.Members() {
		if !slices.Contains(seeds, a) {
			seeds = append(seeds, a)
		}
	}
	if len(seeds) == 0 {
		return nil // the member joined earlier and reads the others' addresses from its records
	}
	q := membership.JoinRequest{ID: m.config.NodeID, DirID: m.host.DirID(), ClientURLs: []string{m.config.ClientURL(m.config.Listen)}}
	addresses, err := membership.Enter(ctx, m.mesh, seeds, q, m.log)
	if err != nil {
		return err
	}
	m.log.Info("joined the cluster", "id", m.config.NodeID)
	known := m.mesh.Members()
	for id, a := range addresses {
		known[id] = a
	}
	return m.mesh.SetMembers(known, nil)
}
