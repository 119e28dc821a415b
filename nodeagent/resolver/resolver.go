// Package resolver is the DNS resolver of the guests. A [Server] for each VPC on a host listens on the addresses of the
// VPC's gateways, answers for the names and addresses of the VPC itself, and passes other queries to the host's own
// resolvers through a [Forwarder], which all VPCs of the host share.
//
// The names of a VPC come from its wanted state ([View]); nothing is stored. View.resolve, the choice between a local
// answer and forwarding, is pure.
//
// # Decisions
//
//   - A query is answered only if its source address is in the prefixes of the VPC. Everything else is discarded before
//     it is parsed: the server is not an open resolver and sends not even errors.
//   - Names below "internal", the VPC's domain, and the reverse names of private addresses and of the VPC's prefixes
//     are never forwarded. The host's resolvers could answer from the operator's network, and would learn the tenants'
//     names.
//   - The cache belongs to the VPC. With a shared one, a tenant could find out what others look up, by the time that an
//     answer takes.
//   - A forwarded query is a new message: of the client's options only DO is passed on, and the answer's are not
//     passed back.
//   - Limits apply to the rate of queries of each client address, to TCP connections of each client and VPC, and to
//     queries that wait for an upstream of each client, VPC and host. One guest cannot use up what others need.
//   - Answers over UDP have at most 1232 bytes, which fits into every IPv6 packet (dnsflagday.net/2020). The client
//     gets longer ones over TCP.
//   - Upstream resolvers are queried from the root network namespace, in the order of the list, beginning with the one
//     that answered last. Answers SERVFAIL, REFUSED and the like count as failures.
//   - Addresses are bound before they exist (IP_FREEBIND), so that the order of the steps that set up a VPC does not
//     matter and IPv6 duplicate address detection is not waited for.
//
// The package configures no devices and does not read the host's resolv.conf.
package resolver

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/singleflight"
)

// closeTimeout is the time that Set and Close give to queries on a socket that is being closed.
const closeTimeout = 5 * time.Second

// Server is the resolver of one VPC. Its methods may be called concurrently.
type Server struct {
	namespace string
	forwarder *Forwarder
	log       *slog.Logger
	ctx       context.Context // canceled by Close; ends forwarded queries
	cancel    context.CancelFunc

	zone    atomic.Pointer[zone]
	cache   *cache
	limits  *limits
	flights singleflight.Group // forwarded queries, so that equal ones are sent once

	mu        sync.Mutex
	view      View
	inode     uint64 // of the namespace in which the listeners are
	listeners map[netip.Addr]*listener
}

// New returns a server for the VPC with the named network namespace (as in "ip netns"). It listens nowhere before Set.
func New(namespace string, f *Forwarder, log *slog.Logger) *Server {
	s := &Server{
		namespace: namespace, forwarder: f, log: log.With("namespace", namespace),
		cache: newCache(), limits: newLimits(), listeners: map[netip.Addr]*listener{},
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Set replaces the view of the VPC. The caller must not change v afterwards. When Set returns nil, queries to v.Listen
// are answered. Sockets whose address is in both views stay open, unless the namespace was made again under its name.
// After an error, Set must be called again.
func (s *Server) Set(ctx context.Context, v View) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return errors.New("serve DNS: the server is closed")
	}
	if s.zone.Load() == nil || !s.view.equal(v) {
		s.view = v
		s.zone.Store(newZone(v))
	}
	inode, err := inodeOf(s.namespace)
	if err != nil {
		return fmt.Errorf("serve DNS in %s: %w", s.namespace, err)
	}
	var unwanted []*listener
	for address, l := range s.listeners {
		if inode != s.inode || !slices.Contains(v.Listen, address) || l.ended() {
			unwanted = append(unwanted, l)
			delete(s.listeners, address)
		}
	}
	closeAll(ctx, unwanted)
	s.inode = inode
	for _, address := range v.Listen {
		if s.listeners[address] != nil {
			continue
		}
		l, err := s.listen(ctx, address)
		if err != nil {
			return fmt.Errorf("serve DNS on %s in %s: %w", address, s.namespace, err)
		}
		s.listeners[address] = l
	}
	return nil
}

// Close stops the server. Queries that are being forwarded are answered with SERVFAIL. It waits for them, for at most 5
// seconds or until ctx ends. Close must be called before the namespace is deleted, because an open socket keeps a
// namespace and its devices alive. Set returns an error after Close.
func (s *Server) Close(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cancel()
	var all []*listener
	for _, l := range s.listeners {
		all = append(all, l)
	}
	clear(s.listeners)
	closeAll(ctx, all)
}

// ServeDNS answers a query. The listeners call it for clients within the VPC only.
func (s *Server) ServeDNS(w dns.ResponseWriter, request *dns.Msg) {
	client, udp := remote(w)
	if !udp && !s.limits.admit(client) {
		w.Close() // over UDP this was checked before the query was parsed
		return
	}
	reply := s.reply(client, request)
	reply.Truncate(replySize(request, udp))
	if err := w.WriteMsg(reply); err != nil {
		s.log.Debug("answer DNS query", "client", client, "error", err)
	}
}
