// Command trivet-dev runs a small cloud for a first look until it is interrupted: one member of the control plane with
// all APIs on 127.0.0.1, a user, and, if it runs as root and QEMU is installed, a host. It needs no configuration.
//
//	trivet-dev [FLAG...]
//
// All files are in a temporary directory, or in the directory of --dir. At the end trivet-dev kills the guests, stops
// the programs that it has started and removes the temporary directory. The directory of --dir stays, and the next
// start uses it again.
//
// Decision: this is a program of its own, not a mode of trivet-controlplane. The control plane starts no programs, and
// never imports the agent, which needs root. trivet-dev starts the same programs as a real cloud has, with the code
// that `make up` and the end-to-end tests use. The command `trivet-controlplane dev` runs this program in place of itself.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/e2e/demo"
	"github.com/trivet-cloud/trivet/e2e/lab"
	"github.com/trivet-cloud/trivet/shared/version"
)

const (
	// startTime is the maximum duration of the start.
	startTime = 2 * time.Minute
	// stopTime is the maximum duration of the stop of one program.
	stopTime = 12 * time.Second
	// endTime is the maximum duration in which guests are killed.
	endTime = 30 * time.Second
)

func main() {
	c := &cloud{ended: make(chan string, 1)}
	flags, printVersion := c.flags()
	err := flags.Parse(os.Args[1:])
	if err == nil && flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	switch {
	case errors.Is(err, pflag.ErrHelp):
		return
	case err != nil:
		fmt.Fprintln(os.Stderr, "trivet-dev:", err)
		os.Exit(2)
	}
	if *printVersion {
		fmt.Println(version.Read().Line("trivet-dev"))
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, c); err != nil {
		fmt.Fprintln(os.Stderr, "trivet-dev:", err)
		os.Exit(1)
	}
}

// flags returns the flags of the program, and the value of --version.
func (c *cloud) flags() (flags *pflag.FlagSet, printVersion *bool) {
	flags = pflag.NewFlagSet("trivet-dev", pflag.ContinueOnError)
	flags.StringVar(&c.given, "dir", "", "keep all files in this `directory` (default: a temporary one, which is removed at the end)")
	flags.StringVar(&c.bin, "bin", "", "`directory` of the programs (default: that of trivet-dev, or else those in PATH)")
	flags.StringVar(&c.guest, "guest", "", "`directory` of the small guest's files, which become the image small")
	flags.BoolVar(&c.noHost, "no-host", false, "start no host, so that there are no VMs")
	flags.StringVar(&c.cgroup, "cgroup", "trivet-dev", "`name` of the guests' cgroup tree")
	flags.StringVar(&c.uids, "uid-range", "630000-639999", "`first-last` uid of guests")
	return flags, flags.Bool("version", false, "print the version of this program")
}

// cloud is the cloud that this program runs.
type cloud struct {
	// The flags of the program.
	given, bin, guest, cgroup, uids string
	noHost                          bool

	dir   lab.Dir
	trio  *lab.Trio // of one member
	agent *lab.Agent
	// host is true if the agent was started.
	host bool
	// ended receives the name of the member's process when it has ended.
	ended chan string
}

// run starts the cloud, prints how to use it, and waits until ctx ends or the member has ended by itself. It returns
// when everything has ended.
func run(ctx context.Context, c *cloud) (err error) {
	bin, err := c.programs()
	if err != nil {
		return err
	}
	remove, err := c.makeDir()
	if err != nil {
		return err
	}
	c.describe(bin)
	for _, name := range []string{c.trio.Name(1), c.agent.Name} {
		if pid := c.dir.Running(name); pid != 0 {
			return fmt.Errorf("%s of %s runs already, with pid %d", name, c.dir, pid)
		}
	}
	defer func() {
		fmt.Println("Stopping.")
		err = errors.Join(err, c.stop(), remove())
	}()
	starting, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	if err := c.start(starting); err != nil {
		if ctx.Err() != nil {
			return nil // interrupted
		}
		return err
	}
	select {
	case <-ctx.Done():
		return nil
	case name := <-c.ended:
		return fmt.Errorf("%s has ended; its log is %s", name, c.dir.LogFile(name))
	}
}

// programs returns the paths of the programs: those in --bin, or beside this program, or in PATH.
func (c *cloud) programs() (lab.Binaries, error) {
	dir := c.bin
	if dir == "" {
		if own, err := os.Executable(); err == nil {
			dir = filepath.Dir(own)
		}
	}
	bin := lab.In(dir)
	for _, program := range []*string{&bin.ControlPlane, &bin.NodeAgent, &bin.CLI} {
		if _, err := os.Stat(*program); err == nil {
			continue
		}
		name := filepath.Base(*program)
		found, err := exec.LookPath(name)
		if c.bin != "" || err != nil && program != &bin.NodeAgent {
			return bin, fmt.Errorf("%s is neither in %s nor in PATH", name, dir)
		}
		*program = found // empty if there is no agent
	}
	return bin, nil
}

// makeDir makes the directory of all files. The function remove removes a temporary one.
func (c *cloud) makeDir() (remove func() error, err error) {
	if c.given != "" {
		dir, err := filepath.Abs(c.given)
		c.dir = lab.Dir(dir)
		return func() error { return nil }, errors.Join(err, os.MkdirAll(dir, 0o755))
	}
	dir, err := os.MkdirTemp("", "trivet-dev-")
	if err != nil {
		return nil, err
	}
	c.dir = lab.Dir(dir)
	// The user of the member must be able to reach its own directory below it.
	return func() error { return os.RemoveAll(dir) }, os.Chmod(dir, 0o755)
}

func (c *cloud) describe(bin lab.Binaries) {
	c.trio = &lab.Trio{Dir: c.dir, Bin: bin, Members: map[int]string{1: "127.0.0.1"},
		Ended: func(id, _ int) { c.ended <- c.trio.Name(id) }}
	c.agent = &lab.Agent{
		Dir: c.dir, Bin: bin, Name: "devhost", Members: []string{"127.0.0.1"}, Cgroup: c.cgroup, UIDRange: c.uids, Metrics: "127.0.0.1:7444",
		// No other agent's prefix may be the beginning of this one.
		Network: map[string]any{"prefix": "trivetdev-"},
	}
}

// start starts the member, creates the user, starts the agent, and prints how to use the cloud.
func (c *cloud) start(ctx context.Context) error {
	if err := c.trio.Prepare(); err != nil {
		return err
	}
	if err := c.trio.Start(1); err != nil {
		return err
	}
	if err := c.trio.Ready(ctx); err != nil {
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
	if _, _, err := demo.EnsureUser(ctx, c.dir, g, c.trio.Members[1]); err != nil {
		return err
	}
	why := c.withoutHost()
	if why == "" {
		if err := c.startHost(ctx, g); err != nil {
			return err
		}
	}
	return c.explain(why)
}

// withoutHost returns the reason for which no host is started, or "" if there is none.
func (c *cloud) withoutHost() string {
	switch {
	case c.noHost:
		return "--no-host"
	case os.Geteuid() != 0:
		return "trivet-dev does not run as root"
	case c.trio.Bin.NodeAgent == "":
		return "trivet-nodeagent is not installed"
	}
	for _, program := range []string{"qemu-system-x86_64", "nft"} {
		if _, err := exec.LookPath(program); err != nil {
			return program + " is not installed"
		}
	}
	return ""
}

// startHost starts the agent, waits until its host is READY, and imports the small guest if --guest is given.
func (c *cloud) startHost(ctx context.Context, g *lab.GRPC) error {
	token := ""
	if !c.agent.Joined() {
		if err := lab.Until(ctx, "a join token is made", func(ctx context.Context) (err error) {
			token, err = g.NodeToken(ctx)
			return err
		}); err != nil {
			return err
		}
	}
	c.host = true
	if err := c.agent.Start(token); err != nil {
		return err
	}
	if err := c.agent.Healthy(ctx); err != nil {
		return err
	}
	if _, err := g.AwaitNode(ctx, c.agent.Name); err != nil {
		return err
	}
	if c.guest == "" {
		return nil
	}
	_, err := lab.ImportGuest(ctx, c.trio, g, c.guest)
	return err
}

// stop stops the agent, kills the guests, removes their networks, and stops the member.
func (c *cloud) stop() error {
	// Neither the signal nor a time limit of the start ends the cleanup.
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	var errs []error
	if c.host {
		if c.dir.Running(c.agent.Name) != 0 {
			errs = append(errs, c.dir.Stop(c.agent.Name, stopTime))
		}
		_, err := c.agent.EndGuests(ctx)
		errs = append(errs, err, c.agent.RemoveNetworks())
	}
	return errors.Join(append(errs, c.trio.StopAll())...)
}
