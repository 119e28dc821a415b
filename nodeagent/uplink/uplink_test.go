package uplink

import (
	"context"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// TestJoin checks that a host joins and receives its assignment, and that it needs no token after a restart.
func TestJoin(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	dir := t.TempDir()
	a := open(t, dir, nil, m)
	require.Empty(t, a.Node())
	a.run(t)
	r := next(t, m.joins)
	require.Equal(t, "host1", r.GetName())
	require.EqualValues(t, Protocol, r.GetProtocol())
	w := next(t, m.watches)
	m.send <- snapshot(1, 5, "a")
	require.Equal(t, []string{"here"}, w.GetPresentVms())
	require.Equal(t, "v1", w.GetAgentVersion())
	require.Contains(t, next(t, a.assigned).VMs, cloud.VMID("a"))
	require.EqualValues(t, "n1", a.Node())
	require.Equal(t, "n1", next(t, m.beats).GetNodeId())
	require.True(t, a.Status().Connected)
	a.stop()

	info, err := os.Stat(filepath.Join(dir, keyFile))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, info.Mode().Perm())

	a = open(t, dir, func(o *Options) {
		o.Token = func() (string, error) { t.Error("asked for a token"); return "", errors.New("none") }
	}, m).run(t)
	next(t, m.watches)
	m.send <- snapshot(1, 6, "b")
	require.Contains(t, next(t, a.assigned).VMs, cloud.VMID("b"))
}

// TestLostJoinIsRepeatedWithTheSameKey checks that a Join whose response was lost is repeated with the same key,
// because the token is bound to that key.
func TestLostJoinIsRepeatedWithTheSameKey(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	m.set(func() { m.joinErr = status.Error(codes.Unavailable, "connection reset") })
	open(t, t.TempDir(), nil, m).run(t)
	key := func() any {
		csr, err := x509.ParseCertificateRequest(next(t, m.joins).GetCsr())
		require.NoError(t, err)
		return csr.PublicKey
	}
	require.Equal(t, key(), key())
	next(t, m.watches)
}

// TestKeySurvivesRestart checks that the key is stored by Open: an agent that was killed before it got the response to
// a Join must have the same key after its restart.
func TestKeySurvivesRestart(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	dir := t.TempDir()
	first, second := open(t, dir, nil, m), open(t, dir, nil, m)
	require.Equal(t, first.identity.key, second.identity.key)
}

func TestRefusedTokenIsFinal(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	wrong := strings.Replace(m.token(), "secret", "guess", 1)
	for name, token := range map[string]func() (string, error){
		"used up": func() (string, error) { return wrong, nil },
		"garbage": func() (string, error) { return "hello", nil },
		"none":    func() (string, error) { return "", os.ErrNotExist },
	} {
		a := open(t, t.TempDir(), func(o *Options) { o.Token = token }, m)
		require.Error(t, a.Run(t.Context()), name)
	}
}

// TestTokenIsSentOnlyToPinnedAuthority checks that a server with another authority does not receive the token, which
// contains the fingerprint of its own authority.
func TestTokenIsSentOnlyToPinnedAuthority(t *testing.T) {
	right, wrong := newMember(t, testAuthority(t, 1)), newMember(t, testAuthority(t, 2))
	open(t, t.TempDir(), func(o *Options) { o.Seeds = []string{wrong.addr, right.addr} }, right).run(t)
	next(t, right.joins)
	require.Empty(t, wrong.joins)
}

// TestRedirect checks that the host connects to the leader whose address another member returns.
func TestRedirect(t *testing.T) {
	authority := testAuthority(t, 1)
	follower, leader := newMember(t, authority), newMember(t, authority)
	follower.set(func() { follower.leader = leader.addr })
	// The leader is not one of the agent's Seeds: its address is known only from the follower's error.
	a := open(t, t.TempDir(), nil, follower).run(t)
	next(t, leader.watches)
	leader.send <- snapshot(1, 1, "a")
	next(t, a.assigned)
	require.Equal(t, leader.addr, a.Status().Member)
	require.Empty(t, follower.watches)
}

// TestReconnectReportsAll checks that the host connects to the next leader when a leader ends, and sends all
// observations again.
func TestReconnectReportsAll(t *testing.T) {
	authority := testAuthority(t, 1)
	first, second := newMember(t, authority), newMember(t, authority)
	first.set(func() { first.otherMembers = []string{first.addr, second.addr} })
	second.set(func() { second.leader = first.addr })
	a := open(t, t.TempDir(), nil, first, second)
	a.Observe(cloud.Observation{VM: "a", Generation: 3, Observed: cloud.ObservedRunning, PID: 7})
	a.run(t)
	next(t, first.watches)
	first.send <- snapshot(1, 1, "a")
	require.Equal(t, "boot", next(t, first.reports).GetFacts().GetBootId())
	require.EqualValues(t, 7, next(t, first.reports).GetVms()[0].GetPid())
	a.Observe(cloud.Observation{VM: "b", Observed: cloud.ObservedBuilt})
	require.Equal(t, "b", next(t, first.reports).GetVms()[0].GetVmId())
	// An unchanged observation must not be sent again. A new measurement of a VM must be sent.
	a.Observe(cloud.Observation{VM: "b", Observed: cloud.ObservedBuilt})
	a.Usage(map[cloud.VMID]cloud.Usage{"a": {MemoryMiB: 9}, "stranger": {MemoryMiB: 1}})
	one := next(t, first.reports).GetVms()
	require.Len(t, one, 1)
	require.EqualValues(t, 9, one[0].GetUsage().GetMemoryUsedMib())

	second.set(func() { second.leader = "" })
	first.server.Stop()
	next(t, second.watches)
	second.send <- snapshot(2, 2, "a", "b")
	require.Equal(t, "boot", next(t, second.reports).GetFacts().GetBootId())
	all := next(t, second.reports).GetVms()
	require.Len(t, all, 2)
	require.EqualValues(t, 9, all[0].GetUsage().GetMemoryUsedMib())
}

// TestIncompleteSnapshotIsNotDelivered checks that nothing of a snapshot is delivered if the stream ends before the
// snapshot is complete.
func TestIncompleteSnapshotIsNotDelivered(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	a := open(t, t.TempDir(), nil, m).run(t)
	next(t, m.watches)
	part := snapshot(1, 5, "a")
	part.Complete = false
	m.send <- part
	m.send <- nil // ends the stream
	next(t, m.watches)
	m.send <- snapshot(1, 6, "b")
	got := next(t, a.assigned)
	require.EqualValues(t, 6, got.Revision)
	require.Len(t, got.VMs, 1)
}

// TestLowerTermIsDropped checks that messages of a lower term than the highest one seen are not delivered, by the agent
// that has seen the higher term and after its restart.
func TestLowerTermIsDropped(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	dir := t.TempDir()
	for _, how := range []string{"agent that has seen the higher term", "agent after a restart"} {
		a := open(t, dir, nil, m).run(t)
		next(t, m.watches)
		if how == "agent that has seen the higher term" {
			m.send <- snapshot(5, 50, "a")
			require.EqualValues(t, 5, next(t, a.assigned).Term)
			m.send <- nil
			next(t, m.watches)
		}
		m.send <- snapshot(4, 99, "old")
		next(t, m.watches) // the agent has ended the watch and begun a new one
		m.send <- snapshot(5, 51, "a")
		require.EqualValues(t, 51, next(t, a.assigned).Revision, how)
		a.stop()
	}
}

// TestUnansweredHeartbeatEndsSession checks that a heartbeat that fails with UNAVAILABLE ends the session, because the
// member may be disconnected from the others.
func TestUnansweredHeartbeatEndsSession(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	m.set(func() { m.beatErr = status.Error(codes.Unavailable, "no quorum") })
	a := open(t, t.TempDir(), nil, m).run(t)
	next(t, m.watches)
	m.send <- snapshot(1, 1)
	next(t, m.watches)
	_, ok := a.Lease()
	require.False(t, ok, "there must be no lease without a response to a heartbeat")
	// An error that concerns this host and not the member must not end the session.
	m.set(func() { m.beatErr = status.Error(codes.PermissionDenied, "banned") })
	m.send <- snapshot(1, 1)
	next(t, m.beats)
	m.send <- snapshot(1, 2, "a")
	for next(t, a.assigned).Revision != 2 {
	}
}

// TestRenewal checks that the certificate is renewed when half of its lifetime is over, and that the new one is stored
// and used for the next session.
func TestRenewal(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	m.set(func() { m.life = backdated })
	dir := t.TempDir()
	a := open(t, dir, nil, m).run(t)
	next(t, m.watches)
	m.send <- snapshot(1, 1)
	next(t, m.renewed)
	next(t, m.watches)
	require.False(t, a.identity.credential().renewAt().Before(m.issued[1].NotBefore))
	reopened, err := openIdentity(dir)
	require.NoError(t, err)
	require.Equal(t, m.issued[1].Raw, reopened.credential().cert.Leaf.Raw)
}

// TestExpired checks that a host whose certificate expired while it was offline renews it with the old one within the
// control plane's grace period, and that it uses its join token after that.
func TestExpired(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	m.set(func() { m.life = -time.Minute })
	dir := t.TempDir()
	a := open(t, dir, nil, m)
	require.NoError(t, a.join(t.Context()))
	require.True(t, a.identity.credential().expired(time.Now()))
	a = open(t, dir, func(o *Options) { o.Token = func() (string, error) { return "", os.ErrNotExist } }, m).run(t)
	next(t, m.renewed)
	next(t, m.watches)
	a.stop()

	m.set(func() { m.life = -2 * time.Hour })
	dir = t.TempDir()
	next(t, m.joins)
	a = open(t, dir, nil, m)
	require.NoError(t, a.join(t.Context()))
	next(t, m.joins)
	m.set(func() { m.life = time.Hour })
	open(t, dir, nil, m).run(t)
	next(t, m.joins)
	next(t, m.watches)
}

// TestClockAhead checks a host whose clock is ahead, so that new certificates have expired by its clock: it must log
// this, and not renew again immediately.
func TestClockAhead(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	m.set(func() { m.life = -time.Minute })
	a := open(t, t.TempDir(), nil, m)
	require.NoError(t, a.join(t.Context()))
	m.set(func() { m.stale = true })
	a.run(t)
	next(t, m.renewed)
	for !strings.Contains(next(t, a.logged), "clock") {
	}
	require.Empty(t, m.renewed)
}

// backdated is a lifetime of certificates, 9 minutes, of which more than half is over at once, because certificates
// begin ten minutes before they are issued.
const backdated = 9 * 60 * 1e9

func TestImage(t *testing.T) {
	authority := testAuthority(t, 1)
	first, second := newMember(t, authority), newMember(t, authority)
	first.set(func() { first.otherMembers = []string{first.addr, second.addr} })
	a := open(t, t.TempDir(), nil, first, second).run(t)
	next(t, first.watches)
	first.send <- snapshot(1, 1)
	next(t, a.assigned)
	content := []byte(strings.Repeat("0123456789", 1000))

	_, err := a.FetchImage(t.Context(), "abc", 0)
	require.ErrorIs(t, err, ErrNoImage)

	read := func(offset uint64) (string, error) {
		r, err := a.FetchImage(t.Context(), "abc", offset)
		require.NoError(t, err)
		defer r.Close()
		got, err := io.ReadAll(r)
		return string(got), err
	}
	second.set(func() { second.images = map[string][]byte{"abc": content} })
	got, err := read(0) // only the member that does not lead has the image
	require.NoError(t, err)
	require.Equal(t, string(content), got)

	first.set(func() {
		first.images = map[string][]byte{"abc": content}
		first.imageErr = status.Error(codes.Unavailable, "stepping down")
	})
	got, err = read(0)
	require.Error(t, err)
	require.Len(t, got, 1000)
	first.set(func() { first.imageErr = nil })
	got, err = read(1000)
	require.NoError(t, err)
	require.Equal(t, string(content[1000:]), got)
	got, err = read(uint64(len(content)))
	require.NoError(t, err)
	require.Empty(t, got)
}

func TestConsole(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	ended := make(chan error, 10)
	a := open(t, t.TempDir(), func(o *Options) {
		o.Console = func(ctx context.Context, vm cloud.VMID, tail uint64, follow bool, w io.Writer) error {
			if vm == "none" {
				return errors.New("there is no console log")
			}
			if _, err := w.Write([]byte(strings.Repeat("x", int(tail)))); err != nil || !follow {
				return err
			}
			<-ctx.Done()
			ended <- ctx.Err()
			return ctx.Err()
		}
	}, m).run(t)
	next(t, m.watches)
	ask := func(r *agentv1.ConsoleRequest) {
		message := snapshot(1, 1)
		message.ConsoleRequests = []*agentv1.ConsoleRequest{r}
		m.send <- message
	}
	ask(&agentv1.ConsoleRequest{RequestId: "r1", VmId: "a", TailBytes: 3*consoleChunk + 1})
	require.Equal(t, "r1", next(t, m.console).GetRequestId())
	total := 0
	for c := next(t, m.console); c != nil; c = next(t, m.console) {
		require.LessOrEqual(t, len(c.GetData()), consoleChunk)
		total += len(c.GetData())
	}
	require.Equal(t, 3*consoleChunk+1, total)

	ask(&agentv1.ConsoleRequest{RequestId: "r2", VmId: "none"})
	require.Equal(t, "r2", next(t, m.console).GetRequestId())
	require.Equal(t, "there is no console log", next(t, m.console).GetError())
	require.Nil(t, next(t, m.console))

	// A request with Follow ends when it is canceled, and another one when the session ends.
	ask(&agentv1.ConsoleRequest{RequestId: "r3", VmId: "a", Follow: true})
	require.Equal(t, "r3", next(t, m.console).GetRequestId())
	ask(&agentv1.ConsoleRequest{RequestId: "r3", Cancel: true})
	require.Error(t, next(t, ended))
	require.Nil(t, next(t, m.console))
	ask(&agentv1.ConsoleRequest{RequestId: "r4", VmId: "a", Follow: true})
	require.Equal(t, "r4", next(t, m.console).GetRequestId())
	m.send <- nil
	require.Error(t, next(t, ended))
	a.stop()
}

// TestConsolesAreBounded checks that one request more than maxConsoles gets an error.
func TestConsolesAreBounded(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	open(t, t.TempDir(), func(o *Options) {
		o.Console = func(ctx context.Context, _ cloud.VMID, _ uint64, _ bool, _ io.Writer) error {
			<-ctx.Done()
			return ctx.Err()
		}
	}, m).run(t)
	next(t, m.watches)
	message := snapshot(1, 1)
	for i := range maxConsoles + 1 {
		message.ConsoleRequests = append(message.ConsoleRequests, &agentv1.ConsoleRequest{RequestId: string(rune('a' + i)), Follow: true})
	}
	m.send <- message
	refused := 0
	for seen := 0; refused == 0 && seen <= maxConsoles+2; seen++ {
		if c := next(t, m.console); c.GetError() != "" {
			refused++
		}
	}
	require.Equal(t, 1, refused)
}

// TestDamagedDirectory checks that Open returns an error if a file in its directory is damaged.
func TestDamagedDirectory(t *testing.T) {
	m := newMember(t, testAuthority(t, 1))
	for _, name := range []string{keyFile, credentialFile, termFile} {
		dir := t.TempDir()
		a := open(t, dir, nil, m).run(t)
		next(t, m.watches)
		m.send <- snapshot(1, 1)
		next(t, a.assigned)
		a.stop()
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte("\xffgarbage"), 0o600))
		_, err := Open(a.o)
		require.ErrorContains(t, err, "damaged", name)
	}
}

// TestStopWithSilentMember checks that Run ends when its context ends, although the only member accepts connections and
// sends nothing.
func TestStopWithSilentMember(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	accepted := make(chan net.Conn, 10)
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			accepted <- c
		}
	}()
	m := newMember(t, testAuthority(t, 1))
	a := open(t, t.TempDir(), func(o *Options) { o.Seeds = []string{listener.Addr().String()} }, m).run(t)
	c := next(t, accepted)
	a.stop()
	c.Close()
}

// TestOpenRemovesTemporaryFiles checks that Open removes the temporary files of interrupted writes and does not read
// them.
func TestOpenRemovesTemporaryFiles(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{keyFile, credentialFile, assignmentFile, termFile} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, "."+name+"1234567890123456789"), []byte("half"), 0o600))
	}
	link, err := Open(Options{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	require.Zero(t, link.status.Term)
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1)
	require.Equal(t, keyFile, entries[0].Name())
}
