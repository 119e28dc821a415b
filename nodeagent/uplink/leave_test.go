package uplink

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/mtls"
)

// of returns a fake member of the cluster whose id is cluster. Members with different seeds have different authorities.
func of(t *testing.T, cluster string, seed byte) *member {
	a, err := mtls.NewAuthority(cluster, bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	require.NoError(t, err)
	return newMember(t, a)
}

// says waits for a log line of the agent that contains all texts, and returns it.
func (a *agent) says(t *testing.T, texts ...string) string {
	for {
		line, all := next(t, a.logged), true
		for _, text := range texts {
			all = all && strings.Contains(line, text)
		}
		if all {
			return line
		}
	}
}

// joined returns the directory of a host that has joined m's cluster and has an assignment with the VM "a" in term 9.
func joined(t *testing.T, m *member) (dir string) {
	dir = t.TempDir()
	a := open(t, dir, nil, m).run(t)
	next(t, m.joins)
	next(t, m.watches)
	m.send <- snapshot(9, 50, "a")
	next(t, a.assigned)
	a.stop()
	require.FileExists(t, filepath.Join(dir, assignmentFile))
	return dir
}

// TestLeaveCluster lets members of another cluster, restored from a backup, respond at the address of the host's own
// cluster. The host must log this in one line with what to do, and must not join the other cluster only because it has
// a token of it. With Options.Leave it must join the other cluster with its key, and discard the term and the
// assignment of the lost one.
func TestLeaveCluster(t *testing.T) {
	lost, restored := of(t, "1234", 1), of(t, "5678", 2)
	dir := joined(t, lost)
	lost.server.Stop()
	before, err := os.ReadFile(filepath.Join(dir, credentialFile))
	require.NoError(t, err)
	in := func(leave string) func(*Options) { return func(o *Options) { o.Leave = leave } }

	for _, leave := range []string{"", "99"} { // also the id of a third cluster has no effect
		a := open(t, dir, in(leave), restored).run(t)
		require.Equal(t, "1234", a.Cluster())
		line := a.says(t, "no session", "member of cluster 5678", "this host belongs to cluster 1234", "trivet host token", "--leave-cluster 1234")
		require.Equal(t, 1, strings.Count(line, "\n"))
		a.stop()
		require.Empty(t, restored.joins)
		require.Empty(t, a.assigned)
		after, err := os.ReadFile(filepath.Join(dir, credentialFile))
		require.NoError(t, err)
		require.Equal(t, before, after)
	}

	a := open(t, dir, in("1234"), restored)
	a.run(t)
	csr, err := x509.ParseCertificateRequest(next(t, restored.joins).GetCsr())
	require.NoError(t, err)
	require.Equal(t, a.identity.key.Public(), csr.PublicKey)
	next(t, restored.watches)
	restored.send <- snapshot(3, 20, "b")
	dropped := next(t, a.assigned)
	require.Zero(t, dropped.Term, "the lost cluster's assignment must end before the host joins another cluster")
	require.Empty(t, dropped.VMs)
	require.EqualValues(t, 3, next(t, a.assigned).Term, "the assignment of the new cluster must be delivered, although its term is lower")
	require.Equal(t, "5678", a.Cluster())
	a.stop()

	// After a restart with the same option, the host stays in the restored cluster.
	open(t, dir, in("1234"), restored).run(t)
	next(t, restored.watches)
	require.Empty(t, restored.joins)
}

// TestLeaveNeedsAToken checks that Run returns an error and the host stays in its cluster if Options.Leave is set and
// there is no token of another cluster.
func TestLeaveNeedsAToken(t *testing.T) {
	m := of(t, "1234", 1)
	dir := joined(t, m)
	for says, token := range map[string]func() (string, error){
		"of cluster 1234 itself": func() (string, error) { return m.token(), nil },
		"trivet host token":      func() (string, error) { return "", os.ErrNotExist },
		"not of the form":        func() (string, error) { return "hello", nil },
	} {
		a := open(t, dir, func(o *Options) { o.Leave, o.Token = "1234", token }, m)
		require.ErrorContains(t, a.Run(t.Context()), says)
		require.Equal(t, "1234", a.Cluster())
	}
	require.Empty(t, m.joins)
}

// TestExpiredStays checks that a host whose certificate expired long ago does not join another cluster only because it
// has a token of it, and that it can join its own cluster again.
func TestExpiredStays(t *testing.T) {
	m, other := of(t, "1234", 1), of(t, "5678", 2)
	m.set(func() { m.life = -2 * time.Hour })
	dir := t.TempDir()
	a := open(t, dir, nil, m)
	require.NoError(t, a.join(t.Context()))
	a = open(t, dir, nil, other).run(t)
	a.says(t, "--leave-cluster 1234")
	require.Empty(t, other.joins)
	a.stop()

	// In its own cluster the host gets the same node id, so its assignment is not discarded.
	m.set(func() { m.life = time.Hour })
	next(t, m.joins)
	a = open(t, dir, nil, m).run(t)
	next(t, m.joins)
	next(t, m.watches)
	require.Empty(t, a.assigned)
}

// TestInvalidCredential lets a host that must leave its cluster join a member that issues an invalid credential. The
// host must keep its identity, its term and its assignment.
func TestInvalidCredential(t *testing.T) {
	lost, restored := of(t, "1234", 1), of(t, "5678", 2)
	dir := joined(t, lost)
	lost.server.Stop()
	restored.forged = true
	a := open(t, dir, func(o *Options) { o.Leave = "1234" }, restored).run(t)
	a.says(t, "not joined yet", "invalid certificate")
	a.stop()
	require.Equal(t, "1234", a.Cluster())
	require.Empty(t, a.assigned, "the assignment of the present node was ended")
	require.FileExists(t, filepath.Join(dir, assignmentFile))
	require.FileExists(t, filepath.Join(dir, termFile))
}
