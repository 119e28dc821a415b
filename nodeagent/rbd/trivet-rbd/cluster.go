//go:build ceph

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/ceph/go-ceph/rados"
	"github.com/ceph/go-ceph/rbd"
	"golang.org/x/sync/singleflight"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	rbdv1 "github.com/trivet-cloud/trivet/protos/rbd/v1"
)

// cephTimeout limits, in seconds, each request to the cluster. Without this limit, requests wait for as long as the
// cluster cannot be reached.
const cephTimeout = "10"

// slowRequest is the time, in seconds, after which a request without an answer makes librados fetch the present map of
// the cluster. It must be shorter than cephTimeout: otherwise no request lives long enough, and after an OSD has
// restarted, librados calls the OSD's old address until the helper ends. slowRequestCheck is the time in seconds between
// two checks for such requests.
const (
	slowRequest      = "3"
	slowRequestCheck = "1"
)

// server implements RbdService.
type server struct {
	rbdv1.UnimplementedRbdServiceServer

	mu        sync.Mutex
	conn      *rados.Conn // nil before Connect
	connected *rbdv1.ConnectRequest
	clones    singleflight.Group       // of CloneImage
	importing map[string]chan struct{} // by pool and image; each is closed when the import ends
}

func (s *server) Connect(_ context.Context, in *rbdv1.ConnectRequest) (*emptypb.Empty, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn != nil {
		if !proto.Equal(s.connected, in) {
			return nil, status.Error(codes.FailedPrecondition, "this helper is connected to another cluster, or as another user")
		}
		return &emptypb.Empty{}, nil
	}
	conn, err := connect(in)
	if err != nil {
		return nil, wrap("connect to the Ceph cluster", err)
	}
	s.conn, s.connected = conn, in
	return &emptypb.Empty{}, nil
}

// connect returns a connection to the cluster. It returns FAILED_PRECONDITION if the cluster has another fsid than the
// requested one.
func connect(in *rbdv1.ConnectRequest) (*rados.Conn, error) {
	if len(in.GetMonitors()) == 0 || in.GetFsid() == "" || in.GetUser() == "" {
		return nil, status.Error(codes.InvalidArgument, "fsid, monitors and user are required")
	}
	conn, err := rados.NewConnWithUser(in.GetUser())
	if err != nil {
		return nil, err
	}
	for _, option := range [][2]string{
		{"mon_host", strings.Join(in.GetMonitors(), ",")},
		{"key", in.GetKey()},
		{"keyring", "/dev/null"},
		{"auth_client_required", "cephx"},
		{"log_file", "/dev/null"},
		{"log_to_stderr", "false"},
		{"admin_socket", ""},
		{"rados_osd_op_timeout", cephTimeout},
		{"rados_mon_op_timeout", cephTimeout},
		{"client_mount_timeout", cephTimeout},
		{"objecter_timeout", slowRequest},
		{"objecter_tick_interval", slowRequestCheck},
	} {
		if err := conn.SetConfigOption(option[0], option[1]); err != nil {
			return nil, err
		}
	}
	if err := conn.Connect(); err != nil {
		return nil, err
	}
	fsid, err := conn.GetFSID()
	if err == nil && fsid != in.GetFsid() {
		err = status.Errorf(codes.FailedPrecondition, "the cluster at %s has fsid %s, not %s",
			strings.Join(in.GetMonitors(), ","), fsid, in.GetFsid())
	}
	if err != nil {
		conn.Shutdown()
		return nil, err
	}
	return conn, nil
}

// cluster returns the connection that Connect made.
func (s *server) cluster() (*rados.Conn, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.conn == nil {
		return nil, status.Error(codes.FailedPrecondition, "this helper is not connected to a cluster")
	}
	return s.conn, nil
}

// withPool calls f with an open pool. If the pool or the cluster is full, requests of f that need space fail with
// ENOSPC or EDQUOT, and other requests, such as deletions, succeed. Without SetPoolFullTry, all requests would wait
// until there is space.
func (s *server) withPool(pool string, f func(*rados.IOContext) error) error {
	if err := checkNames(pool); err != nil {
		return err
	}
	conn, err := s.cluster()
	if err != nil {
		return err
	}
	io, err := conn.OpenIOContext(pool)
	if err != nil {
		return wrap("open pool "+pool, err)
	}
	defer io.Destroy()
	if err := io.SetPoolFullTry(); err != nil {
		return wrap("open pool "+pool, err)
	}
	return f(io)
}

// withImage calls f with an open image.
func (s *server) withImage(name *rbdv1.ImageName, f func(*rados.IOContext, *rbd.Image) error) error {
	if err := checkNames(name.GetImage()); err != nil {
		return err
	}
	return s.withPool(name.GetPool(), func(io *rados.IOContext) error {
		image, err := rbd.OpenImage(io, name.GetImage(), rbd.NoSnapshot)
		if err != nil {
			return wrap("open image "+name.GetImage(), err)
		}
		defer image.Close()
		return f(io, image)
	})
}

func (s *server) BlockClients(_ context.Context, in *rbdv1.BlockClientsRequest) (*emptypb.Empty, error) {
	if in.GetSeconds() < 1 || in.GetSeconds() > 604800 {
		return nil, status.Error(codes.InvalidArgument, "seconds: want 1 to 604800")
	}
	if i := slices.IndexFunc(in.GetClients(), func(c string) bool { return !validClient(c) }); i >= 0 {
		return nil, status.Errorf(codes.InvalidArgument, "clients: %.100q is not an address of a client", in.GetClients()[i])
	}
	conn, err := s.cluster()
	if err != nil {
		return nil, err
	}
	for _, client := range in.GetClients() {
		command, err := json.Marshal(map[string]any{
			"prefix": "osd blocklist", "blocklistop": "add", "addr": client,
			"expire": json.RawMessage(fmt.Sprintf("%d.0", in.GetSeconds())), // the monitor refuses a number without a point
		})
		if err != nil {
			return nil, err
		}
		if _, text, err := conn.MonCommand(command); err != nil {
			return nil, wrap("block client "+client+" ("+text+")", err)
		}
	}
	return &emptypb.Empty{}, wrap("wait for the cluster's map", conn.WaitForLatestOSDMap())
}

// validClient reports whether text is an address of a Ceph client: an address, a port and a nonce, such as
// 192.0.2.1:0/12345.
func validClient(text string) bool {
	address, nonce, found := strings.Cut(text, "/")
	_, err := netip.ParseAddrPort(address)
	_, nonceErr := strconv.ParseUint(nonce, 10, 64)
	return found && err == nil && nonceErr == nil
}
