// Package subject runs what is measured: three servers of ours or of etcd, on 127.0.0.1 to .3, with the same durability
// and both with mutual TLS between members. To a client they differ by the port only.
//
// It must not know what is measured. Both kinds write beneath one directory, which whoever asked for them removes.
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

// Members of every trio.
const Members = 3

// quota of the key space, in bytes, for both: above everything that is loaded here.
const quota = 16 << 30

// stopWithin is how long a server may take to stop when asked.
const stopWithin = time.Minute

// Trio is three servers of one kind.
type Trio struct {
	dir  lab.Dir
	port int
	name func(id int) string
	run  func(id int) error
}

// Dir is where everything of it lies.
func (t *Trio) Dir() string { return string(t.dir) }

// DataDir is where a member keeps everything.
func (t *Trio) DataDir(id int) string { return t.dir.Path(t.name(id)) }

// LogFile is where a member's output goes.
func (t *Trio) LogFile(id int) string { return t.dir.LogFile(t.name(id)) }

func host(id int) string { return fmt.Sprintf("127.0.0.%d", id) }

// Endpoint is where a member serves clients, without TLS.
func (t *Trio) Endpoint(id int) string { return fmt.Sprintf("%s:%d", host(id), t.port) }

// Endpoints are those of all members, in turn from the first that is named.
func (t *Trio) Endpoints(first int) (all []string) {
	for i := range Members {
		all = append(all, t.Endpoint((first-1+i)%Members+1))
	}
	return all
}

// PIDs of the members; one that has stopped is an error with the end of its output.
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

// tail is the end of a member's output.
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

// Await waits until every member answers a linearizable read.
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

// Leader is the member that leads, as it says itself.
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

// Stop ends all members politely, all at the same time, so that none waits for another.
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

// Kill ends all members that run, at once: for data that nobody needs any more.
func (t *Trio) Kill() error {
	var errs []error
	for id := 1; id <= Members; id++ {
		if t.dir.Running(t.name(id)) != 0 {
			errs = append(errs, t.dir.Kill(t.name(id)))
		}
	}
	return errors.Join(errs...)
}

// Dial makes a client that tries again at once when a connection fails, so that what is waited for is the server.
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
