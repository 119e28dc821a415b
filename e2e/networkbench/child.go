package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
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
	out     *os.File
	answers *json.Decoder
}

const (
	// answerWithin is how long the child may take for its first answer, before which it does its work, and for each
	// other one.
	answerWithin = 3 * time.Minute
	// endWithin is how long the child may take to end.
	endWithin = 30 * time.Second
)

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
	var theirs *os.File
	if c.out, theirs, err = os.Pipe(); err != nil {
		return nil, err
	}
	c.cmd.Stdout = theirs
	c.answers = json.NewDecoder(c.out)
	err = c.cmd.Start()
	if err := errors.Join(err, theirs.Close()); err != nil {
		return nil, errors.Join(err, c.out.Close())
	}
	return c, nil
}

// tell sends a value as a line.
func (c *child) tell(value any) error { return json.NewEncoder(c.in).Encode(value) }

// ask sends a value as a line and decodes the answer into out. It returns an error if there is no answer when ctx ends,
// or after answerWithin. The child cannot be asked again after an error.
func (c *child) ask(ctx context.Context, value, out any) error {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { c.out.SetReadDeadline(time.Now()) })
	defer stop()
	if err := c.tell(value); err != nil {
		return err
	}
	if err := c.answers.Decode(out); err != nil {
		return fmt.Errorf("read the answer of %s: %w", c.cmd.Path, errors.Join(ctx.Err(), err))
	}
	return nil
}

// close ends the process by closing its standard input, and waits for it. It kills the process after endWithin.
func (c *child) close() error {
	err := c.in.Close()
	kill := time.AfterFunc(endWithin, func() { c.cmd.Process.Kill() })
	defer kill.Stop()
	return errors.Join(err, c.cmd.Wait(), c.out.Close())
}
