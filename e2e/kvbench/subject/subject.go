// Package subject runs the servers that kvbench measures: three Trivet members or three etcd servers, on 127.0.0.1 to
// .3. Both kinds give the same durability and use mutual TLS between members. For a client they differ only in the
// port.
//
// All files of the servers are beneath one directory, which the caller must remove.
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

// quota is the quota in bytes of the key space of both kinds of servers. No measurement loads that much.
const quota = 16 << 30

// stopWithin is the time that a server has to stop after SIGTERM; after that it is killed.
const stopWithin = time.Minute

// Trio is a cluster of three servers, all Trivet members or all etcd servers. Members have the ids 1 to 3.
type Trio struct {
	dir  lab.Dir
	port int
	name func(id int) string
	run  func(id int) error
}

// Dir returns the directory that holds all files of the cluster.
func (t *Trio) Dir() string { return string(t.dir) }

// DataDir returns the data directory of a member.
func (t *Trio) DataDir(id int) string { return t.dir.Path(t.name(id)) }

// LogFile returns the path of the file with a member's output.
func (t *Trio) LogFile(id int) string { return t.dir.LogFile(t.name(id)) }

func host(id int) string { return fmt.Sprintf("127.0.0.%d", id) }

// Endpoint returns the host:port at which a member accepts clients without TLS.
func (t *Trio) Endpoint(id int) string { return fmt.Sprintf("%s:%d", host(id), t.port) }

// Endpoints returns the endpoints of all members. The first endpoint is that of the member with the id first; the
// others follow in order of id, with member 1 after the last one.
func (t *Trio) Endpoints(first int) (all []string) {
	for i := range Members {
		all = append(all, t.Endpoint((first-1+i)%Members+1))
	}
	return all
}

// PIDs returns the pids of all members. If a member does not run, PIDs returns an error with the end of its output.
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

// tail returns the last 2 KiB of a member's output, or the text of the error if it cannot be read.
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

// Start starts all members and returns without waiting until they serve; see Await.
func (t *Trio) Start() error {
	for id := 1; id <= Members; id++ {
		if err := t.run(id); err != nil {
			return fmt.Errorf("start member %d: %w", id, err)
		}
	}
	return nil
}

// Await waits until every member has served a linearizable read. It returns an error if a member stops or ctx ends.
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

// Leader returns the id of the member whose Status names itself as the leader.
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

// Stop stops all running members with SIGTERM at the same time, and waits until they have ended.
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

// Kill ends all running members with SIGKILL, when their data is not needed any more.
func (t *Trio) Kill() error {
	var errs []error
	for id := 1; id <= Members; id++ {
		if t.dir.Running(t.name(id)) != 0 {
			errs = append(errs, t.dir.Kill(t.name(id)))
		}
	}
	return errors.Join(errs...)
}

// Dial returns an etcd client that tries to reconnect every 5 ms, so that a wait for a server does not include the
// client's backoff.
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
