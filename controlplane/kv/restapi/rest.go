// Package restapi serves the REST API of the key-value store and of the cluster's members. The main type is Server. gRPC
// clients, which speak etcd's API, are served by package etcdrpc.
//
// Decisions:
//   - The API has no credentials, because its contract has none. A Server therefore accepts requests on the loopback
//     interface only, unless Options.Open is set. /health and /ready accept every client.
//   - A request is checked by the member that receives it, and then forwarded to the leader, except for reads that ask for
//     local data. A forwarded request carries a MAC (forward.go) and is never forwarded again.
//   - Keys are read and written through the same kv.Service as gRPC. Once etcd's Auth is enabled, REST acts as the user
//     named by User.
//
// The package reaches the keys, the members and consensus only through the interfaces Keyspace, Membership and Group.
package restapi

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"golang.org/x/sync/semaphore"

	"github.com/trivet-cloud/trivet/controlplane/edge/auth"
	"github.com/trivet-cloud/trivet/controlplane/edge/rest"
	"github.com/trivet-cloud/trivet/controlplane/engine/consensus"
	"github.com/trivet-cloud/trivet/controlplane/kv"
	"github.com/trivet-cloud/trivet/shared/fault"
)

const (
	// MaxBody is the limit of a request body in bytes: a value of MaxValue has room in any JSON that says it.
	MaxBody = 12 << 20
	// User is the user of etcd's Auth that REST acts as once Auth is enabled.
	User = "rest"

	// keyTime is how long a read or write of a key may take, memberTime a change of the members or the leader. A forwarded
	// request is given a little longer, so that the leader's own answer arrives.
	keyTime     = 10 * time.Second
	memberTime  = 30 * time.Second
	forwardMore = 2 * time.Second

	// maxLists is how many lists are written at a time.
	maxLists = 64

	// staleHeader says of a read that it was served here because no leader is known.
	staleHeader = "X-Trivet-Stale"
)

// Keyspace is what REST asks of the users' keys; *Service.
type Keyspace interface {
	Range(context.Context, *pb.RangeRequest) (*pb.RangeResponse, error)
	// RangeStream gives a range piece by piece, all of it as of one revision.
	RangeStream(ctx context.Context, r *pb.RangeRequest, send func(*pb.RangeResponse) error) error
	Put(context.Context, *pb.PutRequest) (*pb.PutResponse, error)
	DeleteRange(context.Context, *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error)
}

// Group is what REST asks of consensus about the users' group; an Agreement.
type Group interface {
	// Leader is who leads, 0 when none is known.
	Leader() (member, term uint64)
	Status(ctx context.Context) (consensus.GroupStatus, error)
}

// Options of the HTTP service. All are required but where it says otherwise.
type Options struct {
	Keys    Keyspace
	Members Membership
	Group   Group
	// GroupID is the number of the users' group.
	GroupID uint64
	// Self is this member, Cluster the cluster's id.
	Self, Cluster uint64
	// Key makes and checks the MACs of forwards: the same on all members.
	Key []byte
	// Port is that of REST, here and on every other member.
	Port uint16
	// Open lets everybody in who can reach the member's own address, not only members.
	Open bool
	// Hosts are names by which the service may be called, beside IP addresses and localhost; optional.
	Hosts []string
	// ToMember is how another member's REST is spoken with; nil for plaintext.
	ToMember *tls.Config
	Log      *slog.Logger
	// Audit records changes of the members and of the leader that were refused or failed; optional.
	Audit auth.Auditor
	// Metrics takes the request counters.
	Metrics *rest.Metrics
	// Now is time.Now unless set.
	Now func() time.Time
}

// Server is the HTTP service of the users' keys and of the cluster (the spec's part 4.4), by which nobody shows a
// credential. It therefore answers everything on loopback only: who calls by another address of this member must be a
// member that hands a request on (forward.go), unless the service is Open. /health and /ready are for everybody.
// Which address was called is asked of the connection, so that one REST serves any number of listeners.
//
// A request is checked where it arrives and then goes to the leader, as the law has it, unless it is a read that may be
// local. A forwarded one that finds no leader here is refused: it makes one hop.
//
// What is read and written are the users' keys and nothing else: REST asks the same service as gRPC does, as the user
// named rest once Auth is enabled.
type Server struct {
	opts    Options
	server  *rest.Server
	forward *forwarder
	once    onceOnly
	bodies  bodyBudget
	lists   *semaphore.Weighted
}

// New makes the service. Close it.
func New(opts Options) *Server {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	s := &Server{
		opts: opts, forward: newForwarder(seal{opts.Key, opts.Now}, opts.Port, opts.ToMember),
		bodies: newBodyBudget(), lists: semaphore.NewWeighted(maxLists),
		server: rest.New(rest.Options{
			Service: fault.KV, Name: "kv", Ready: opts.ready, Log: opts.Log, Metrics: opts.Metrics, MaxBody: MaxBody, Hosts: opts.Hosts,
		}),
	}
	const path = keyPath + "{key:.*}"
	s.route(http.MethodGet, "/api/v1/kv", s.list)
	s.route(http.MethodGet, path, s.get)
	s.route(http.MethodPut, path, s.put)
	s.route(http.MethodDelete, path, s.delete)
	s.route(http.MethodPost, path+"/put", s.put)
	s.route(http.MethodPost, path+"/delete", s.delete)
	s.memberRoutes()
	return s
}

// ready is what /ready asks: whether somebody leads the users' group, so that keys can be written.
func (o *Options) ready(context.Context) error {
	if leader, _ := o.Group.Leader(); leader == 0 {
		return errors.New("no leader of the keys: fewer than a majority of the members can be reached")
	}
	return nil
}

// ServeHTTP makes a Server an http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.server.ServeHTTP(w, r) }

// Routes lists what is served, for the tests that walk all of it.
func (s *Server) Routes() []rest.Route { return s.server.Routes() }

// Close lets go of the connections to other members.
func (s *Server) Close() { s.forward.client.CloseIdleConnections() }

// Addresses are the addresses to listen on: the member's own, and loopback.
func Addresses(own string) []string {
	ip := net.ParseIP(own)
	switch {
	case ip == nil, ip.IsLoopback(), ip.IsUnspecified():
		return []string{own}
	case ip.To4() == nil:
		return []string{own, "::1"}
	}
	return []string{own, "127.0.0.1"}
}

// request is one that was let in.
type request struct {
	*http.Request
	w *rest.Response
	// from is set when another member handed it on.
	from *forwarded
}

type handler func(request) (any, error)

func (s *Server) route(method, path string, h handler) {
	s.handle(method, path, func(w *rest.Response, r *http.Request) (any, error) { return s.serve(w, r, h) })
}

func (s *Server) handle(method, path string, h rest.Handler) {
	const why = "the spec's part 5.5: the keys' REST checks no credential; it answers on loopback, and other members, unless it is opened"
	s.server.HandleBare(method, path, why, h)
}

// serve runs a handler for a caller that admit accepts.
func (s *Server) serve(w *rest.Response, r *http.Request, h handler) (any, error) {
	from, err := s.admit(r)
	if err != nil {
		return nil, err
	}
	if c := auth.CallerOf(r.Context()); c != nil && from != nil {
		c.Address = from.address
	}
	data, err := h(request{r.WithContext(kv.As(r.Context(), User)), w, from})
	if err != nil {
		return nil, faultOf(err)
	}
	return data, nil
}

// admit says who may call, before anything of a body is read.
func (s *Server) admit(r *http.Request) (*forwarded, error) {
	if header := r.Header.Get(forwardHeader); header != "" {
		from, err := s.forward.seal.check(s.opts.Self, header, r.Method, r.URL.RequestURI())
		if err != nil {
			return nil, err
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			err = s.once.first(from.nonce, s.opts.Now())
		}
		return from, err
	}
	if !s.opts.Open && !rest.FromLoopback(r) {
		return nil, fault.New(fault.PermissionDenied,
			"the key-value store asks for no credential, so it answers on this host's loopback only: call it there, or by gRPC, or open it with rest.open: [kv]")
	}
	return nil, s.server.NotABrowser(r)
}

// hop is what a request that the leader must see has come to.
type hop struct {
	// here is set when this member serves it, stale when it does so without a leader being known.
	here, stale bool
	leader      uint64
	host        string
}

// hop decides who serves a request.
func (s *Server) hop(r request, reads bool) (hop, error) {
	leader, _ := s.opts.Group.Leader()
	switch {
	case leader == s.opts.Self:
		return hop{here: true}, nil
	case r.from != nil:
		return hop{}, notLeader("this member, %d, does not lead", s.opts.Self)
	case leader == 0 && reads:
		return hop{here: true, stale: true}, nil
	case leader == 0:
		return hop{}, notLeader("no leader is known")
	}
	host, err := s.hostOf(r.Context(), leader)
	return hop{leader: leader, host: host}, err
}

func notLeader(format string, args ...any) error {
	return fault.New(fault.Unavailable, format, args...).MayRetry()
}

func (s *Server) hand(r request, to hop, body []byte, limit time.Duration, list bool) (any, error) {
	return s.forward.forward(r.w, r.Request, to.leader, to.host, body, limit+forwardMore, list)
}

// keyPath is what stands before a key.
const keyPath = "/api/v1/kv/"

// key is the key of the path as it was sent. What the router matched may differ where the path is not as RFC 3986 has it:
// it then took an encoded slash for one.
func (r request) key() (string, error) {
	sent := r.URL.RawPath
	if sent == "" {
		sent = r.URL.EscapedPath()
	}
	remainder, ok := strings.CutPrefix(sent, keyPath)
	if ok && r.Method == http.MethodPost {
		at := strings.LastIndexByte(remainder, '/')
		ok = at >= 0
		remainder = remainder[:max(at, 0)]
	}
	if !ok {
		return "", fault.New(fault.NotFound, "no such path: %s", sent)
	}
	return keyOf(remainder)
}

func (s *Server) get(r request) (any, error) {
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	q, err := queryOf(r.Request)
	if err != nil {
		return nil, err
	}
	to := hop{here: true}
	if !q.local {
		if to, err = s.hop(r, true); err != nil {
			return nil, err
		}
	}
	if !to.here {
		return s.hand(r, to, nil, keyTime, false)
	}
	if to.stale {
		r.w.Header().Set(staleHeader, "1")
	}
	ctx, cancel := context.WithTimeout(r.Context(), keyTime)
	defer cancel()
	found, err := s.opts.Keys.Range(ctx, &pb.RangeRequest{Key: []byte(key), Serializable: q.local || to.stale})
	if err != nil {
		return nil, err
	}
	if len(found.Kvs) == 0 {
		return nil, fault.New(fault.NotFound, "Key not found")
	}
	return itemOf(found.Kvs[0].Key, found.Kvs[0].Value), nil
}

func (s *Server) put(r request) (any, error) {
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	var in struct {
		Value text `json:"value"`
	}
	body, free, err := s.body(r, &in)
	defer free()
	switch {
	case err != nil:
		return nil, err
	case !in.Value.given:
		return nil, fault.Invalid("value", "is required: want a string")
	case len(in.Value.bytes) > MaxValue:
		return nil, rpctypes.ErrGRPCRequestTooLarge
	}
	to, err := s.hop(r, false)
	if err != nil {
		return nil, err
	}
	if !to.here {
		return s.hand(r, to, body, keyTime, false)
	}
	ctx, cancel := context.WithTimeout(r.Context(), keyTime)
	defer cancel()
	if _, err := s.opts.Keys.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte(in.Value.bytes)}); err != nil {
		return nil, err
	}
	return doneWith(key), nil
}

func (s *Server) delete(r request) (any, error) {
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	to, err := s.hop(r, false)
	if err != nil {
		return nil, err
	}
	if !to.here {
		return s.hand(r, to, nil, keyTime, false)
	}
	ctx, cancel := context.WithTimeout(r.Context(), keyTime)
	defer cancel()
	if _, err := s.opts.Keys.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte(key)}); err != nil {
		return nil, err
	}
	return doneWith(key), nil
}
