package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
)

// children has the main functions of this program's child processes, by the first argument with which they are started.
// The functions return when the standard input ends.
var children = map[string]func(args []string) error{
	agentCommand: agentMain,
	hostsCommand: hostsMain,
}

func runChild(name string, args []string) int {
	if err := children[name](args); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}

// child is a child process that runs this program. It answers each line of its standard input with a JSON value.
type child struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	answers *json.Decoder
}

// startChild starts this program with the given arguments, in a network namespace unless its name is "". The process
// ends when this process ends, because this one is the first of the PID namespace. A parent-death signal cannot be used
// instead: it is sent when the thread that has started the process ends, and package nsthread ends its threads.
func startChild(namespace string, args ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	command := append([]string{self}, args...)
	if namespace != "" {
		// nsenter replaces itself with the program, so that the pid is the program's.
		command = append([]string{"nsenter", "--net=/run/netns/" + namespace, "--"}, command...)
	}
	c := &child{cmd: exec.Command(command[0], command[1:]...)}
	c.cmd.Stderr = os.Stderr
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c.answers = json.NewDecoder(out)
	return c, c.cmd.Start()
}

// tell sends a value as a line.
func (c *child) tell(value any) error { return json.NewEncoder(c.in).Encode(value) }

// ask sends a value as a line and decodes the answer into out.
func (c *child) ask(value, out any) error {
	if err := c.tell(value); err != nil {
		return err
	}
	if err := c.answers.Decode(out); err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.cmd.Path, err)
	}
	return nil
}

// close ends the process by closing its standard input, and waits for it.
func (c *child) close() error { return errors.Join(c.in.Close(), c.cmd.Wait()) }
