package diskspace

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/fault"
	"github.com/trivet-cloud/trivet/shared/metricstest"
)

const gib = int64(1) << 30

// trio is a cluster of three members whose free disk space the test sets. It is the Peers of each member's Monitor.
type trio struct {
	free     map[uint64]int64
	silent   map[uint64]bool
	monitors map[uint64]*Monitor
	now      time.Time
	log      bytes.Buffer
}

func (c *trio) Members() map[uint64]string { return map[uint64]string{1: "a", 2: "b", 3: "c"} }

func (c *trio) Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error) {
	if c.silent[member] {
		return nil, errors.New("no answer")
	}
	return c.monitors[member].Answer(ctx, 0, body)
}

func (c *trio) check() {
	for range 2 {
		for _, m := range c.monitors {
			m.Check(context.Background())
		}
	}
}

func newTrio(reserve int64) *trio {
	c := &trio{free: map[uint64]int64{1: 50 * gib, 2: 50 * gib, 3: 50 * gib}, silent: map[uint64]bool{}, monitors: map[uint64]*Monitor{}, now: time.Unix(1_800_000_000, 0)}
	for id := range c.free {
		m := New(Options{
			Self: id, Reserve: reserve, Log: slog.New(slog.NewTextHandler(&c.log, nil)), Now: func() time.Time { return c.now },
			Stat: func(string) (int64, int64, error) { return c.free[id], 100 * gib, nil },
		})
		m.Attach(c)
		c.monitors[id] = m
	}
	return c
}

func as(c cloud.Caller, method string) context.Context {
	c.Method = method
	return auth.With(context.Background(), &c, auth.RPC)
}

var (
	tenant   = cloud.Caller{User: "ada", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.ProjectMember, Org: "o", Project: "p"}}}
	operator = cloud.Caller{User: "root", Proof: cloud.ProofPassword, Bindings: []cloud.Binding{{Role: cloud.SystemAdmin}}}
)

const vms = "/vmcontroller.v1.VmService/"

// TestOneLowDiskRefusesChanges lets the disk of one of three members get low. Every member must refuse tenants' changes
// and nothing else, until the free space reaches 9/8 of the reserve.
func TestOneLowDiskRefusesChanges(t *testing.T) {
	c := newTrio(0)
	c.check()
	for id, m := range c.monitors {
		require.NoError(t, m.Admit(as(tenant, vms+"CreateVm")), id)
		require.False(t, m.Full())
	}
	c.free[3] = 4*gib - 1
	c.check()
	for _, m := range c.monitors {
		require.True(t, m.Full())
		err := m.Admit(as(tenant, vms+"CreateVm"))
		f, _ := fault.From(err)
		require.Equal(t, fault.Throttled, f.Kind)
		require.Equal(t, Reason, f.Reason)
		require.Equal(t, 30*time.Second, f.RetryDelay())
		require.Equal(t, "member 3 of the cluster has less than 4096 MiB of disk space left: until an operator makes room you can read and delete, but not create or change", f.Message)
		for _, method := range []string{vms + "ListVms", vms + "DeleteVm", "/credit.v1.CreditService/ReleaseReservation", "/identity.v1.IdentityService/RevokeTokens"} {
			require.NoError(t, m.Admit(as(tenant, method)), method)
		}
		require.NoError(t, m.Admit(as(operator, vms+"CreateVm")))
		require.NoError(t, m.Admit(as(cloud.Caller{Node: "n"}, "/agent.v1.AgentService/Report")))
		require.NoError(t, m.Admit(context.Background()), "a change without a caller is accepted")
	}
	require.Contains(t, c.log.String(), "disk space is low")
	require.Equal(t, map[string]float64{"trivet_disk_free_bytes": float64(4*gib - 1), "trivet_disk_reserve_bytes": float64(4 * gib), "trivet_disk_low": 1}, metricstest.Values(t, c.monitors[3]))

	c.free[3] = 4 * gib
	c.check()
	require.True(t, c.monitors[1].Full(), "free space equal to the reserve does not end the refusal")
	c.free[3] = 5 * gib
	c.check()
	require.NoError(t, c.monitors[1].Admit(as(tenant, vms+"CreateVm")))
	require.Contains(t, c.log.String(), "no longer low")
}

// TestStoppedMemberIsIgnored checks that a low member counts until keepAnswer after its last response. After that, the
// other members must accept changes again.
func TestStoppedMemberIsIgnored(t *testing.T) {
	c := newTrio(0)
	c.free[2] = 0
	c.check()
	require.True(t, c.monitors[1].Full())
	c.silent[2] = true
	c.check()
	require.True(t, c.monitors[1].Full(), "a member that does not answer does not end the refusal")
	c.now = c.now.Add(keepAnswer + time.Second)
	c.check()
	require.False(t, c.monitors[1].Full())
	require.True(t, c.monitors[2].Full(), "a member's own disk counts without a response")
}

func TestReserve(t *testing.T) {
	for size, want := range map[int64]int64{100 << 20: 25 << 20, gib: 256 << 20, 8 * gib: 512 << 20, 40 * gib: 2 * gib, 1000 * gib: 4 * gib} {
		require.Equal(t, want, DefaultReserve(size), "%d", size)
	}
	c := newTrio(-1)
	c.free[1] = 0
	c.check()
	require.False(t, c.monitors[1].Full(), "a negative reserve disables the check")
	c = newTrio(60 * gib)
	require.True(t, c.monitors[1].Full(), "New measures the disk, so a low disk counts before the first Check")
}

func TestStat(t *testing.T) {
	free, size, err := stat(t.TempDir())
	require.NoError(t, err)
	require.Positive(t, free)
	require.GreaterOrEqual(t, size, free)
	_, _, err = stat("/there/is/nothing")
	require.Error(t, err)
}
