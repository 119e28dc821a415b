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

// of returns a member of the cluster with that ID.
func of(t *testing.T, cluster string, seed byte) *member {
	a, err := mtls.NewAuthority(cluster, bytes.Repeat([]byte{seed}, ed25519.SeedSize))
	require.NoError(t, err)
	return newMember(t, a)
}

// says waits for a log line that contains all texts.
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

// joined makes the directory of a host that joined m's cluster and has an assignment with VM "a" in term 9.
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

// At the address of the host's cluster is another one, restored from a backup. The host logs this in one line with what
// to do, and keeps its identity even if it gets a token. With Options.Leave it joins the other cluster with its key,
// and discards terms and desired states.
func TestLeaveCluster(t *testing.T) {
	lost, restored := of(t, "1234", 1), of(t, "5678", 2)
	dir := joined(t, lost)
	lost.server.Stop()
	before, err := os.ReadFile(filepath.Join(dir, credentialFile))
	require.NoError(t, err)
	in := func(leave string) func(*Options) { return func(o *Options) { o.Leave = leave } }

	for _, leave := range []string{"", "99"} { // nor by the name of another
		a := open(t, dir, in(leave), restored).run(t)
		require.Equal(t, "1234", a.Cluster())
		line := a.says(t, "no session", "member of cluster 5678", "this host belongs to cluster 1234", "trivet node token", "--leave-cluster 1234")
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
	require.Zero(t, dropped.Term, "the lost cluster's assignment ends before the host joins another one")
	require.Empty(t, dropped.VMs)
	require.EqualValues(t, 3, next(t, a.assigned).Term, "a lower term than the lost cluster's")
	require.Equal(t, "5678", a.Cluster())
	a.stop()

	// With the same option it stays after a restart.
	open(t, dir, in("1234"), restored).run(t)
	next(t, restored.watches)
	require.Empty(t, restored.joins)
}

// With Options.Leave but without a token of another cluster, the host does not leave its cluster.
func TestLeaveNeedsAToken(t *testing.T) {
	m := of(t, "1234", 1)
	dir := joined(t, m)
	for says, token := range map[string]func() (string, error){
		"of cluster 1234 itself": func() (string, error) { return m.token(), nil },
		"trivet node token":      func() (string, error) { return "", os.ErrNotExist },
		"not of the form":        func() (string, error) { return "hello", nil },
	} {
		a := open(t, dir, func(o *Options) { o.Leave, o.Token = "1234", token }, m)
		require.ErrorContains(t, a.Run(t.Context()), says)
		require.Equal(t, "1234", a.Cluster())
	}
	require.Empty(t, m.joins)
}

// A host whose certificate expired long ago does not join another cluster only because it has that cluster's token.
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

	// In its own cluster the host keeps its ID, so that its VMs stay placed on it.
	m.set(func() { m.life = time.Hour })
	next(t, m.joins)
	a = open(t, dir, nil, m).run(t)
	next(t, m.joins)
	next(t, m.watches)
	require.Empty(t, a.assigned)
}
