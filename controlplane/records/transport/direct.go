package transport

import (
	"context"
	"crypto/tls"
	"fmt"

	peerv1 "github.com/trivet-cloud/trivet/protos/peer/v1"

	"github.com/trivet-cloud/trivet/shared/mtls"
)

// direct is a command for a certain member, whoever leads.
type direct struct {
	run func(ctx context.Context, from uint64, body []byte) ([]byte, error)
	// open is for members that are not known here, too.
	open bool
}

// HandleDirect adds a command that other members call on this one. Call it before serving.
func (m *Mesh) HandleDirect(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error)) {
	m.direct[name] = direct{run: f}
}

// HandleStranger is HandleDirect for who holds the cluster key and is not known here: from is what its certificate says,
// 0 for one that has no id yet.
func (m *Mesh) HandleStranger(name string, f func(ctx context.Context, from uint64, body []byte) ([]byte, error)) {
	m.direct[name] = direct{run: f, open: true}
}

// Direct calls a command on a member. Errors are as those of leader.Caller.
func (m *Mesh) Direct(ctx context.Context, member uint64, command string, body []byte) ([]byte, error) {
	return m.Call(ctx, member, command, body, nil)
}

// Ask calls a command that is for strangers on whichever member serves the address (host:port).
func (m *Mesh) Ask(ctx context.Context, address, command string, body []byte) ([]byte, error) {
	conn, err := m.dial(address, mtls.OnlyKind(mtls.Member))
	if err != nil {
		return nil, fmt.Errorf("prepare connection to %s: %w", address, err)
	}
	defer conn.Close()
	answer, err := peerv1.NewPeerServiceClient(conn).Call(ctx, &peerv1.CallRequest{Command: command, Body: body})
	if err != nil {
		return nil, unknown(ctx, fmt.Errorf("ask %s of %s: %w", command, address, err))
	}
	if err := outcome(answer.GetNotLeader(), answer.GetFault(), answer.GetInternal()); err != nil {
		return nil, err
	}
	return answer.GetBody(), nil
}

// Verify fails unless the member answers at the address (host:port) with its own certificate. It closes the connection
// after the TLS handshake, which verifies the certificate and its key.
func (m *Mesh) Verify(ctx context.Context, address string, member uint64) error {
	config := mtls.Client(m.opts.Certificate, m.opts.Authority.Certificate(), func(other mtls.ID) error { return isMember(other, member) })
	config.Time, config.NextProtos = m.opts.Now, []string{"h2"}
	conn, err := (&tls.Dialer{Config: config}).DialContext(ctx, "tcp", address)
	if err != nil {
		return err
	}
	return conn.Close()
}

// serveDirect runs a command of this member's own, if it is one.
func (m *Mesh) serveDirect(ctx context.Context, r *peerv1.CallRequest) (answer *peerv1.CallResponse, ours bool, err error) {
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
	notLeader, encoded, internal := said(err)
	return &peerv1.CallResponse{Body: body, NotLeader: notLeader, Fault: encoded, Internal: internal}, true, nil
}
