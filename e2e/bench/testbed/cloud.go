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
	// banner is the text that the small guest prints on its serial port when it is ready.
	banner = "TRIVET GUEST READY"
	// bootWithin is the timeout for the boot of one guest. burstWithin is the timeout for a step with twenty VMs at
	// once, such as their creation and boot. Both suffice on a busy host.
	bootWithin, burstWithin = time.Minute, 4 * time.Minute
	// lookEvery is the interval at which serial logs are polled for the banner: the resolution of all boot times.
	lookEvery = 2 * time.Millisecond
	org       = "default"
	password  = "correct horse battery"
)

func median(d []time.Duration) time.Duration { return figure.Median(d) }

// trivet is a running cloud: a control plane of three members, and a node agent after startAgent.
type trivet struct {
	dir   lab.Dir
	trio  *lab.Trio
	agent *lab.Agent
	// admin calls member 1 with the administrator's token.
	admin *lab.GRPC
}

// newCloud starts three members, with their files in the directory name beneath the run's directory, and waits until
// they are ready.
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

// close stops the agent, if there is one, kills its guests, and stops the members.
func (c *trivet) close() error {
	var errs []error
	if c.agent != nil {
		if c.dir.Running(c.agent.Name) != 0 {
			errs = append(errs, c.dir.Stop(c.agent.Name, 12*time.Second))
		}
		// The context of the run may have ended: use a new one.
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

// startAgent starts a node agent and waits until the control plane reports this host as READY.
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

// addresses returns the members' addresses in order of id. It appends port, such as ":8084" or "", to each.
func (c *trivet) addresses(port string) (out []string) {
	for id := 1; id <= len(c.trio.Members); id++ {
		out = append(out, c.trio.Members[id]+port)
	}
	return out
}

// tenant returns a REST client that calls the given member with the token of a user who is a member of the project. It
// creates the project and the user if they do not exist.
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

// vmDir returns the directory that holds the agent's files of a VM.
func (c *trivet) vmDir(id string) string { return filepath.Join(c.agent.DataDir(), "vms", id) }

func (c *trivet) serial(id string) string { return filepath.Join(c.vmDir(id), "console.log") }

// size returns the size of a file in bytes, or 0 if there is no file.
func size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// awaitBanner waits until a serial log contains the guest's banner after an offset in bytes, and returns the time when
// it read the banner. The log need not exist yet.
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
