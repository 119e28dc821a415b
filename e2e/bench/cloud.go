package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	identityv1 "github.com/trivet-cloud/trivet/protos/identity/v1"

	"github.com/trivet-cloud/trivet/e2e/bench/figure"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	// banner is the text that the small guest prints when it is ready.
	banner = "TRIVET GUEST READY"
	// bootWithin bounds the boot of one guest, and burstWithin that of twenty at once, on a busy host.
	bootWithin, burstWithin = time.Minute, 4 * time.Minute
	// lookEvery is the interval at which a serial log is polled: the resolution of the measurement, the same for all.
	lookEvery = 2 * time.Millisecond
	org       = "default"
	password  = "correct horse battery"
)

func median(d []time.Duration) time.Duration { return figure.Median(d) }

// trivet is a control plane of three members, and an agent if one was started.
type trivet struct {
	dir   lab.Dir
	trio  *lab.Trio
	agent *lab.Agent
	// admin is the administrator's connection to member 1.
	admin *lab.GRPC
}

// newCloud starts three members beneath the run's directory.
func newCloud(ctx context.Context, b *bench, name string) (_ *trivet, err error) {
	dir := lab.Dir(filepath.Join(b.dir, name))
	c := &trivet{dir: dir, trio: lab.NewTrio(dir, b.bin)}
	c.trio.Extra = lab.Unlimited
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	if err := c.trio.Prepare(); err != nil {
		return nil, err
	}
	if err := c.trio.StartAll(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := c.trio.Ready(ctx); err != nil {
		return nil, err
	}
	token, err := c.trio.AdminToken()
	if err != nil {
		return nil, err
	}
	c.admin, err = lab.Dial(c.trio.Members[1], token)
	return c, err
}

// close stops the agent, the guests and the members.
func (c *trivet) close() error {
	var errs []error
	if c.agent != nil {
		if c.dir.Running(c.agent.Name) != 0 {
			errs = append(errs, c.dir.Stop(c.agent.Name, 12*time.Second))
		}
		// Not the context of the run, which may have ended.
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		_, err := c.agent.EndGuests(ctx)
		errs = append(errs, err)
	}
	if c.admin != nil {
		errs = append(errs, c.admin.Close())
	}
	return errors.Join(append(errs, c.trio.StopAll())...)
}

// startAgent starts an agent and waits until this host is READY.
func (c *trivet) startAgent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	token, err := c.admin.NodeToken(ctx)
	if err != nil {
		return err
	}
	c.agent = &lab.Agent{
		Dir: c.dir, Bin: c.trio.Bin, Name: "host-1", Members: c.addresses(""),
		Cgroup: "trivet-bench", UIDRange: "650000-659999", Metrics: "127.0.0.1:7444",
	}
	if err := c.agent.Start(token); err != nil {
		return err
	}
	if err := c.agent.Healthy(ctx); err != nil {
		return err
	}
	_, err = c.admin.AwaitNode(ctx, c.agent.Name)
	return err
}

// addresses returns the members' addresses in order of id, with port appended.
func (c *trivet) addresses(port string) (out []string) {
	for id := 1; id <= len(c.trio.Members); id++ {
		out = append(out, c.trio.Members[id]+port)
	}
	return out
}

// tenant creates a user with a role in a project unless they exist, and returns a REST client of a member with its
// token.
func (c *trivet) tenant(ctx context.Context, member int, project string) (*lab.REST, error) {
	binding := &identityv1.Binding{Role: "project:member", OrgId: org, ProjectId: project}
	user := "bench-" + project
	if err := c.admin.EnsureUser(ctx, user, password, binding); err != nil {
		return nil, err
	}
	rest := &lab.REST{Host: c.trio.Members[member]}
	token, err := rest.IssueToken(ctx, user, password, map[string]any{"org_id": org, "project_id": project})
	if err != nil {
		return nil, err
	}
	rest.Token = token
	return rest, nil
}

func (c *trivet) members() (pids []int) {
	for id := range c.trio.Members {
		pids = append(pids, c.dir.Running(c.trio.Name(id)))
	}
	return pids
}

// vmDir returns the directory in which the agent keeps a VM.
func (c *trivet) vmDir(id string) string { return filepath.Join(c.agent.DataDir(), "vms", id) }

func (c *trivet) serial(id string) string { return filepath.Join(c.vmDir(id), "console.log") }

// size returns the size of a file, or 0 if there is none.
func size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// awaitBanner waits until the guest's banner is in a serial log after an offset, and returns the time when it saw it.
func awaitBanner(ctx context.Context, path string, offset int64) (time.Time, error) {
	buf := make([]byte, 64<<10)
	var f *os.File
	defer func() {
		if f != nil {
			f.Close()
		}
	}()
	for {
		if f == nil {
			var err error
			if f, err = os.Open(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return time.Time{}, err
			}
		}
		if f != nil {
			if n, _ := f.ReadAt(buf, offset); bytes.Contains(buf[:n], []byte(banner)) {
				return time.Now(), nil
			}
		}
		select {
		case <-time.After(lookEvery):
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("wait for the banner in %s: %w", path, ctx.Err())
		}
	}
}
