// Command etcd accepts etcd's flags and runs trivet-controlplane with an equivalent configuration. Tools and test
// suites that start etcd can therefore use Trivet instead.
//
// This program replaces itself with the control plane (exec), so that signals, kills and exit codes concern the control
// plane's process. Before that, it starts a second small process, the companion. The companion prints "ready to serve
// client requests" on standard error once the member is ready. It also forwards connections where an address in etcd's
// flags differs from the member's address: for UNIX sockets, and for the peer address of a member that joins later. The
// companion ends when the member does.
//
// On one host, several members have different ports with etcd, and different addresses with Trivet; see memberHost. The
// cluster key is derived from --initial-cluster-token and therefore not secret: this program is for tests only.
//
// The program of the control plane is $TRIVET_CONTROLPLANE, or else trivet-controlplane in the directory of this
// program.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
)

// version is the etcd version that --version reports; test suites read it before they choose flags.
const version = "3.7.3"

// companionFlag, as the first argument, makes this program a companion. The second argument describes the companion in
// JSON.
const companionFlag = "--companion"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if slices.Contains(args, "--version") {
		fmt.Printf("etcd Version: %s\nGit SHA: trivet\nGo Version: %s\nGo OS/Arch: %s/%s\n", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
		return nil
	}
	if len(args) == 2 && args[0] == companionFlag {
		var c companion
		if err := json.Unmarshal([]byte(args[1]), &c); err != nil {
			return fmt.Errorf("%s: %w", companionFlag, err)
		}
		return c.run()
	}
	o, err := parse(args)
	if err != nil {
		return err
	}
	if len(o.ignored) > 0 {
		slices.Sort(o.ignored)
		fmt.Fprintln(os.Stderr, "etcd: ignored:", strings.Join(o.ignored, " "))
	}
	binary, err := controlPlane()
	if err != nil {
		return err
	}
	p, err := newPlan(o)
	if err != nil {
		return err
	}
	planArgs, err := p.prepare()
	if err != nil {
		return err
	}
	if err := startCompanion(p); err != nil {
		return fmt.Errorf("start companion: %w", err)
	}
	argv := append([]string{binary}, planArgs...)
	return fmt.Errorf("run %s: %w", binary, syscall.Exec(binary, argv, os.Environ()))
}

// controlPlane returns the path of trivet-controlplane.
func controlPlane() (string, error) {
	if path := os.Getenv("TRIVET_CONTROLPLANE"); path != "" {
		return filepath.Abs(path)
	}
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(self), "trivet-controlplane")
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("no control plane: set TRIVET_CONTROLPLANE or put trivet-controlplane beside this program: %w", err)
	}
	return path, nil
}

// startCompanion starts the companion of this process and returns. The companion continues to run when this process
// calls exec.
func startCompanion(p plan) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	companion := companion{Parent: os.Getpid(), Ports: p.ports(), Scheme: "http", Forwards: p.forwards}
	if p.secure() {
		companion.Scheme = "https"
		companion.Cert, companion.Key = p.certificate()
	}
	text, err := json.Marshal(companion)
	if err != nil {
		return err
	}
	c := exec.Command(self, companionFlag, string(text))
	c.Stderr = os.Stderr
	return c.Start()
}
