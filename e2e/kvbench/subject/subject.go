// Package subject runs the servers to be measured: three of ours or of etcd, on 127.0.0.1 to .3, with the same
// durability and both with mutual TLS between members. For a client they differ only in the port.
//
// The package does not depend on what is measured. All files of the servers are beneath one directory, which the caller
// removes.
package subject

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"

	"github.com/trivet-cloud/trivet/e2e/lab"
)

// Members is the number of servers in every Trio.
const Members = 3

// quota is the quota of the key space in bytes, for both kinds: more than any measurement loads.
const quota = 16 << 30

// stopWithin is how long a server may take to stop after SIGTERM.
const stopWithin = time.Minute

// Trio is a cluster of three servers of one kind.
type Trio struct {
	dir  lab.Dir
	port int
	name func(id int) string
	run  func(id int) error
}

// Dir returns the directory of all files of the cluster.
func (t *Trio) Dir() string { return string(t.dir) }

// DataDir returns the directory of a member's data.
func (t *Trio) DataDir(id int) string { return t.dir.Path(t.name(id)) }

// LogFile returns the path of a member's output.
func (t *Trio) LogFile(id int) string { return t.dir.LogFile(t.name(id)) }

func host(id int) string { return fmt.Sprintf("127.0.0.%d", id) }

// Endpoint returns the address of a member for clients, without TLS.
func (t *Trio) Endpoint(id int) string { return fmt.Sprintf("%s:%d", host(id), t.port) }

// Endpoints returns the addresses of all members, in rotation from member first.
func (t *Trio) Endpoints(first int) (all []string) {
	for i := range Members {
		all = append(all, t.Endpoint((first-1+i)%Members+1))
	}
	return all
}

// PIDs returns the pids of the members; if a member has stopped, it returns an error with the end of its output.
func (t *Trio) PIDs() (pids []int, err error) {
	for id := 1; id <= Members; id++ {
		pid := t.dir.Running(t.name(id))
		if pid == 0 {
			return nil, fmt.Errorf("%s does not run: %s", t.name(id), t.tail(id))
		}
		pids = append(pids, pid)
	}
	return pids, nil
}

// tail returns the last 2 KiB of a member's output.
func (t *Trio) tail(id int) string {
	f, err := os.Open(t.LogFile(id))
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	const most = 2 << 10
	if size, err := f.Seek(0, io.SeekEnd); err == nil {
		_, _ = f.Seek(max(0, size-most), io.SeekStart)
	}
	text, err := io.ReadAll(io.LimitReader(f, most))
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text))
}

// Start starts all members.
func (t *Trio) Start() error {
	for id := 1; id <= Members; id++ {
		if err := t.run(id); err != nil {
			return fmt.Errorf("start member %d: %w", id, err)
		}
	}
	return nil
}

// Await waits until every member serves a linearizable read.
func (t *Trio) Await(ctx context.Context) error {
	for id := 1; id <= Members; id++ {
		c, err := Dial(t.Endpoint(id))
		if err != nil {
			return err
		}
		err = t.await(ctx, id, c)
		if err := errors.Join(err, c.Close()); err != nil {
			return err
		}
	}
	return nil
}

func (t *Trio) await(ctx context.Context, id int, c *clientv3.Client) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, 2*time.Second)
		_, err := c.Get(attempt, "k")
		cancel()
		if err == nil {
			return nil
		}
		if _, gone := t.PIDs(); gone != nil {
			return gone
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait until %s serves: %w; last: %w", t.name(id), ctx.Err(), err)
		}
	}
}

// Leader returns the member that reports itself as leader.
func (t *Trio) Leader(ctx context.Context) (int, error) {
	var last error
	for id := 1; id <= Members; id++ {
		c, err := Dial(t.Endpoint(id))
		if err != nil {
			return 0, err
		}
		asking, cancel := context.WithTimeout(ctx, 5*time.Second)
		s, err := c.Status(asking, t.Endpoint(id))
		cancel()
		if err := errors.Join(err, c.Close()); err != nil {
			last = err
			continue
		}
		if s.Leader == s.Header.MemberId {
			return id, nil
		}
	}
	return 0, errors.Join(errors.New("no member says that it leads"), last)
}

// Stop stops all members with SIGTERM, concurrently, so that none waits for another.
func (t *Trio) Stop() error {
	ended := make(chan error, Members)
	for id := 1; id <= Members; id++ {
		go func() { ended <- t.stop(id) }()
	}
	var errs []error
	for range Members {
		errs = append(errs, <-ended)
	}
	return errors.Join(errs...)
}

func (t *Trio) stop(id int) error {
	if t.dir.Running(t.name(id)) == 0 {
		return nil
	}
	return t.dir.Stop(t.name(id), stopWithin)
}

// Kill sends SIGKILL to all running members: for data that is not needed any more.
func (t *Trio) Kill() error {
	var errs []error
	for id := 1; id <= Members; id++ {
		if t.dir.Running(t.name(id)) != 0 {
			errs = append(errs, t.dir.Kill(t.name(id)))
		}
	}
	return errors.Join(errs...)
}

// Dial returns a client that reconnects at once, so that a wait measures the server and not the client's backoff.
func Dial(endpoints ...string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints: endpoints,
		Logger:    zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 5 * time.Millisecond, Multiplier: 1, MaxDelay: 5 * time.Millisecond},
			MinConnectTimeout: time.Second,
		})},
	})
}
