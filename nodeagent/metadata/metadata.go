// Package metadata serves each guest the data about itself that stock cloud images ask for at boot: its ID, host name,
// SSH keys, network configuration and user data.
//
// A [Server] has HTTP listeners in the network namespaces of VPCs, on 169.254.169.254 port 80, and on fd00:ec2::254
// port 80 in VPCs with IPv6. It offers two trees of paths: that of Amazon's EC2 (/latest/meta-data/, /latest/user-data
// and /latest/dynamic/, with session tokens), and the files of cloud-init's NoCloud data source (/nocloud/meta-data,
// user-data, vendor-data and network-config). An image with cloud-init uses NoCloud if the machine's SMBIOS serial
// number is "ds=nocloud-net;s=http://169.254.169.254/nocloud/", and EC2 if it recognizes the machine as one of EC2.
//
// # Decisions
//
//   - A guest is identified by the VPC of the listener and the source address of its connection. Two VPCs may use the
//     same addresses. The firewall must prevent that a port sends from the address of another port; this package relies
//     on it.
//   - A connection belongs to the port that had the address when the connection was accepted. If another port gets the
//     address, requests on old connections are refused.
//   - A request from an address without a port gets the response for an unknown path, whatever it asks for.
//   - Packets of the listeners have an IP TTL (hop limit) of 1. They reach guests, which are next to the namespace, but
//     no client to which a guest forwards packets, such as a container with its own network or a client of a
//     misconfigured proxy. EC2 does the same for tokens.
//   - Requests with the header X-Forwarded-For are refused, because a proxy in the guest sent them for a client that
//     may be outside of the guest.
//   - Session tokens follow EC2's IMDSv2. A token is the HMAC of the port and an expiry time, so that tokens need no
//     memory, and remain valid after a restart with the same key. [Instance.TokensRequired] decides whether requests
//     without a token are permitted. Package vpc requires tokens unless the VM's metadata key [cloud.MetadataTokens] is
//     "optional". Where tokens are required, they are also required for the NoCloud files, which contain the same
//     secrets. cloud-init's NoCloud cannot send tokens, so such guests need EC2's tree, or the seed disk of package
//     cloudinit.
//   - All versions of EC2's tree have the same content, because later versions of EC2 only added paths. Only Amazon's
//     versions exist; other dates are unknown paths.
//   - EC2's identity document (dynamic/instance-identity/document) exists without signatures. cloud-init waits ten
//     seconds for the document if it does not exist (measured with 22.4), and Amazon's SDKs read the region from it.
//
// # One request
//
// [Server.Set] adds the addresses to the namespace's loopback interface and opens the listeners (namespace.go). A
// listener looks up the port of a new connection and closes the connection if the port has too many (limits.go).
// handler.ServeHTTP checks the rate, the port, the headers and the token (handler.go, token.go), and looks up the path
// in the tree that ec2Tree builds from the Instance (tree.go).
//
// The package does not know where instances come from: [Options.Lookup] returns them. It makes no namespaces, bridges
// or firewall rules.
package metadata

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/shared/cloud"
)

// Address and Address6 are the addresses of the listeners. Address6 is that of EC2.
var (
	Address  = netip.MustParseAddr("169.254.169.254")
	Address6 = netip.MustParseAddr("fd00:ec2::254")
)

const httpPort = 80

// minKey is the minimum length of Options.TokenKey in bytes.
const minKey = 32

// Options are the parameters of a Server.
type Options struct {
	// Lookup returns the instance of the port that has an address in a VPC. It is called for each connection and each
	// request, from several goroutines, and must not block. The Server does not modify the Instance, and the caller
	// must not modify it after Lookup has returned it. Required.
	Lookup func(vpc cloud.VPCID, source netip.Addr) (*Instance, bool)
	// TokenKey is the secret that authenticates session tokens, of 32 bytes or more. A Server does not accept tokens of
	// another key; clients then ask for new ones. Required.
	TokenKey []byte
	// Log gets errors of the listeners. Required.
	Log *slog.Logger
	// Limits restricts what guests can use. Fields that are zero have the values of DefaultLimits.
	Limits Limits
	// Now is the clock by which tokens expire. Optional.
	Now func() time.Time
}

// VPC is the wanted state of a VPC's listeners.
type VPC struct {
	ID cloud.VPCID
	// Namespace is the name of the VPC's network namespace in /run/netns.
	Namespace string
	// IPv6 is true if a subnet of the VPC has an IPv6 prefix.
	IPv6 bool
}

// Server serves the guests of all VPCs on a host. Its methods may be called concurrently.
type Server struct {
	options Options
	gate    *gate

	mu        sync.Mutex
	listeners map[listenerKey]*listener
	closed    bool
}

type listenerKey struct {
	vpc     cloud.VPCID
	address netip.Addr
}

// New returns a Server without listeners.
func New(o Options) (*Server, error) {
	if o.Lookup == nil || o.Log == nil || len(o.TokenKey) < minKey {
		return nil, fmt.Errorf("metadata server: Lookup, Log and a TokenKey of %d bytes or more are required", minKey)
	}
	o.Limits = o.Limits.withDefaults()
	if o.Now == nil {
		o.Now = time.Now
	}
	g, err := newGate(o.Limits)
	if err != nil {
		return nil, fmt.Errorf("metadata server: %w", err)
	}
	return &Server{options: o, gate: g, listeners: map[listenerKey]*listener{}}, nil
}

// Set brings the listeners of a VPC into the wanted state. When it has returned nil, guests can connect. Set adds the
// addresses to the namespace's interface lo if they are missing, and removes the IPv6 address if it is not wanted. It
// changes nothing if the state is the wanted one, opens the listeners again if one ended or if the namespace was
// replaced, and keeps established connections otherwise. A missing namespace is an error.
func (s *Server) Set(ctx context.Context, v VPC) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.set(ctx, v); err != nil {
		return fmt.Errorf("serve metadata in VPC %s: %w", v.ID, err)
	}
	return nil
}

func (s *Server) set(ctx context.Context, v VPC) error {
	if s.closed {
		return errors.New("the server is closed")
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	namespace, err := netns.GetFromName(v.Namespace)
	if err != nil {
		return fmt.Errorf("open network namespace %s: %w", v.Namespace, err)
	}
	defer namespace.Close()
	wanted := map[netip.Addr]bool{Address: true, Address6: v.IPv6}
	if err := setAddresses(namespace, wanted); err != nil {
		return err
	}
	for address, want := range wanted {
		key := listenerKey{v.ID, address}
		have := s.listeners[key]
		if have != nil && (!want || have.namespace != namespace.UniqueId() || have.ended()) {
			have.close()
			delete(s.listeners, key)
			have = nil
		}
		if want && have == nil {
			l, err := s.open(ctx, v.ID, namespace, address)
			if err != nil {
				return err
			}
			s.listeners[key] = l
		}
	}
	return nil
}

// Remove closes the listeners of a VPC and all their connections, and waits until no request is being answered. It must
// be called before the VPC's namespace is deleted, because an open listener keeps a namespace alive. The addresses stay
// on the interface lo. Removing an unknown VPC changes nothing.
func (s *Server) Remove(id cloud.VPCID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(func(vpc cloud.VPCID) bool { return vpc == id })
}

// Close closes all listeners and connections as Remove does. Set returns an error after Close.
func (s *Server) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.remove(func(cloud.VPCID) bool { return true })
}

// remove closes the listeners of the selected VPCs. s.mu must be locked.
func (s *Server) remove(selected func(cloud.VPCID) bool) {
	for key, l := range s.listeners {
		if selected(key.vpc) {
			l.close()
			delete(s.listeners, key)
		}
	}
}
