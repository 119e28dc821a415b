package robustness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/tests/v3/robustness/model"
)

// cluster is a set of members, each of which runs in its own memberHost.
type cluster struct {
	server  Server
	dir     string
	hosts   map[int]*memberHost
	initial []int // IDs of the initial members
	joined  map[int]bool
	token   string
	client  *clientv3.Client // used by the faults; its requests are not recorded
}

// newCluster starts three members and waits until each of them serves requests. Each member runs in its own memberHost,
// whose files are beneath dir.
func newCluster(ctx context.Context, server Server, dir string) (*cluster, error) {
	c := &cluster{server: server, dir: dir, hosts: map[int]*memberHost{}, initial: []int{1, 2, 3}, joined: map[int]bool{}}
	if err := server.prepare(dir); err != nil {
		return nil, err
	}
	var err error
	if c.token, err = server.token(dir); err != nil {
		return nil, err
	}
	if c.client, err = c.dial(c.endpoints()...); err != nil {
		return nil, err
	}
	for _, id := range c.initial {
		if c.hosts[id], err = newMemberHost(dir, id); err != nil {
			return nil, errors.Join(err, c.close())
		}
		if err := c.start(id); err != nil {
			return nil, errors.Join(err, c.close())
		}
	}
	if err := c.ready(ctx); err != nil {
		return nil, errors.Join(err, c.close())
	}
	return c, nil
}

// dial connects to members as the administrator, with short keepalive timeouts.
func (c *cluster) dial(endpoints ...string) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{
		Endpoints: endpoints, Logger: zap.NewNop(), DialKeepAliveTime: 10 * time.Second, DialKeepAliveTimeout: 100 * time.Millisecond,
		DialOptions: []grpc.DialOption{grpc.WithPerRPCCredentials(bearer(c.token))},
	})
}

// bearer is a gRPC credential that adds a bearer token to every call, unless the token is empty.
type bearer string

func (b bearer) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	if b == "" {
		return nil, nil
	}
	return map[string]string{"authorization": "Bearer " + string(b)}, nil
}

func (bearer) RequireTransportSecurity() bool { return false }

// close removes all hosts, whatever their state.
func (c *cluster) close() error {
	var errs []error
	if c.client != nil {
		c.client.Close()
	}
	errs = append(errs, restoreLinks())
	for _, h := range c.hosts {
		if h != nil {
			errs = append(errs, h.remove())
		}
	}
	return errors.Join(errs...)
}

func (c *cluster) endpoints() []string {
	var out []string
	for _, id := range c.initial {
		out = append(out, c.server.endpoint(id))
	}
	return out
}

func (c *cluster) start(id int) error {
	return c.hosts[id].start(c.server.command(c.hosts[id].dir, id, c.initial, c.joined[id]))
}

// ready waits until every member serves a linearizable read.
func (c *cluster) ready(ctx context.Context) error {
	for _, id := range c.initial {
		if err := c.readyOne(ctx, id); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) readyOne(ctx context.Context, id int) error {
	client, err := c.dial(c.server.endpoint(id))
	if err != nil {
		return err
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return retryUntil(ctx, fmt.Sprintf("member %d serves", id), func(ctx context.Context) error {
		if !c.hosts[id].running() {
			return fmt.Errorf("its process has exited: %s", tail(c.hosts[id].log))
		}
		_, err := client.Get(ctx, "ready")
		return err
	})
}

// leader returns the ID of the member that reports itself as the leader. If several members do so, it returns the one
// with the highest term. If no member does so, it returns the first member.
func (c *cluster) leader(ctx context.Context) int {
	best, term := c.initial[0], uint64(0)
	for _, id := range c.initial {
		ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
		s, err := c.client.Status(ctx, c.server.endpoint(id))
		cancel()
		if err == nil && s.Leader == s.Header.MemberId && s.RaftTerm > term {
			best, term = id, s.RaftTerm
		}
	}
	return best
}

// others returns the IDs of the initial members without the given ID.
func (c *cluster) others(id int) []int {
	return slices.DeleteFunc(slices.Clone(c.initial), func(m int) bool { return m == id })
}

// stop stops all members with SIGTERM. The returned error names the members that did not stop in time.
func (c *cluster) stop() error {
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(c.hosts)) {
		errs = append(errs, c.hosts[id].stop())
	}
	return errors.Join(errs...)
}

// sameHash returns an error if the members have different hashes at the last revision, or if Trivet has an alarm.
// Trivet's members also compare their hashes while they run, and raise an alarm if these differ.
func (c *cluster) sameHash(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	last, err := c.client.Get(ctx, "ready")
	if err != nil {
		return fmt.Errorf("read the last revision: %w", err)
	}
	if _, ok := c.server.(Trivet); ok { // etcd writes AlarmList to its log, and the suite panics on that entry
		alarms, err := c.client.AlarmList(ctx)
		if err != nil {
			return fmt.Errorf("list alarms: %w", err)
		}
		if len(alarms.Alarms) > 0 {
			return fmt.Errorf("alarms were raised: %v", alarms.Alarms)
		}
	}
	var first *clientv3.HashKVResponse
	for _, id := range c.initial {
		err := retryUntil(ctx, fmt.Sprintf("member %d has the hash of revision %d", id, last.Header.Revision), func(ctx context.Context) error {
			h, err := c.client.HashKV(ctx, c.server.endpoint(id), last.Header.Revision)
			if err != nil {
				return err
			}
			if first == nil {
				first = h
			}
			if h.CompactRevision == first.CompactRevision && h.Hash != first.Hash {
				return fmt.Errorf("hash %x, another member has %x", h.Hash, first.Hash)
			}
			if h.CompactRevision != first.CompactRevision {
				return fmt.Errorf("compacted at %d, another member at %d", h.CompactRevision, first.CompactRevision)
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// persisted returns the committed requests in the directories of the members, which must have stopped.
func (c *cluster) persisted(log *zap.Logger) ([]model.EtcdRequest, error) {
	var dirs []string
	for _, id := range c.initial {
		dirs = append(dirs, c.hosts[id].dir)
	}
	return c.server.persisted(log, dirs)
}

// tail returns the last 3000 bytes of a file.
func tail(path string) string {
	text, err := os.ReadFile(filepath.Clean(path))
	if err != nil {
		return err.Error()
	}
	return string(text[max(0, len(text)-3000):])
}
