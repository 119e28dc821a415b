package transport

import (
	"context"
	"crypto/tls"
	"fmt"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/shared/mtls"
)

// direct is a command that runs on the member that receives it, whether or not that member is the leader.
type direct struct {
	run func(ctx context.Context, from uint64, body []byte) ([]byte, error)
	// If open is true, callers may be unknown to this member, if they have a member certificate of the cluster.
	open bool
}

// HandleDirect registers a command that other members call with Direct. This member then runs the function f; the
// parameter from of f is the calling member's ID. Call HandleDirect before serving.
func (m *Transport) HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error)) {
	m.direct[name] = direct{run: f}
}

// HandleNonMember registers a command that any holder of a member certificate of the cluster may call, even if this
// member does not know it. This member then runs the function f. The parameter from of f is the member ID in the
// certificate, 0 for a member that has no ID yet. Call HandleNonMember before serving.
func (m *Transport) HandleNonMember(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error)) {
	m.direct[name] = direct{run: f, open: true}
}

// Direct runs a command on another member, which has registered it with HandleDirect, and returns the response. It
// returns the same errors as leader.Caller.
func (m *Transport) Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error) {
	return m.Call(ctx, member, command, body, nil)
}

// Ask runs a command on the member at an address (host:port), which has registered it with HandleNonMember. The server
// there may be any member of the cluster.
func (m *Transport) Ask(ctx context.Context, address, command string, body []byte) ([]byte, error) {
	conn, err := m.dial(address, mtls.OnlyKind(mtls.Member))
	if err != nil {
		return nil, fmt.Errorf("prepare connection to %s: %w", address, err)
	}
	defer conn.Close()
	answer, err := peerv1.NewPeerServiceClient(conn).Call(ctx, &peerv1.CallRequest{Command: command, Body: body})
	if err != nil {
		return nil, unknown(ctx, fmt.Errorf("ask %s of %s: %w", command, address, err))
	}
	if err := decodeError(answer.GetNotLeader(), answer.GetFault(), answer.GetInternal()); err != nil {
		return nil, err
	}
	return answer.GetBody(), nil
}

// Verify checks that the server at the address (host:port) presents the certificate of the given member, and returns an
// error if not. It closes the connection after the TLS handshake, in which the server proves that it has the
// certificate's key.
func (m *Transport) Verify(ctx context.Context, address string, member uint64) error {
	config := mtls.Client(m.opts.Certificate, m.opts.Authority.Certificate(), func(other mtls.ID) error { return isMember(other, member) })
	config.Time, config.NextProtos = m.opts.Now, []string{"h2"}
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// serveDirect runs a command that HandleDirect or HandleNonMember registered. The result ours is false if no such
// command has the name in r.
func (m *Transport) serveDirect(ctx context.Context, r *peerv1.CallRequest) (answer *peerv1.CallResponse, ours bool, err error) {
	d, ours := m.direct[r.GetCommand()]
	if !ours {
		return nil, false, nil
	}
	from, err := certified(ctx)
	if err == nil && !d.open {
		from, err = m.sender(ctx)
	}
	if err != nil {
		return nil, true, err
	}
	body, err := d.run(ctx, from, r.GetBody())
	if err != nil && ctx.Err() != nil {
		return nil, true, ctx.Err()
	}
	notLeader, encoded, internal := encodeError(err)
	return &peerv1.CallResponse{Body: body, NotLeader: notLeader, Fault: encoded, Internal: internal}, true, nil
}
