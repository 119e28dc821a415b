// Package restapi serves the REST API of the key-value store and of the cluster's members. The main type is Server.
// gRPC clients use etcd's API, which package etcdrpc serves.
//
// Decisions:
//   - The API has no credentials, because its contract (docs/api.md) has none. A Server therefore accepts requests on
//     the loopback interface only, unless Options.Open is set. /health and /ready accept every client.
//   - A request is checked by the member that receives it, and then forwarded to the leader, except for reads that
//     request local data. A forwarded request carries a MAC (forward.go) and is never forwarded again.
//   - Keys are read and written through the same kv.Service as gRPC. Once etcd's Auth is enabled, REST acts as the user
//     named by User.
//
// The package uses the keys, the members and consensus only through the interfaces Keyspace, Membership and Group.
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
	// MaxBody is the maximum size of a request body in bytes. A body with a value of MaxValue bytes fits, whatever its
	// JSON encoding.
	MaxBody = 12 << 20
	// User is the user of etcd's Auth for all requests, once Auth is enabled.
	User = "rest"

	// keyTimeout is the timeout for reading or writing keys. memberTimeout is the timeout for changing the members or
	// the leader. A member waits for a forwarded request for forwardExtra longer, so that it receives the leader's own
	// timeout error.
	keyTimeout    = 10 * time.Second
	memberTimeout = 30 * time.Second
	forwardExtra  = 2 * time.Second

	// maxLists is the maximum number of lists that are written at the same time.
	maxLists = 64

	// staleHeader is set in the response to a read that this member served from local data because no leader is known.
	staleHeader = "X-Trivet-Stale"
)

// Keyspace reads and writes keys. *kv.Service implements it.
type Keyspace interface {
	Range(context.Context, *pb.RangeRequest) (*pb.RangeResponse, error)
	// RangeStream sends a range in several responses, all as of one revision.
	RangeStream(ctx context.Context, r *pb.RangeRequest, send func(*pb.RangeResponse) error) error
	Put(context.Context, *pb.PutRequest) (*pb.PutResponse, error)
	DeleteRange(context.Context, *pb.DeleteRangeRequest) (*pb.DeleteRangeResponse, error)
}

// Group is the raft group of the key-value store. kv.Consensus includes it.
type Group interface {
	// Leader returns the ID and the term of the leader. The ID is 0 if no leader is known.
	Leader() (member, term uint64)
	Status(ctx context.Context) (consensus.GroupStatus, error)
}

// Options configures a Server. Fields are required unless documented as optional.
type Options struct {
	Keys    Keyspace
	Members Membership
	Group   Group
	// GroupID is the ID of the raft group of the key-value store.
	GroupID uint64
	// Self is the ID of this member, and Cluster is the ID of the cluster.
	Self, Cluster uint64
	// Key is the key for the MACs of forwarded requests. It is the same on all members.
	Key []byte
	// Port is the TCP port on which every member serves REST.
	Port uint16
	// Open permits all clients to send requests to the member's own address. Otherwise, only requests that other
	// members forward are accepted there.
	Open bool
	// Hosts lists the host names that are accepted in requests, besides IP addresses and localhost; optional.
	Hosts []string
	// ToMember is the TLS configuration for requests to other members; nil for plaintext.
	ToMember *tls.Config
	Log      *slog.Logger
	// Audit records refused and failed changes of the members and of the leader; optional.
	Audit auth.Auditor
	// Metrics counts the requests and their outcomes.
	Metrics *rest.Metrics
	// Document is the OpenAPI document of the routes; optional.
	Document []byte
	// Now replaces time.Now; optional.
	Now func() time.Time
}

// Server serves the REST API of the key-value store and of the members (docs/api.md, "REST: keys and members").
// Requests have no credentials. A request that arrives on loopback is accepted. A request to another address of this
// member is accepted only if a member forwarded it (forward.go), or if Options.Open is set. The local address of the
// connection decides, so one Server can serve any number of listeners.
//
// The leader serves all requests except local reads; another member forwards them. A member that is not the leader
// refuses a forwarded request.
type Server struct {
	opts    Options
	server  *rest.Server
	forward *forwarder
	nonces  nonceCache
	bodies  bodyBudget
	lists   *semaphore.Weighted
}

// New returns a Server. The caller must close it.
func New(opts Options) *Server {
	if opts.Now == nil {
		opts.Now = time.Now
	}
	s := &Server{
		opts: opts, forward: newForwarder(forwardMAC{opts.Key, opts.Now}, opts.Port, opts.ToMember),
		bodies: newBodyBudget(), lists: semaphore.NewWeighted(maxLists),
		server: rest.New(rest.Options{
			Service: fault.KV, Name: "kv", Ready: opts.ready, Document: opts.Document, Log: opts.Log, Metrics: opts.Metrics, MaxBody: MaxBody, Hosts: opts.Hosts,
		}),
	}
	const path = keyPath + "{key:.*}"
	consistency := rest.QueryOf("consistency", nil, "local or serializable: the answering member reads its own copy, which may be old.")
	written := rest.Returns(http.StatusOK, writeResponse{})
	s.route(http.MethodGet, "/api/v1/kv", s.list, rest.Summary("Lists keys with their values, in order, as of one revision."), consistency,
		rest.QueryOf("prefix", nil, "List keys from this prefix up to the prefix followed by ~."), rest.Returns(http.StatusOK, listResponse{}))
	s.route(http.MethodGet, path, s.get, rest.Summary("Returns the value of a key."), consistency, rest.Returns(http.StatusOK, item{}))
	s.route(http.MethodPut, path, s.put, rest.Summary("Sets the value of a key."), rest.Takes(valueBody{}), written)
	s.route(http.MethodDelete, path, s.delete, rest.Summary("Deletes a key. A key that does not exist is a success."), written)
	s.route(http.MethodPost, path+"/put", s.put, rest.Summary("Sets the value of a key."), rest.Takes(valueBody{}), written)
	s.route(http.MethodPost, path+"/delete", s.delete, rest.Summary("Deletes a key. A key that does not exist is a success."), written)
	s.memberRoutes()
	return s
}

// ready is the check of the path /ready. It returns an error if the raft group has no leader, because keys cannot be
// written then.
func (o *Options) ready(context.Context) error {
	if leader, _ := o.Group.Leader(); leader == 0 {
		return errors.New("the key-value store has no leader: fewer than a majority of the members can be reached")
	}
	return nil
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.server.ServeHTTP(w, r) }

// Routes lists all routes, for tests.
func (s *Server) Routes() []rest.Route { return s.server.Routes() }

// Close closes idle connections to other members.
func (s *Server) Close() { s.forward.client.CloseIdleConnections() }

// Addresses returns the addresses to listen on: own, which is the member's address, and the loopback address of the
// same IP version. If own is a host name, a loopback address or an unspecified address, only own is returned.
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

// request is a request whose caller was accepted.
type request struct {
	*http.Request
	w *rest.Response
	// forwarded is the content of the verified forwardHeader if another member forwarded the request, and nil
	// otherwise.
	forwarded *forwardedRequest
}

type handler func(request) (any, error)

func (s *Server) route(method, path string, h handler, options ...rest.Option) {
	s.handle(method, path, func(w *rest.Response, r *http.Request) (any, error) { return s.serve(w, r, h) }, options...)
}

func (s *Server) handle(method, path string, h rest.Handler, options ...rest.Option) {
	const reason = "the wire contract (docs/api.md): REST of keys requires no credential; it answers on loopback and to other members unless rest.open is set"
	s.server.HandleBare(method, path, reason, h, options...)
}

// serve runs the handler h if admit accepts the request. It converts an error of the handler with faultOf.
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

// admit returns an error if the caller may not make the request. It runs before the body is read. For a forwarded
// request it returns the content of the verified forwardHeader, and nil otherwise.
func (s *Server) admit(r *http.Request) (*forwardedRequest, error) {
	if header := r.Header.Get(forwardHeader); header != "" {
		from, err := s.forward.mac.verify(s.opts.Self, header, r.Method, r.URL.RequestURI())
		if err != nil {
			return nil, err
		}
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			err = s.nonces.add(from.nonce, s.opts.Now())
		}
		return from, err
	}
	if !s.opts.Open && !rest.FromLoopback(r) {
		return nil, fault.New(fault.PermissionDenied,
			"the REST API of the key-value store has no authentication, so it accepts calls on this host's loopback interface only: call it there, use gRPC, or set rest.open: [kv]")
	}
	return nil, s.server.RefuseBrowser(r)
}

// target describes which member serves a request.
type target struct {
	// local is true if this member serves the request. stale is true if this member serves the request from local data
	// because no leader is known.
	local, stale bool
	leader       uint64
	host         string
}

// destination returns which member serves a request. The parameter reads is true if the request changes nothing.
func (s *Server) destination(r request, reads bool) (target, error) {
	leader, _ := s.opts.Group.Leader()
	switch {
	case leader == s.opts.Self:
		return target{local: true}, nil
	case r.forwarded != nil:
		return target{}, notLeader("this member, %d, is not the leader", s.opts.Self)
	case leader == 0 && reads:
		return target{local: true, stale: true}, nil
	case leader == 0:
		return target{}, notLeader("no leader is known")
	}
	host, err := s.memberHost(r.Context(), leader)
	return target{leader: leader, host: host}, err
}

func notLeader(format string, args ...any) error {
	return fault.New(fault.Unavailable, format, args...).MayRetry()
}

func (s *Server) forwardTo(r request, to target, body []byte, limit time.Duration, list bool) (any, error) {
	return s.forward.forward(r.w, r.Request, to.leader, to.host, body, limit+forwardExtra, list)
}

// keyPath is the prefix of the paths of single keys.
const keyPath = "/api/v1/kv/"

// key returns the key in the path of the request. It parses the path as the client sent it, and does not use the
// router's path variable: in paths that are invalid by RFC 3986, the router decodes encoded slashes.
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
	return decodeKey(remainder)
}

func (s *Server) get(r request) (any, error) {
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	q, err := parseQuery(r.Request)
	if err != nil {
		return nil, err
	}
	to := target{local: true}
	if !q.local {
		if to, err = s.destination(r, true); err != nil {
			return nil, err
		}
	}
	if !to.local {
		return s.forwardTo(r, to, nil, keyTimeout, false)
	}
	if to.stale {
		r.w.Header().Set(staleHeader, "1")
	}
	ctx, cancel := context.WithTimeout(r.Context(), keyTimeout)
	defer cancel()
	found, err := s.opts.Keys.Range(ctx, &pb.RangeRequest{Key: []byte(key), Serializable: q.local || to.stale})
	if err != nil {
		return nil, err
	}
	if len(found.Kvs) == 0 {
		return nil, fault.New(fault.NotFound, "Key not found")
	}
	return newItem(found.Kvs[0].Key, found.Kvs[0].Value), nil
}

type valueBody struct {
	// At most 1.5 MiB. It is stored as the bytes of its UTF-8.
	Value jsonString `json:"value" api:"required"`
}

// listResponse describes the response to a list of keys, which is sent in pieces.
type listResponse struct {
	// In the order of the keys, all as of one revision.
	Items []item `json:"items"`
}

func (s *Server) put(r request) (any, error) {
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	var in valueBody
	body, free, err := s.body(r, &in)
	defer free()
	switch {
	case err != nil:
		return nil, err
	case !in.Value.present:
		return nil, fault.Invalid("value", "is required: want a string")
	case len(in.Value.value) > MaxValue:
		return nil, rpctypes.ErrGRPCRequestTooLarge
	}
	to, err := s.destination(r, false)
	if err != nil {
		return nil, err
	}
	if !to.local {
		return s.forwardTo(r, to, body, keyTimeout, false)
	}
	ctx, cancel := context.WithTimeout(r.Context(), keyTimeout)
	defer cancel()
	if _, err := s.opts.Keys.Put(ctx, &pb.PutRequest{Key: []byte(key), Value: []byte(in.Value.value)}); err != nil {
		return nil, err
	}
	return newWriteResponse(key), nil
}

func (s *Server) delete(r request) (any, error) {
	key, err := r.key()
	if err != nil {
		return nil, err
	}
	to, err := s.destination(r, false)
	if err != nil {
		return nil, err
	}
	if !to.local {
		return s.forwardTo(r, to, nil, keyTimeout, false)
	}
	ctx, cancel := context.WithTimeout(r.Context(), keyTimeout)
	defer cancel()
	if _, err := s.opts.Keys.DeleteRange(ctx, &pb.DeleteRangeRequest{Key: []byte(key)}); err != nil {
		return nil, err
	}
	return newWriteResponse(key), nil
}
