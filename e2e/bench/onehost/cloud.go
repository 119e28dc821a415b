// Package onehost starts a cloud of one host for a benchmark: three members and, with StartAgent, one node agent, from
// empty directories. The main type is Cloud. A ByHand starts the same guests without Trivet: QEMU with the agent's own
// arguments.
//
// The caller runs in network and mount namespaces of its own (lab.Again), because the members use fixed addresses.
package onehost

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

	"github.com/trivet-cloud/trivet/e2e/lab"
)

const (
	// banner is the text that the small guest prints on its serial port when it is ready.
	banner = "TRIVET GUEST READY"
	// BootWithin is the timeout for the boot of one guest. It suffices on a busy host.
	BootWithin = time.Minute
	// pollInterval is the interval at which serial logs are polled for the banner: the resolution of all boot times.
	pollInterval = 2 * time.Millisecond
	// Org is the org of the tenants and of all VMs.
	Org      = "default"
	password = "correct horse battery"
)

// Cloud is a running cloud: a control plane of three members, and a node agent after StartAgent.
type Cloud struct {
	Dir   lab.Dir
	Trio  *lab.Trio
	Agent *lab.Agent
	// RBDHelper, unless "", is the path of trivet-rbd, for an agent that StartAgent starts later.
	RBDHelper string
	// Admin calls member 1 with the administrator's token.
	Admin *lab.GRPC
}

// Start starts three members with their files in the directory dir, and waits until they are ready.
func Start(ctx context.Context, dir string, bin lab.Binaries) (_ *Cloud, err error) {
	c := &Cloud{Dir: lab.Dir(dir), Trio: lab.NewTrio(lab.Dir(dir), bin)}
	c.Trio.Extra = lab.Unlimited
	defer func() {
		if err != nil {
			err = errors.Join(err, c.Close())
		}
	}()
	if err := c.Trio.Prepare(); err != nil {
		return nil, err
	}
	if err := c.Trio.StartAll(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := c.Trio.Ready(ctx); err != nil {
		return nil, err
	}
	var token string
	if err := lab.Until(ctx, "there is an administrator", func(context.Context) (err error) {
		token, err = c.Trio.AdminToken()
		return err
	}); err != nil {
		return nil, err
	}
	c.Admin, err = lab.Dial(c.Trio.Members[1], token)
	return c, err
}

// Close stops the agent, if there is one, kills its guests, and stops the members.
func (c *Cloud) Close() error {
	var errs []error
	if c.Agent != nil {
		if c.Dir.Running(c.Agent.Name) != 0 {
			errs = append(errs, c.Dir.Stop(c.Agent.Name, 12*time.Second))
		}
		// The context of the run may have ended: use a new one.
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		_, err := c.Agent.EndGuests(ctx)
		errs = append(errs, err)
	}
	if c.Admin != nil {
		errs = append(errs, c.Admin.Close())
	}
	return errors.Join(append(errs, c.Trio.StopAll())...)
}

// StartAgent starts a node agent and waits until the control plane reports this host as READY.
func (c *Cloud) StartAgent(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	token, err := c.Admin.NodeToken(ctx)
	if err != nil {
		return err
	}
	c.Agent = &lab.Agent{
		Dir: c.Dir, Bin: c.Trio.Bin, Name: "host-1", Members: c.Addresses(""),
		Cgroup: "trivet-bench", UIDRange: "650000-659999", Metrics: "127.0.0.1:7444",
		RBDHelper: c.RBDHelper,
	}
	if err := c.Agent.Start(token); err != nil {
		return err
	}
	if err := c.Agent.Healthy(ctx); err != nil {
		return err
	}
	_, err = c.Admin.AwaitNode(ctx, c.Agent.Name)
	return err
}

// Addresses returns the members' addresses in order of id. It appends port, such as ":8084" or "", to each.
func (c *Cloud) Addresses(port string) (out []string) {
	for id := 1; id <= len(c.Trio.Members); id++ {
		out = append(out, c.Trio.Members[id]+port)
	}
	return out
}

// Tenant returns a REST client that calls the given member with the token of a user who is a member of the project. It
// creates the project and the user if they do not exist.
func (c *Cloud) Tenant(ctx context.Context, member int, project string) (*lab.REST, error) {
	binding := &identityv1.Binding{Role: "project:member", OrgId: Org, ProjectId: project}
	user := "bench-" + project
	if err := c.Admin.EnsureUser(ctx, user, password, binding); err != nil {
		return nil, err
	}
	rest := &lab.REST{Host: c.Trio.Members[member]}
	token, err := rest.IssueToken(ctx, user, password, map[string]any{"org_id": Org, "project_id": project})
	if err != nil {
		return nil, err
	}
	rest.Token = token
	return rest, nil
}

// Members returns the pids of the members.
func (c *Cloud) Members() (pids []int) {
	for id := range c.Trio.Members {
		pids = append(pids, c.Dir.Running(c.Trio.Name(id)))
	}
	return pids
}

// VMDir returns the directory that holds the agent's files of a VM.
func (c *Cloud) VMDir(id string) string { return filepath.Join(c.Agent.DataDir(), "vms", id) }

// Serial returns the path of the log of a VM's serial port.
func (c *Cloud) Serial(id string) string { return filepath.Join(c.VMDir(id), "console.log") }

// Size returns the size of a file in bytes, or 0 if there is no file.
func Size(path string) int64 {
	st, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return st.Size()
}

// AwaitBanner waits until a serial log contains the guest's banner after an offset in bytes, and returns the time when
// it read the banner. The log need not exist yet.
func AwaitBanner(ctx context.Context, path string, offset int64) (time.Time, error) {
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
		case <-time.After(pollInterval):
		case <-ctx.Done():
			return time.Time{}, fmt.Errorf("wait for the banner in %s: %w", path, ctx.Err())
		}
	}
}
