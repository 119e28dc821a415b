package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	etcd "go.etcd.io/etcd/api/v3/etcdserverpb"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/types/known/emptypb"

	consolev1 "github.com/trivet-cloud/trivet/protos/console/v1"
	creditv1 "github.com/trivet-cloud/trivet/protos/credit/v1"
	guestv1 "github.com/trivet-cloud/trivet/protos/guest/v1"
	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"
	networkv1 "github.com/trivet-cloud/trivet/protos/network/v1"
	operatorv1 "github.com/trivet-cloud/trivet/protos/operator/v1"
	storagev1 "github.com/trivet-cloud/trivet/protos/storage/v1"
	vmv1 "github.com/trivet-cloud/trivet/protos/vmcontroller/v1"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Secrets that no output may contain.
const (
	tenantToken = "tenant-t0ken"
	adminToken  = "admin-t0ken"
	// orgAdminToken is the token of olga, whose roles are those that a script gives her.
	orgAdminToken = "org-4dmin-t0ken"
	password      = "correct horse"
)

var now = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// fakeCloud is a fake control plane: gRPC servers, one per member, that serve the same data in memory. It lists the
// calls that it receives.
type fakeCloud struct {
	vmv1.UnimplementedVmServiceServer
	vmv1.UnimplementedImageServiceServer
	vmv1.UnimplementedNodeServiceServer
	operatorv1.UnimplementedOperatorServiceServer
	consolev1.UnimplementedConsoleServiceServer

	mu      sync.Mutex
	members map[string]*bufconn.Listener
	faults  []*fault
	calls   []string
	keys    []string
	made    int
	byKey   map[string]*vmv1.VirtualMachine
	vms     []*vmv1.VirtualMachine
	// migration is the last migration of a VM.
	migration *operatorv1.Migration
	// drains has the drains of the hosts by the IDs of the hosts, and boots counts the calls of GetDrain in maintenance.
	drains map[string]*operatorv1.Drain
	boots  int
	images []*vmv1.Image
	data   fakeImageData
	nodes  []*vmv1.Node
	// looks holds the statuses that the next calls of GetImage set and return, one per call.
	looks []vmv1.ImageStatus
	// watches holds what each stream of WatchVm in turn sends: events, waits, or a status code that ends the stream.
	watches   [][]watched
	console   [][]byte
	kv        *fakeKeys
	credits   *fakeCredits
	people    *fakeIdentity
	net       *fakeNetwork
	storage   *fakeStorage
	snapshots fakeSnapshots
	views     fakeViews
	types     fakeInstanceTypes
}

type watched struct {
	event *vmv1.VmEvent
	code  codes.Code
	wait  bool
}

// fault makes the next calls of a method fail. The field times is the number of these calls. If after is true, the
// calls fail after they have taken effect. If member is empty, the calls fail at any member.
type fault struct {
	member, method string
	code           codes.Code
	message        string
	times          int
	after          bool
}

func newCloud(t *testing.T, secure credentials.TransportCredentials, members ...string) *fakeCloud {
	c := &fakeCloud{members: map[string]*bufconn.Listener{}, byKey: map[string]*vmv1.VirtualMachine{}}
	c.data = fakeImageData{cloud: c, parts: map[string]map[uint32][]byte{}, content: map[string][]byte{}}
	c.kv = newKeys(c)
	c.credits = newCredits()
	c.people = newIdentity(c)
	c.net = &fakeNetwork{cloud: c}
	c.storage = &fakeStorage{cloud: c}
	c.snapshots.cloud = c
	c.views.cloud = c
	c.types.cloud = c
	for _, m := range members {
		l := bufconn.Listen(1 << 16)
		c.members[m+":50051"] = l
		s := grpc.NewServer(grpc.Creds(secure), grpc.MaxRecvMsgSize(16<<20), grpc.UnaryInterceptor(c.unary(m)), grpc.StreamInterceptor(c.stream(m)))
		vmv1.RegisterVmServiceServer(s, c)
		vmv1.RegisterImageServiceServer(s, c)
		storagev1.RegisterImageDataServiceServer(s, &c.data)
		vmv1.RegisterVolumeServiceServer(s, c.storage)
		storagev1.RegisterStorageClassServiceServer(s, c.storage)
		storagev1.RegisterVolumeServiceServer(s, fakeFlatten{fakeStorage: c.storage})
		storagev1.RegisterSnapshotServiceServer(s, &c.snapshots)
		guestv1.RegisterGuestServiceServer(s, &fakeGuest{cloud: c})
		vmv1.RegisterNodeServiceServer(s, c)
		operatorv1.RegisterOperatorServiceServer(s, c)
		operatorv1.RegisterVmViewServiceServer(s, &c.views)
		operatorv1.RegisterInstanceTypeServiceServer(s, &c.types)
		consolev1.RegisterConsoleServiceServer(s, c)
		identityv1.RegisterIdentityServiceServer(s, c.people)
		networkv1.RegisterNetworkServiceServer(s, c.net)
		creditv1.RegisterCreditServiceServer(s, c.credits)
		etcd.RegisterKVServer(s, c.kv)
		etcd.RegisterWatchServer(s, c.kv)
		etcd.RegisterLeaseServer(s, c.kv)
		etcd.RegisterMaintenanceServer(s, c.kv)
		etcd.RegisterAuthServer(s, c.kv)
		done := make(chan struct{})
		go func() { defer close(done); _ = s.Serve(l) }()
		t.Cleanup(func() { s.Stop(); <-done })
	}
	return c
}

func (c *fakeCloud) dial(ctx context.Context, endpoint string) (net.Conn, error) {
	c.mu.Lock()
	l := c.members[endpoint]
	c.mu.Unlock()
	if l == nil {
		return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
	}
	return l.DialContext(ctx)
}

// id returns the ID that the cloud generates for its n-th object, counted from 1.
func id(n int) string { return fmt.Sprintf("00000000-0000-7000-8000-%012d", n) }

func (c *fakeCloud) nextID() string { c.made++; return id(c.made) }

// failed returns a status error with the google.rpc details that a control plane adds. field, unless "", is the request
// field that the error is about.
func failed(c codes.Code, field, format string, args ...any) error {
	s := status.New(c, fmt.Sprintf(format, args...))
	s, _ = s.WithDetails(&errdetails.ErrorInfo{Reason: code.Code(c).String(), Domain: "trivet"})
	if field != "" {
		s, _ = s.WithDetails(&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field}}})
	}
	return s.Err()
}

// refused returns a PERMISSION_DENIED error with a reason in its google.rpc details.
func refused(reason, format string, args ...any) error {
	return withReason(codes.PermissionDenied, reason, format, args...)
}

// withReason returns a status error with a reason in its google.rpc details.
func withReason(code codes.Code, reason, format string, args ...any) error {
	s, _ := status.New(code, fmt.Sprintf(format, args...)).WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: "trivet"})
	return s.Err()
}

// noHostFits returns the error of a placement that found no host. reasons has the reason of each host, by the host's
// name.
func noHostFits(reasons map[string]string) error {
	s, _ := status.New(codes.ResourceExhausted, "no host fits").WithDetails(
		&errdetails.ErrorInfo{Reason: "NO_HOST_FITS", Domain: "trivet", Metadata: reasons})
	return s.Err()
}

type tenanted interface {
	GetOrgId() string
	GetProjectId() string
}

func bearer(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	return strings.TrimPrefix(strings.Join(md.Get("authorization"), ""), "Bearer ")
}

// open lists the methods that must be called without a token.
var open = []string{"IssueToken", "ExchangeToken", "ListLoginProviders", "VerifyToken"}

// admit adds a call to the list of calls. It returns an error if the call has no valid token, or comes from the
// administrator and names no org.
func (c *fakeCloud) admit(ctx context.Context, member, method string, req any) error {
	md, _ := metadata.FromIncomingContext(ctx)
	token := bearer(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	note := member + " " + method
	if key := strings.Join(md.Get("idempotency-key"), ""); key != "" {
		if !slices.Contains(c.keys, key) {
			c.keys = append(c.keys, key)
		}
		note += fmt.Sprintf(" key %d", slices.Index(c.keys, key)+1)
	}
	if async(ctx) {
		note += " async"
	}
	c.calls = append(c.calls, note)
	switch {
	case slices.Contains(open, method) && token != "":
		return failed(codes.InvalidArgument, "", "%s came with a token", method)
	case slices.Contains(open, method):
	case c.people.ended[token] != "":
		return failed(codes.Unauthenticated, "", "the token is revoked")
	case token == "":
		return failed(codes.Unauthenticated, "", "no token: send Authorization: Bearer <token>")
	case token == adminToken:
		if t, ok := req.(tenanted); ok && t.GetOrgId() == "" && method != "ListBindings" && method != "ListAuditRecords" && !strings.HasPrefix(method, "ListAll") {
			return failed(codes.InvalidArgument, "org_id", "org_id: is required of system:admin")
		}
		if i, ok := req.(interface{ GetOrgId() string }); ok && i.GetOrgId() == "" && (method == "GetImage" || method == "DeleteImage") {
			return failed(codes.InvalidArgument, "org_id", "org_id: is required of system:admin")
		}
	case token == orgAdminToken:
		return c.people.admitUnscoped(method, req)
	case tokens[token] == "":
		return failed(codes.Unauthenticated, "", "the token is not one of ours: %s", token)
	}
	return nil
}

// fault returns the error of the first remaining fault for a call of a method at a member, or nil if there is none.
func (c *fakeCloud) fault(member, method string, after bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, f := range c.faults {
		if f.times > 0 && f.after == after && (f.member == "" || f.member == member) && f.method == method {
			f.times--
			return failed(f.code, "", "%s", f.message)
		}
	}
	return nil
}

// requestID returns the header with the request ID of a call: the name of its method. Calls of etcd's API have none.
func requestID(method string) metadata.MD {
	if strings.HasPrefix(method, "/etcdserverpb.") {
		return nil
	}
	return metadata.Pairs("x-request-id", "req-"+method[strings.LastIndexByte(method, '/')+1:])
}

// async reports whether the caller prefers a response before the hosts have acted.
func async(ctx context.Context) bool {
	return slices.Contains(metadata.ValueFromIncomingContext(ctx, "prefer"), "respond-async")
}

func (c *fakeCloud) unary(member string) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		method := info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:]
		_ = grpc.SetHeader(ctx, requestID(info.FullMethod)) // its only error is for a call that has ended
		if err := c.admit(ctx, member, method, req); err != nil {
			return nil, err
		}
		if err := c.fault(member, method, false); err != nil {
			return nil, err
		}
		resp, err := handler(ctx, req)
		if after := c.fault(member, method, true); after != nil {
			return nil, after
		}
		return resp, err
	}
}

func (c *fakeCloud) stream(member string) grpc.StreamServerInterceptor {
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		method := info.FullMethod[strings.LastIndexByte(info.FullMethod, '/')+1:]
		_ = ss.SetHeader(requestID(info.FullMethod)) // its only error is for a stream that has ended
		if err := c.admit(ss.Context(), member, method, nil); err != nil {
			return err
		}
		if err := c.fault(member, method, false); err != nil {
			return err
		}
		return handler(srv, ss)
	}
}

func (c *fakeCloud) CreateImage(_ context.Context, in *vmv1.CreateImageRequest) (*vmv1.Image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, "  from "+in.GetSourceUrl())
	if strings.HasPrefix(in.GetSourceUrl(), "file:///etc/") {
		return nil, failed(codes.NotFound, "", "there is no such file to import")
	}
	i := &vmv1.Image{
		Id: c.nextID(), Name: in.GetName(), OrgId: "default", Visibility: in.GetVisibility(), Format: in.GetFormat(), OsType: in.GetOsType(),
		OsVersion: in.GetOsVersion(), Architecture: in.GetArchitecture(), MinDiskGib: in.GetMinDiskGib(), MinMemoryMib: in.GetMinMemoryMib(),
		Metadata: maps.Clone(in.GetMetadata()), Status: vmv1.ImageStatus_IMAGE_STATUS_PENDING, CreatedAt: now.UnixMilli(), UpdatedAt: now.UnixMilli(),
	}
	c.images = append(c.images, i)
	return i, nil
}

func (c *fakeCloud) GetImage(_ context.Context, in *vmv1.GetImageRequest) (*vmv1.Image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, i := range c.images {
		if i.GetId() != in.GetImageId() {
			continue
		}
		if len(c.looks) > 0 {
			i.Status, c.looks = c.looks[0], c.looks[1:]
			i.SizeBytes = 25 << 20
			if i.Status == vmv1.ImageStatus_IMAGE_STATUS_ERROR {
				i.Metadata = map[string]string{"trivet/error": "it has a backing file"}
			}
		}
		return i, nil
	}
	return nil, failed(codes.NotFound, "", "no image %s", in.GetImageId())
}

func (c *fakeCloud) ListImages(_ context.Context, in *vmv1.ListImagesRequest) (*vmv1.ListImagesResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	resp := &vmv1.ListImagesResponse{}
	for _, i := range c.images {
		if i.GetOrgId() == "default" || in.GetIncludePublic() {
			resp.Images = append(resp.Images, i)
		}
	}
	return resp, nil
}

func (c *fakeCloud) DeleteImage(_ context.Context, in *vmv1.DeleteImageRequest) (*emptypb.Empty, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.IndexFunc(c.images, func(i *vmv1.Image) bool { return i.GetId() == in.GetImageId() })
	switch {
	case at < 0:
		return nil, failed(codes.NotFound, "", "no image %s", in.GetImageId())
	case c.images[at].GetOrgId() != cmp.Or(in.GetOrgId(), "default"):
		return nil, failed(codes.PermissionDenied, "", "image %s belongs to org %s, and only that org can change or delete it", in.GetImageId(), c.images[at].GetOrgId())
	}
	c.images = slices.Delete(c.images, at, at+1)
	return &emptypb.Empty{}, nil
}

func (c *fakeCloud) UpdateImage(_ context.Context, in *vmv1.UpdateImageRequest) (*vmv1.Image, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.IndexFunc(c.images, func(i *vmv1.Image) bool { return i.GetId() == in.GetImageId() })
	if at < 0 {
		return nil, status.Errorf(codes.NotFound, "no image %s", in.GetImageId())
	}
	i := c.images[at]
	i.Name = cmp.Or(in.GetName(), i.GetName())
	i.Visibility = cmp.Or(in.GetVisibility(), i.GetVisibility())
	i.Metadata = cloud.Merge(i.GetMetadata(), in.GetMetadata())
	return i, nil
}

// ListNodes returns a page of the hosts. The token of a page is the number of hosts before it.
func (c *fakeCloud) ListNodes(_ context.Context, in *vmv1.ListNodesRequest) (*vmv1.ListNodesResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	first, _ := strconv.Atoi(in.GetPageToken())
	first = min(first, len(c.nodes))
	last := len(c.nodes)
	if size := int(in.GetPageSize()); size > 0 {
		last = min(last, first+size)
	}
	out := &vmv1.ListNodesResponse{Nodes: c.nodes[first:last]}
	if last < len(c.nodes) {
		out.NextPageToken = strconv.Itoa(last)
	}
	return out, nil
}

func (c *fakeCloud) node(id string, to vmv1.NodeState) (*vmv1.Node, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, n := range c.nodes {
		if n.GetId() == id {
			if to != 0 {
				n.State = to
			}
			return n, nil
		}
	}
	return nil, failed(codes.NotFound, "", "no node %s", id)
}

func (c *fakeCloud) GetNode(_ context.Context, in *vmv1.GetNodeRequest) (*vmv1.Node, error) {
	return c.node(in.GetNodeId(), 0)
}

func (c *fakeCloud) CordonNode(_ context.Context, in *vmv1.CordonNodeRequest) (*vmv1.Node, error) {
	return c.node(in.GetNodeId(), vmv1.NodeState_NODE_STATE_CORDONED)
}

func (c *fakeCloud) UncordonNode(_ context.Context, in *vmv1.UncordonNodeRequest) (*vmv1.Node, error) {
	c.endDrain(in.GetNodeId())
	return c.node(in.GetNodeId(), vmv1.NodeState_NODE_STATE_READY)
}

func (c *fakeCloud) CreateNodeToken(_ context.Context, in *operatorv1.CreateNodeTokenRequest) (*operatorv1.CreateNodeTokenResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.calls = append(c.calls, fmt.Sprintf("  name=%s ttl=%d", in.GetName(), in.GetTtlSeconds()))
	return &operatorv1.CreateNodeTokenResponse{Token: "7.abc.def", ExpiresAt: now.Add(time.Hour).UnixMilli()}, nil
}

func (c *fakeCloud) ClusterStatus(context.Context, *operatorv1.ClusterStatusRequest) (*operatorv1.ClusterStatusResponse, error) {
	return &operatorv1.ClusterStatusResponse{
		Version: "v0.1.0", Cluster: "c0ffee", MemberId: 1,
		Members: []*operatorv1.Member{
			{Id: 1, Name: "node-1", Address: "10.0.0.1", State: "VOTER", Wanted: "VOTER", Reachable: true, DiskFreeBytes: 300 << 20, DiskSizeBytes: 20 << 30, DiskLow: true, Version: "v0.1.0"},
			{Id: 2, Name: "node-2", Address: "10.0.0.2", State: "LEARNER", Wanted: "VOTER"},
		},
		Groups: []*operatorv1.Group{
			{Id: 1, Name: "system", LeaderId: 1, Term: 4, CommittedIndex: 120, AppliedIndex: 119, Revision: 77, Voters: []uint64{1}, Learners: []uint64{2},
				Progress: []*operatorv1.Progress{{MemberId: 1, MatchIndex: 121, Active: true}, {MemberId: 2, MatchIndex: 80}}},
			{Id: 2, Name: "kv", Term: 5},
		},
	}, nil
}
