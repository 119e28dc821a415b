// Command up runs a complete cloud on this host, with all files beneath one directory: three control-plane members, one
// node agent, the small guest image, a user, and a VM that has booted. It saves the logins of the user and of the
// operator for the command line. If parts of the cloud exist, it starts or
// creates only those that are missing, and restarts programs that were rebuilt. Guests continue to run meanwhile.
//
//	up [FLAG...] DIR BIN GUEST    start or repair the cloud in DIR
//	up -down [FLAG...] DIR        end its guests and processes
//
// BIN is the directory of the programs, GUEST that of the small guest's files. Several clouds on one host need
// different directories, cgroups and uid ranges, and each its own network namespace, because addresses and ports are
// fixed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/trivet-cloud/trivet/e2e/demo"
	"github.com/trivet-cloud/trivet/e2e/lab"
)

func main() {
	down := flag.Bool("down", false, "end guests and processes")
	c := &cloud{began: time.Now()}
	flag.StringVar(&c.cgroup, "cgroup", "trivet-up", "name of the guests' cgroup tree")
	flag.StringVar(&c.uids, "uid-range", "600000-629999", "uids for guests")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	if err := run(ctx, c, *down, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "up:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, c *cloud, down bool, args []string) error {
	if os.Geteuid() != 0 {
		return errors.New("run me as root: the node agent makes control groups and users of their own for guests")
	}
	want := 3
	if down {
		want = 1
	}
	if len(args) != want {
		return errors.New("usage: up [FLAG...] DIR BIN GUEST | up -down [FLAG...] DIR")
	}
	dir, err := filepath.Abs(args[0])
	if err != nil {
		return err
	}
	c.dir = lab.Dir(dir)
	if down {
		return c.down(ctx)
	}
	bin, err := filepath.Abs(args[1])
	if err != nil {
		return err
	}
	return c.up(ctx, lab.In(bin), args[2])
}

type cloud struct {
	dir lab.Dir
	// cgroup and uids are the name of the guests' cgroup tree and the guests' range of uids.
	cgroup, uids string
	began        time.Time
	trio         *lab.Trio
	agent        *lab.Agent
}

func (c *cloud) say(format string, args ...any) {
	fmt.Printf("%5.1fs  %s\n", time.Since(c.began).Seconds(), fmt.Sprintf(format, args...))
}

func (c *cloud) describe(bin lab.Binaries) {
	c.trio = lab.NewTrio(c.dir, bin)
	c.agent = &lab.Agent{
		Dir: c.dir, Bin: bin, Name: "nodeagent", Members: []string{"127.0.0.1", "127.0.0.2", "127.0.0.3"}, Cgroup: c.cgroup,
		UIDRange: c.uids, Metrics: "127.0.0.1:7444", External: external,
	}
}

// up starts and creates those parts of the cloud that are missing, and waits until the VM has booted.
func (c *cloud) up(ctx context.Context, bin lab.Binaries, guest string) error {
	c.describe(bin)
	if err := c.startTrio(ctx); err != nil {
		return err
	}
	admin, err := demo.KeepAdmin(ctx, c.trio)
	if err != nil {
		return err
	}
	g, err := lab.Dial(c.trio.Members[1], admin)
	if err != nil {
		return err
	}
	defer g.Close()
	if err := c.startAgent(ctx, g); err != nil {
		return err
	}
	images, err := lab.ImportGuest(ctx, c.trio, g, guest)
	if err != nil {
		return err
	}
	c.say("image small is AVAILABLE (%s)", images.Disk)
	token, made, err := demo.EnsureUser(ctx, c.dir, g, c.trio.Members[1])
	if err != nil {
		return err
	}
	if made {
		c.say("user %s is project:member of default", demo.User)
	}
	vm, boots, err := c.boot(ctx, g, token, images.Disk)
	if err != nil {
		return err
	}
	said, err := g.Console(ctx, vm.ID, banner, boots)
	if err != nil {
		return err
	}
	c.say("VM %s says: %s", vm.Name, said)
	address, err := c.publish(ctx, g, token, vm)
	if err != nil {
		return err
	}
	if address != "" {
		c.say("VM %s serves http://%s", vm.Name, address)
	}
	saved, err := c.contexts(admin, token)
	if err != nil {
		return err
	}
	return c.farewell(ctx, saved, vm, address)
}

func (c *cloud) startTrio(ctx context.Context) error {
	if err := c.trio.Prepare(); err != nil {
		return err
	}
	for id := range len(c.trio.Members) {
		name := c.trio.Name(id + 1)
		pid := c.dir.Running(name)
		if pid != 0 && lab.Stale(pid, c.trio.Bin.ControlPlane) {
			c.say("member %d was rebuilt: restarting it", id+1)
			if err := c.dir.Stop(name, 12*time.Second); err != nil {
				return err
			}
			pid = 0
		}
		if pid == 0 {
			if err := c.trio.Start(id + 1); err != nil {
				return err
			}
			// Wait before the next member is restarted, so that a quorum always runs.
			if err := c.settle(ctx); err != nil {
				return err
			}
		}
	}
	if err := c.trio.Ready(ctx); err != nil {
		return err
	}
	c.say("three members agree: 127.0.0.1, 127.0.0.2, 127.0.0.3")
	return nil
}

// settle waits until all members are ready. It returns at once if a member does not run, because a new cluster of which
// only one member runs has no leader.
func (c *cloud) settle(ctx context.Context) error {
	for id := range c.trio.Members {
		if c.dir.Running(c.trio.Name(id)) == 0 {
			return nil
		}
	}
	return c.trio.Ready(ctx)
}

func (c *cloud) startAgent(ctx context.Context, g *lab.GRPC) error {
	if err := connectExternal(); err != nil {
		return err
	}
	pid := c.dir.Running(c.agent.Name)
	if pid != 0 && lab.Stale(pid, c.agent.Bin.NodeAgent) {
		c.say("the node agent was rebuilt: restarting it; guests live on")
		if err := c.dir.Stop(c.agent.Name, 12*time.Second); err != nil {
			return err
		}
		pid = 0
	}
	if pid == 0 {
		var token string
		if !c.agent.Joined() {
			if err := lab.Until(ctx, "a join token is made", func(ctx context.Context) (err error) {
				token, err = g.NodeToken(ctx)
				return err
			}); err != nil {
				return err
			}
		}
		if err := c.agent.Start(token); err != nil {
			return err
		}
	}
	if err := c.agent.Healthy(ctx); err != nil {
		return err
	}
	n, err := g.AwaitNode(ctx, c.agent.Name)
	if err != nil {
		return err
	}
	c.say("host %s is READY: %d vCPUs, %d MiB, accelerator %s", n.GetName(), n.GetAllocatable().GetVcpus(), n.GetAllocatable().GetMemoryMib(),
		n.GetLabels()["trivet/accel"])
	return nil
}

// callLimit is the maximum time of one request to the VM's web server.
const callLimit = 2 * time.Second

const (
	vmName = "hello"
	banner = "TRIVET GUEST READY"
)

// boot creates the VM and starts it, through REST with the user's token. It does only what is still needed. It returns
// the VM and the number of banners that its console log must contain when the VM has booted.
func (c *cloud) boot(ctx context.Context, g *lab.GRPC, token, image string) (*lab.VM, int, error) {
	rest := &lab.REST{Host: c.trio.Members[2], Token: token}
	var list struct{ VMs []lab.VM }
	if err := rest.Call(ctx, "GET", "/api/v1/vms", nil, &list); err != nil {
		return nil, 0, err
	}
	var vm *lab.VM
	for i := range list.VMs {
		if list.VMs[i].Name == vmName {
			vm = &list.VMs[i]
		}
	}
	if vm == nil {
		vm = &lab.VM{}
		body := map[string]any{"name": vmName, "vcpus": 1, "memory_mib": 256, "disks": []any{
			map[string]any{"id": "root", "source": map[string]any{"type": "image", "image_id": image}, "size_gib": 1},
		}, "network": []any{map[string]any{}}}
		if err := rest.Call(ctx, "POST", "/api/v1/vms", body, vm, "Idempotency-Key", "make-up"); err != nil {
			return nil, 0, err
		}
		c.say("VM %s is created (%s)", vm.Name, vm.ID)
	}
	if vm.State == "Running" {
		// After `make down`, the API reports the VM as running until the node agent has reported that it ended. Wait
		// until the API reports another state or the VM's process exists.
		if err := lab.Until(ctx, "VM "+vmName+" is as recorded", func(ctx context.Context) error {
			if err := rest.Call(ctx, "GET", "/api/v1/vms/"+vm.ID, nil, vm); err != nil || vm.State != "Running" {
				return err
			}
			return g.Alive(ctx, vm.ID)
		}); err != nil {
			return nil, 0, err
		}
	}
	boots := 1
	if vm.State != "Running" {
		// An error means that the VM never ran and so has no console log.
		if log, err := g.ReadConsole(ctx, vm.ID); err == nil {
			boots += strings.Count(log, banner)
		}
		if err := rest.Call(ctx, "POST", "/api/v1/vms/"+vm.ID+"/start", nil, nil); err != nil {
			return nil, 0, err
		}
		c.say("VM %s is started", vm.Name)
	}
	return vm, boots, nil
}

// down stops the node agent, kills the guests, stops the members, and removes the saved logins.
func (c *cloud) down(ctx context.Context) error {
	c.describe(lab.Binaries{})
	var errs []error
	if c.dir.Running(c.agent.Name) != 0 {
		errs = append(errs, c.dir.Stop(c.agent.Name, 12*time.Second))
	}
	n, err := c.agent.EndGuests(ctx)
	errs = append(errs, err, c.agent.RemoveNetworks(), disconnectExternal(), c.trio.StopAll())
	if saved, err := c.contexts("", ""); err == nil && saved != nil {
		errs = append(errs, saved.Remove(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	c.say("ended the node agent, the control plane and the guests (%d)", n)
	return nil
}
