// Package kv holds the commands for the key-value store: `trivet kv`.
//
// The store serves etcd's API on the control plane's gRPC port. The commands use etcd's client,
// go.etcd.io/etcd/client/v3, over the connection of package dial, so that endpoints, tokens and failover work as in all
// other commands. Decisions:
//
//   - Flags, the syntax of transactions and JSON output are those of etcdctl. Tables are different: a key and its value
//     are on one line and escaped. `get --print-value-only` and `-o json` print the exact bytes.
//   - `del` has the aliases `delete` and `rm`, and `list` lists keys, as in the other commands of `trivet`.
//   - The exit code of `get KEY` is 3 (not found) if the key does not exist, unlike etcdctl's.
//   - A write is sent once. If its response is lost, the error says that the write may have been executed.
//   - Standard input is read only for an argument "-", and by txn.
package kv

import (
	"context"
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

// callTimeout is the deadline of each command that does not stream, unless --timeout is given.
const callTimeout = 30 * time.Second

// login holds the flags for a user of the store's own authentication (etcd's Auth), which is separate from the cloud's
// users. The field user is empty if the flag is not given.
type login struct{ user, passwordFile string }

// kvSession is a session with the additional flags that all commands of `trivet kv` share.
type kvSession struct {
	*session.Session
	login login
}

// Command returns the command `trivet kv`.
func Command(s *session.Session) *cobra.Command {
	n := &kvSession{Session: s}
	c := &cobra.Command{
		Use:   "kv",
		Short: "Read and write keys of the key-value store",
		Long: `Read and write keys of the key-value store.

The store accepts callers on a member's own host, tokens with the role system:admin and, once etcd's Auth is
enabled, the store's own users. A snapshot requires a token with the role system:admin or the store's user root,
even on a member's own host. Clients of etcd work too: use the control plane's gRPC port as the endpoint.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	c.PersistentFlags().StringVar(&n.login.user, "user", "", "user of the key-value store's own authentication")
	c.PersistentFlags().StringVar(&n.login.passwordFile, "password-file", "", "file with the password of --user, - for standard input (default: ask)")
	_ = c.MarkPersistentFlagFilename("password-file")
	c.AddCommand(getCommand(n), listCommand(n), putCommand(n), delCommand(n), txnCommand(n), watchCommand(n), leaseCommand(n), statusCommand(n), compactCommand(n), alarmCommand(n), snapshotCommand(n), importCommand(n))
	return c
}

// client holds clients for the services of etcd's API. They share one connection.
type client struct {
	wire  *storeConn
	keys  clientv3.KV
	watch clientv3.Watcher
	lease clientv3.Lease
	maint pb.MaintenanceClient
}

// run returns a function for cobra's RunE that connects to the store and calls body with a client. limit is the
// deadline, unless --timeout is given. run adds hints to errors.
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
		return nil, session.Usagef("--password-file requires --user")
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
		return "", session.Usagef("cannot ask for the password of %s without a terminal: give --password-file", n.login.user)
	}
	text, err := n.Ask(ctx, "Password of "+n.login.user+": ", true)
	n.Keep(account.Secret(text))
	return account.Secret(text), err
}

// storeConn is the connection that etcd's clients use. It adds the token of a user of the store to each call, and makes
// one call at a time, because a dial.Conn must not be used concurrently.
type storeConn struct {
	conn  *dial.Conn
	token account.Secret
	// lost, if not nil, is called with the error when a stream cannot be opened or ends with UNAVAILABLE. It is called
	// with nil when a stream has been opened.
	lost func(error)
	mu   sync.Mutex
}

func (w *storeConn) outgoing(ctx context.Context) context.Context {
	if w.token == "" {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, "token", string(w.token))
}

// Invoke makes a unary call, as dial.Conn does.
func (w *storeConn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.conn.Invoke(w.outgoing(ctx), method, args, reply, opts...)
}

// NewStream opens a stream. If that stream ends with UNAVAILABLE, the next call goes to another endpoint.
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

// RecvMsg receives a message. If the stream ends with UNAVAILABLE, RecvMsg makes the next call go to another endpoint.
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

// print prints a response in the format of --output: as a document with the field names of etcdctl, on one line if it is
// JSON, or the names one per line, or the table that the function table writes. Keys and values are in base64 in a
// document.
func (n *kvSession) print(answer any, names []string, table func(io.Writer) error) error {
	return n.printWith(n.PrintValue, answer, names, table)
}

// printEvent is like print, for one of the responses of a stream.
func (n *kvSession) printEvent(answer any, names []string, table func(io.Writer) error) error {
	return n.printWith(n.PrintItem, answer, names, table)
}

func (n *kvSession) printWith(
	print func(any, []string, func(io.Writer) error) error, answer any, names []string, table func(io.Writer) error,
) error {
	if n.Form == show.JSON {
		print = n.PrintItem // on one line, as in etcdctl
	}
	doc, err := show.Value(answer)
	if err != nil {
		return err
	}
	return print(doc, names, table)
}
