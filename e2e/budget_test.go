package e2e

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// blank creates a VM with an empty disk and returns its ID. It repeats a failed call, because the host may not have
// reported its capacity yet.
func (w *world) blank(ctx context.Context, g *lab.GRPC, org, project string) (id string) {
	w.t.Helper()
	require.NoError(w.t, lab.Until(ctx, "a VM is created", func(ctx context.Context) error {
		vm, err := g.VMs.CreateVm(ctx, &vmv1.CreateVmRequest{Name: "small", OrgId: org, ProjectId: project, Spec: &vmv1.VmSpec{
			Cpu: &vmv1.CpuSpec{Vcpus: 1}, Memory: &vmv1.MemorySpec{SizeMib: 64},
			Disks: []*vmv1.DiskSpec{{Id: "root", SizeGib: 1, Source: &vmv1.DiskSource{Source: &vmv1.DiskSource_Blank{Blank: true}}}},
		}})
		id = vm.GetId()
		return err
	}))
	return id
}

// fat returns an UpdateVm request with about 120 KB of random labels and metadata.
func fat(org, project, vm string) *vmv1.UpdateVmRequest {
	out := &vmv1.UpdateVmRequest{OrgId: org, ProjectId: project, VmId: vm, Labels: map[string]string{}, Metadata: map[string]string{}}
	text := func() string {
		b := make([]byte, 750)
		rand.Read(b)
		return base64.StdEncoding.EncodeToString(b)
	}
	for i := range 60 {
		out.Labels[fmt.Sprint("l", i)], out.Metadata[fmt.Sprint("m", i)] = text(), text()
	}
	return out
}

// TestWriteBudgetOfAProject sends updates of 120 KB by one user as often as possible, to all three members at once. It
// checks that only as many are executed as the project's budget of bytes allows, that the others fail with
// RATE_LIMITED, and that calls of other tenants and of the operator succeed.
func TestWriteBudgetOfAProject(t *testing.T) {
	const burst, calls = 4 << 20, 400
	w := newWorld(t, func(w *world) {
		w.trio.Extra = []string{
			"--limits-bytes-per-second=1024", fmt.Sprint("--limits-bytes-burst=", burst), "--limits-calls-per-second=1", fmt.Sprint("--limits-calls-burst=", calls),
		}
	})
	w.startAgent()
	ctx := w.context(2 * time.Minute)
	token := w.tenant("mallory", "evil", "evil-p", "project:member")
	var mallory []*lab.GRPC
	for member := range 3 {
		mallory = append(mallory, w.dial(member+1, token))
	}
	ada := w.dial(2, w.tenant("ada", "acme", "web", "project:member"))
	evil, web := w.blank(ctx, mallory[0], "evil", "evil-p"), w.blank(ctx, ada, "acme", "web")

	began := time.Now()
	var mu sync.Mutex
	accepted := 0
	var refused []error
	var work sync.WaitGroup
	for worker := range 12 {
		work.Go(func() {
			for range 20 {
				_, err := mallory[worker%3].VMs.UpdateVm(ctx, fat("evil", "evil-p", evil))
				mu.Lock()
				if err == nil {
					accepted++
				} else {
					refused = append(refused, err)
				}
				mu.Unlock()
			}
		})
	}
	work.Wait()
	// size is the size of an update: 60 labels and 60 metadata entries of 1,000 bytes each. One update more than fits
	// is allowed, because the last one may exceed the budget.
	const size = 120 * 1000
	earned := int(time.Since(began).Seconds()) * 1024
	t.Logf("%d of 240 updates were carried out", accepted)
	require.LessOrEqual(t, accepted, (burst+earned)/size+1, "calling more members must not increase the budget")
	require.GreaterOrEqual(t, accepted, burst/size/5, "too few updates were executed; attempts that conflicted are charged too")
	for _, err := range refused {
		s := status.Convert(err)
		require.Equal(t, codes.ResourceExhausted, s.Code(), "%v", err)
		require.Contains(t, s.Message(), "project evil-p makes too many changes")
		var reason string
		var wait time.Duration
		for _, d := range s.Details() {
			switch d := d.(type) {
			case *errdetails.ErrorInfo:
				reason = d.GetReason()
			case *errdetails.RetryInfo:
				wait = d.GetRetryDelay().AsDuration()
			}
		}
		require.Equal(t, "RATE_LIMITED", reason)
		require.Greater(t, wait, time.Second)
	}

	for member := range 3 {
		for _, c := range []struct {
			port       int
			path, code string
			body       any
		}{
			{8084, "/api/v1/vms/" + evil + "/stop", "RESOURCE_EXHAUSTED", map[string]any{}},
			{creditPort, "/api/v1/reservations", "RESOURCE_EXHAUSTED", map[string]any{"project_id": "evil-p", "amount": 1}},
		} {
			a, err := w.rest(member+1, token).Do(ctx, c.port, http.MethodPost, c.path, c.body)
			require.NoError(t, err)
			require.Equal(t, []any{429, c.code}, []any{a.Status, a.Error.Code}, "%s: %s", c.path, a.Raw)
			seconds, err := strconv.Atoi(a.Header.Get("Retry-After"))
			require.NoError(t, err)
			require.Greater(t, seconds, 1)
			require.Contains(t, string(a.Error.Details), "RATE_LIMITED")
		}
	}
	_, err := mallory[1].VMs.GetVm(ctx, &vmv1.GetVmRequest{OrgId: "evil", ProjectId: "evil-p", VmId: evil})
	require.NoError(t, err, "reads are not charged")
	_, err = ada.VMs.UpdateVm(ctx, fat("acme", "web", web))
	require.NoError(t, err, "another tenant has a budget of its own")
	_, err = w.admin.VMs.UpdateVm(ctx, &vmv1.UpdateVmRequest{OrgId: "evil", ProjectId: "evil-p", VmId: evil, Labels: map[string]string{"seen": "by the operator"}})
	require.NoError(t, err, "an operator has no budget")
}

// TestWritesStopBeforeTheDiskIsFull fills a member's disk with users' keys. It checks that all members refuse calls
// that add data before the disk is full, so that no member ends, but still accept deletions and operators' calls. When
// there is space again, they must accept all calls.
func TestWritesStopBeforeTheDiskIsFull(t *testing.T) {
	const reserve = 300 << 20
	s := newSick(t, map[int]int{1: 1000}, fmt.Sprint("--limits-disk-reserve=", reserve))
	token := s.tenant("ada", "acme", "web", "project:member")
	s.credit(s.ctx, 2, s.adminToken, 201, http.MethodPost, "/api/v1/wallets", map[string]any{"project_id": "web", "org_id": "acme", "initial_balance": 1000})
	held := s.credit(s.ctx, 2, token, 201, http.MethodPost, "/api/v1/reservations", map[string]any{"project_id": "web", "amount": 10, "ttl_seconds": 3600})

	stop := s.write(s.client(1, 2, 3), 256<<10)
	c := s.client(2)
	err := lab.Until(s.ctx, "keys are refused", func(ctx context.Context) error {
		if _, err := c.Put(ctx, "one more", "v"); err != rpctypes.ErrNoSpace {
			return fmt.Errorf("the response is %v", err)
		}
		return nil
	})
	stop()
	require.NoError(t, err)
	// Compactions and the removal of old log entries free space for some time. Occupy it with a file, so that at most
	// 200 MiB are free, until no more space becomes free.
	foreign := filepath.Join(s.trio.DataDir(1), "foreign")
	require.NoError(t, s.occupy(foreign, 200<<20))
	// Wait until every member reports that the disk of member 1 is low.
	require.NoError(t, lab.Until(s.ctx, "every member reports that the disk of member 1 is low", func(ctx context.Context) error {
		for member := 1; member <= 3; member++ {
			info, err := s.dial(member, s.adminToken).Operator.ClusterStatus(ctx, &operatorv1.ClusterStatusRequest{})
			if err != nil {
				return err
			}
			for _, m := range info.GetMembers() {
				if m.GetId() == 1 && !m.GetDiskLow() {
					return fmt.Errorf("member %d does not report it", member)
				}
			}
		}
		return nil
	}))
	free, err := s.disks[1].Free()
	require.NoError(t, err)
	require.Positive(t, free)
	for id, codes := range s.codes {
		require.Empty(t, codes, "member %d has ended", id)
	}

	for member := 1; member <= 3; member++ {
		a, err := s.rest(member, token).Do(s.ctx, creditPort, http.MethodPost, "/api/v1/reservations", map[string]any{"project_id": "web", "amount": 10})
		require.NoError(t, err)
		require.Equal(t, []any{429, "RESOURCE_EXHAUSTED", "30"}, []any{a.Status, a.Error.Code, a.Header.Get("Retry-After")}, a.Raw)
		require.Contains(t, a.Error.Message, "member 1 of the cluster has less than 300 MiB of disk space left")
		require.NotContains(t, a.Raw, "controlplane-1", "the error does not contain the path of the data directory")
		_, err = s.client(member).Put(s.ctx, "more", "v")
		require.ErrorIs(t, err, rpctypes.ErrNoSpace, "member %d", member)
	}
	s.credit(s.ctx, 3, token, 200, http.MethodPost, "/api/v1/reservations/"+held["id"].(string)+"/release", map[string]any{})
	require.NoError(t, s.admin.EnsureProject(s.ctx, "acme", "by-the-operator"))
	info, err := s.admin.Operator.ClusterStatus(s.ctx, &operatorv1.ClusterStatusRequest{})
	require.NoError(t, err)
	for _, m := range info.GetMembers() {
		require.Equal(t, m.GetId() == 1, m.GetDiskLow(), "member %d", m.GetId())
		require.Positive(t, m.GetDiskFreeBytes())
		require.Greater(t, m.GetDiskSizeBytes(), m.GetDiskFreeBytes())
	}

	// Delete the keys and defragment, as users would. Writes must be accepted again.
	got, err := c.Delete(s.ctx, "fill/", clientv3.WithPrefix())
	require.NoError(t, err)
	require.Positive(t, got.Deleted)
	_, err = c.Compact(s.ctx, got.Header.Revision, clientv3.WithCompactPhysical())
	require.NoError(t, err)
	require.NoError(t, os.Remove(foreign))
	require.NoError(t, lab.Until(s.ctx, "keys are accepted again", func(ctx context.Context) error {
		// Try repeatedly, because each member removes compacted revisions in the background.
		if _, err := c.Defragment(ctx, s.trio.Members[1]+":50051"); err != nil {
			return err
		}
		_, err := c.Put(ctx, "again", "v")
		return err
	}))
	s.goesOn(1, 2, 3)
	// Wait, because the leader learns of a member's free space only after about a second.
	require.NoError(t, lab.Until(s.ctx, "a tenant may change records again", func(ctx context.Context) error {
		a, err := s.rest(2, token).Do(ctx, creditPort, http.MethodPost, "/api/v1/reservations", map[string]any{"project_id": "web", "amount": 10})
		if err == nil && a.Status != http.StatusCreated {
			err = errors.New(a.Raw)
		}
		return err
	}))
}
