// Package kv holds the commands about the users' keys: `trivet kv`.
//
// They are clients of etcd's API, which the control plane speaks on its gRPC port: requests are made and read by
// go.etcd.io/etcd/client/v3, over this program's own connection (package dial), so that endpoints, tokens and what is said
// of an endpoint that is gone are those of every other command. Decisions:
//
//   - Flags, the text of a transaction and JSON are etcdctl's. Tables are ours: keys and values on one line, made harmless.
//     `get --print-value-only` and `-o json` lose nothing.
//   - A key that was asked for by name and is not there ends with 1, unlike in etcdctl.
//   - A write is sent once. What became of one whose answer was lost is said to be unknown.
//   - What is read from standard input is "-"; nothing is read from there that was not asked for.
package kv

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spf13/cobra"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/trivet-cloud/trivet/cli/account"
	"github.com/trivet-cloud/trivet/cli/dial"
	"github.com/trivet-cloud/trivet/cli/session"
	"github.com/trivet-cloud/trivet/cli/show"
)

// callTimeout bounds each command that has an end.
const callTimeout = 30 * time.Second

// login is the user of the key-value store's own that a command acts as; empty for none.
type login struct{ user, passwordFile string }

// kvSession is what all commands have.
type kvSession struct {
	*session.Session
	login login
}

// Command is `trivet kv`.
func Command(s *session.Session) *cobra.Command {
	n := &kvSession{Session: s}
	c := &cobra.Command{
		Use:   "kv",
		Short: "Read and write keys of the key-value store",
		Long: `Read and write keys of the key-value store.

The control plane answers on a member's own host, or to a token of an administrator, or, once the store has users of its
own, to one of those. A snapshot takes an administrator's token, or the store's user root, on a member's own host too. Any
client of etcd works as well: point it at the control plane's gRPC port.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.PersistentFlags().StringVar(&n.login.user, "user", "", "user of the key-value store to act as")
	c.PersistentFlags().StringVar(&n.login.passwordFile, "password-file", "", "file with that user's password, - for standard input")
	_ = c.MarkPersistentFlagFilename("password-file")
	c.AddCommand(getCommand(n), putCommand(n), delCommand(n), txnCommand(n), watchCommand(n), leaseCommand(n), statusCommand(n), compactCommand(n), alarmCommand(n), snapshotCommand(n), importCommand(n))
	return c
}

// client is etcd's, over one connection.
type client struct {
	wire  *storeConn
	keys  clientv3.KV
	watch clientv3.Watcher
	lease clientv3.Lease
	maint pb.MaintenanceClient
}

// run makes the body of a command; see session.Run.
func (n *kvSession) run(limit time.Duration, body func(ctx context.Context, c *client, args []string) error) func(*cobra.Command, []string) error {
	return n.Run(limit, func(ctx context.Context, conn *dial.Conn, args []string) error {
		c, err := n.open(ctx, conn)
		if err != nil {
			return withHint(err)
		}
		return withHint(body(ctx, c, args))
	})
}

func (n *kvSession) open(ctx context.Context, conn *dial.Conn) (*client, error) {
	w := &storeConn{conn: conn}
	if n.login.user != "" {
		password, err := n.password(ctx)
		if err != nil {
			return nil, err
		}
		got, err := pb.NewAuthClient(w).Authenticate(ctx, &pb.AuthenticateRequest{Name: n.login.user, Password: string(password)})
		if err != nil {
			return nil, clientv3.ContextError(ctx, err)
		}
		w.token = account.Secret(got.GetToken())
		n.Keep(w.token)
	} else if n.login.passwordFile != "" {
		return nil, session.Usagef("--password-file is of no use without --user")
	}
	base := clientv3.NewCtxClient(ctx)
	return &client{
		wire: w, keys: clientv3.NewKVFromKVClient(pb.NewKVClient(w), base),
		watch: clientv3.NewWatchFromWatchClient(pb.NewWatchClient(w), base),
		lease: clientv3.NewLeaseFromLeaseClient(pb.NewLeaseClient(w), base, callTimeout),
		maint: pb.NewMaintenanceClient(w),
	}, nil
}

func (n *kvSession) password(ctx context.Context) (account.Secret, error) {
	if n.login.passwordFile != "" {
		p, err := account.ReadSecret(n.login.passwordFile, n.Stdin)
		n.Keep(p)
		return p, err
	}
	if n.Ask == nil {
		return "", session.Usagef("there is no terminal to ask for the password of %s: give --password-file", n.login.user)
	}
	text, err := n.Ask(ctx, "Password of "+n.login.user+": ", true)
	n.Keep(account.Secret(text))
	return account.Secret(text), err
}

// storeConn is the connection with the token of a user of the store. It serves one call at a time, as dial.Conn wants it,
// whoever of etcd's client calls.
type storeConn struct {
	conn  *dial.Conn
	token account.Secret
	// lost, when set, is told of an endpoint that cannot be reached or broke a stream off, nil when one is there again.
	lost func(error)
	mu   sync.Mutex
}

func (w *storeConn) outgoing(ctx context.Context) context.Context {
	if w.token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "token", string(w.token))
}

// Invoke makes a unary call.
func (w *storeConn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.conn.Invoke(w.outgoing(ctx), method, args, reply, opts...)
}

// NewStream opens a stream. When it ends with UNAVAILABLE the next one goes to another endpoint.
func (w *storeConn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	stream, err := w.conn.NewStream(w.outgoing(ctx), desc, method, opts...)
	w.tell(err)
	if err != nil {
		return nil, err
	}
	return &failoverStream{stream, w}, nil
}

func (w *storeConn) tell(err error) {
	if w.lost != nil {
		w.lost(err)
	}
}

type failoverStream struct {
	grpc.ClientStream
	wire *storeConn
}

// RecvMsg goes on to the next endpoint when this one is gone.
func (f *failoverStream) RecvMsg(m any) error {
	err := f.ClientStream.RecvMsg(m)
	if status.Code(err) == codes.Unavailable {
		f.wire.mu.Lock()
		defer f.wire.mu.Unlock()
		f.wire.conn.Next()
		f.wire.tell(err)
	}
	return err
}

// print prints an answer: JSON with the names that etcdctl gives it, or names, or a table.
func (n *kvSession) print(answer any, names []string, table func(io.Writer) error) error {
	switch n.Form {
	case show.JSON:
		return n.line(answer)
	case show.Name:
		for _, name := range names {
			if _, err := fmt.Fprintln(n.Stdout, show.Text(name)); err != nil {
				return err
			}
		}
		return nil
	}
	return table(n.Stdout)
}

// line prints JSON on a line. Keys and values are base64 in it, as JSON holds no bytes.
func (n *kvSession) line(answer any) error {
	text, err := json.Marshal(answer)
	if err != nil {
		return fmt.Errorf("print JSON: %w", err)
	}
	_, err = fmt.Fprintf(n.Stdout, "%s\n", text)
	return err
}
