package main

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	agentv1 "github.com/trivet-cloud/trivet/protos/agent/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"
	"github.com/trivet-cloud/trivet/shared/mtls"
)

// within is the longest time that a test waits for something. It elapses only if the test fails.
const within = 60 * time.Second

// controlPlane is a fake control plane of one member, which always leads. The test sets the desired state of its VMs.
type controlPlane struct {
	agentv1.UnimplementedAgentServiceServer
	vmv1.UnimplementedNodeServiceServer

	t         *testing.T
	addr      string
	authority *mtls.Authority
	image     []byte

	mu       sync.Mutex // guards the fields below
	revision int64
	vms      map[string]*agentv1.AssignedVm
	present  []string // present VMs in the agent's last WatchRequest
	watch    chan *agentv1.WatchResponse
	seen     map[string]*agentv1.VmObservation
	beat     *vmv1.HeartbeatNodeRequest
	facts    *agentv1.NodeFacts
	console  bytes.Buffer
	moved    chan struct{} // closed and replaced by each call of change
	networks hostNetworks
}

// newControlPlane starts a control plane that the agent reaches at the address of the listener.
func newControlPlane(t *testing.T, image []byte, listener net.Listener) *controlPlane {
	authority, err := mtls.NewAuthority("test", bytes.Repeat([]byte{1}, ed25519.SeedSize))
	require.NoError(t, err)
	c := &controlPlane{
		t: t, addr: listener.Addr().String(), authority: authority, image: image, vms: map[string]*agentv1.AssignedVm{},
		seen: map[string]*agentv1.VmObservation{}, moved: make(chan struct{}),
	}
	own, err := authority.IssueFor(mtls.Member, "1", time.Now(), time.Hour)
	require.NoError(t, err)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(mtls.ServerOptional(
		func() (*tls.Certificate, error) { return mtls.WithAuthority(own, authority.Certificate()), nil },
		authority.Certificate(), mtls.OnlyKind(mtls.Node), 0))))
	agentv1.RegisterAgentServiceServer(server, c)
	vmv1.RegisterNodeServiceServer(server, c)
	var serving sync.WaitGroup
	serving.Go(func() { server.Serve(listener) })
	t.Cleanup(func() { server.Stop(); serving.Wait() })
	return c
}

func (c *controlPlane) token() string { return "id.secret." + mtls.Pin(c.authority.Certificate()) }

func (c *controlPlane) Join(_ context.Context, r *agentv1.JoinRequest) (*agentv1.Credential, error) {
	request, err := x509.ParseCertificateRequest(r.GetCsr())
	if err != nil || r.GetToken() != c.token() {
		return nil, status.Error(codes.Unauthenticated, "no")
	}
	cert, err := c.authority.Issue(mtls.Node, "n1", request.PublicKey, time.Now(), time.Hour)
	if err != nil {
		return nil, err
	}
	return &agentv1.Credential{
		Certificate: cert.Raw, Authority: c.authority.Certificate().Raw, NodeId: "n1", Members: []string{c.addr},
	}, nil
}

// change calls f, which may change the fields that mu guards, and then wakes all callers of until.
func (c *controlPlane) change(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	close(c.moved)
	c.moved = make(chan struct{})
}

// until waits until the function ok returns true. ok may read the fields that mu guards. The failure message contains
// what, a description of the awaited state.
func (c *controlPlane) until(what string, ok func() bool) {
	c.t.Helper()
	deadline := time.After(within)
	for {
		c.mu.Lock()
		done, moved := ok(), c.moved
		c.mu.Unlock()
		if done {
			return
		}
		select {
		case <-moved:
		case <-deadline:
			c.mu.Lock()
			defer c.mu.Unlock()
			require.FailNow(c.t, "the agent did not report the awaited state in time", "%s; last %v", what, c.seen)
		}
	}
}

// assign makes vm the desired state of the VM with its id. If the agent is connected, assign sends the desired state to
// it.
func (c *controlPlane) assign(vm *agentv1.AssignedVm) {
	c.change(func() {
		c.revision++
		c.vms[vm.GetVmId()] = vm
		c.tell(&agentv1.WatchResponse{Vms: []*agentv1.AssignedVm{vm}})
	})
}

// tell sends m to the agent as the next message of its watch, if the agent is connected. The caller must hold mu.
func (c *controlPlane) tell(m *agentv1.WatchResponse) {
	m.Term, m.Revision, m.Complete = 1, c.revision, true
	if c.watch != nil {
		c.watch <- m
	}
}

func (c *controlPlane) Watch(r *agentv1.WatchRequest, stream grpc.ServerStreamingServer[agentv1.WatchResponse]) error {
	deltas := make(chan *agentv1.WatchResponse, 100)
	first := &agentv1.WatchResponse{Term: 1, LeaseSeconds: 30, Complete: true}
	c.change(func() {
		c.present, c.watch = r.GetPresentVms(), deltas
		first.Revision = c.revision
		for _, vm := range c.vms {
			first.Vms = append(first.Vms, vm)
		}
	})
	if err := stream.Send(first); err != nil {
		return err
	}
	for {
		select {
		case m := <-deltas:
			if err := stream.Send(m); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func (c *controlPlane) Report(stream grpc.ClientStreamingServer[agentv1.ReportRequest, agentv1.ReportResponse]) error {
	for {
		r, err := stream.Recv()
		if err != nil {
			return err
		}
		c.change(func() {
			if r.GetFacts() != nil {
				c.facts = r.GetFacts()
			}
			for _, o := range r.GetVms() {
				c.seen[o.GetVmId()] = o
			}
		})
	}
}

func (c *controlPlane) HeartbeatNode(_ context.Context, r *vmv1.HeartbeatNodeRequest) (*vmv1.Node, error) {
	c.change(func() { c.beat = r })
	return &vmv1.Node{}, nil
}

func (c *controlPlane) ReadImage(r *agentv1.ReadImageRequest, stream grpc.ServerStreamingServer[agentv1.ReadImageResponse]) error {
	if r.GetSha256() != c.sum() {
		return status.Error(codes.NotFound, "no such image here")
	}
	return stream.Send(&agentv1.ReadImageResponse{Data: c.image[r.GetOffset():]})
}

func (c *controlPlane) SendConsole(stream grpc.ClientStreamingServer[agentv1.SendConsoleRequest, agentv1.SendConsoleResponse]) error {
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&agentv1.SendConsoleResponse{})
		}
		if err != nil {
			return err
		}
		c.change(func() { c.console.Write(r.GetData()); c.console.WriteString(r.GetError()) })
	}
}

func (c *controlPlane) sum() string {
	sum := sha256.Sum256(c.image)
	return hex.EncodeToString(sum[:])
}

// sees waits until the agent has reported the state level for the VM, with the generation of vm. It returns that
// observation.
func (c *controlPlane) sees(vm *agentv1.AssignedVm, level agentv1.Observed) *agentv1.VmObservation {
	c.t.Helper()
	var o *agentv1.VmObservation
	c.until(level.String(), func() bool {
		o = c.seen[vm.GetVmId()]
		return o.GetObserved() == level && o.GetGeneration() == vm.GetGeneration()
	})
	return o
}
