package e2e

import (
	"crypto/tls"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/controlplane/edge/rpc/rpctest"
)

// TestUnfinishedCalls begins many calls without a credential and never sends the last bytes of their requests, and
// opens many connections without a call. It checks that the member's memory does not grow much and that it serves other
// callers meanwhile.
func TestUnfinishedCalls(t *testing.T) {
	w := newWorld(t, func(w *world) {
		w.trio.Env = func(id int) []string {
			return []string{fmt.Sprintf("TRIVET_KV_ETCD_LISTEN=%s:2379", w.trio.Members[id])}
		}
	})
	ctx := w.context(5 * time.Minute)
	begin := map[int]int{}
	for id := range w.trio.Members {
		begin[id] = w.resident(id)
	}
	const put = "/etcdserverpb.KV/Put"
	for _, c := range []struct {
		name, method  string
		member, port  int
		calls, length int
		config        *tls.Config
		// most is the maximum growth of the member's memory since the start, in MiB. Without a bound in the member, its
		// memory would grow by calls * length bytes. A member reads at most 64 MiB at a time of requests to etcd's
		// methods, for which callers on loopback need no credential.
		most int
	}{
		{"a method that needs no token", "/identity.v1.IdentityService/IssueToken", 1, 50051, 60, 16 << 20, nil, 96},
		{"a method that needs no token, small requests", "/identity.v1.IdentityService/IssueToken", 1, 50051, 500, 60 << 10, nil, 96},
		{"a method that needs a token", "/vmcontroller.v1.VmService/CreateVm", 1, 50051, 500, 1 << 20, nil, 96},
		{"image parts", "/vmcontroller.v1.ImageService/UploadImagePart", 1, 50051, 60, 16 << 20, nil, 96},
		{"credit", "/credit.v1.CreditService/GetWallet", 2, 50057, 60, 16 << 20, nil, 96},
		{"hosts that join", "/agent.v1.AgentService/Join", 2, 7443, 60, 16 << 20, &tls.Config{InsecureSkipVerify: true}, 96},
		{"hosts without a certificate", "/agent.v1.AgentService/Report", 2, 7443, 500, 1 << 20, &tls.Config{InsecureSkipVerify: true}, 96},
		{"etcd's methods, too large requests", put, 3, 50051, 60, 16 << 20, nil, 96},
		{"etcd's methods", put, 3, 50051, 400, 3 << 19, nil, 192},
		{"etcd's port", put, 3, 2379, 400, 3 << 19, nil, 192},
	} {
		t.Run(c.name, func(t *testing.T) {
			host := w.trio.Members[c.member]
			r, err := rpctest.Dial(fmt.Sprintf("%s:%d", host, c.port), c.config)
			require.NoError(t, err)
			defer r.Close()
			var calls sync.WaitGroup
			for range c.calls {
				stream, err := r.Call(c.method)
				require.NoError(t, err)
				calls.Go(func() { r.Stall(stream, c.length, 3*time.Second) })
			}
			calls.Wait()
			grown := (w.resident(c.member) - begin[c.member]) >> 10
			t.Logf("after %d calls of %d KiB the VmRSS of member %d has grown from %d by %d MiB", c.calls, c.length>>10, c.member, begin[c.member]>>10, grown)
			require.Less(t, grown, c.most)

			_, err = w.dial(c.member, w.adminToken).VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: "default", ProjectId: "default"})
			require.NoError(t, err, "a tenant's call must succeed meanwhile")
			conn, err := grpc.NewClient(fmt.Sprintf("passthrough:///%s:50051", host), grpc.WithTransportCredentials(insecure.NewCredentials()))
			require.NoError(t, err)
			defer conn.Close()
			_, err = pb.NewKVClient(conn).Put(ctx, &pb.PutRequest{Key: []byte(c.name), Value: make([]byte, 1000)})
			require.NoError(t, err, "a call of etcd's API must succeed meanwhile")
		})
	}
	t.Run("idle connections", func(t *testing.T) {
		// connections is less than one address may open, because this test and the other members have connections too.
		const connections, member, most = 1000, 2, 48
		before := w.resident(member)
		for range connections {
			r, err := rpctest.Dial(w.trio.Members[member]+":50051", nil)
			require.NoError(t, err)
			defer r.Close()
		}
		_, err := w.dial(member, w.adminToken).VMs.ListVms(ctx, &vmv1.ListVmsRequest{OrgId: "default", ProjectId: "default"})
		require.NoError(t, err, "a tenant's call must succeed meanwhile")
		grown := (w.resident(member) - before) >> 10
		t.Logf("with %d idle connections the VmRSS of member %d has grown from %d by %d MiB", connections, member, before>>10, grown)
		require.Less(t, grown, most)
	})
}

var vmRSS = regexp.MustCompile(`VmRSS:\s+(\d+) kB`)

// resident returns the resident memory (VmRSS) of a member in KiB.
func (w *world) resident(member int) int {
	w.t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", w.dir.Running(w.trio.Name(member))))
	require.NoError(w.t, err)
	found := vmRSS.FindSubmatch(text)
	require.NotNil(w.t, found)
	kib, err := strconv.Atoi(string(found[1]))
	require.NoError(w.t, err)
	return kib
}
