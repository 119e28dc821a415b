package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
)

// program is a tool in the guestd binary. Another process of the guest runs it by starting guestd with the tool's name
// as the first argument. The function do writes results to out.
type program struct {
	usage string
	do    func(args []string, in io.Reader, out io.Writer) error
}

// programs has the tools by name. Tests of networks and benchmarks of disks need them, and busybox lacks them.
var programs = map[string]program{
	"capture":  {"capture IFACE|any SECONDS TEXT", captureCommand},
	"dfping":   {"dfping ADDRESS BYTES [SECONDS]", dfpingCommand},
	"diskload": {"diskload DEV read|write|randread|randwrite BLOCK COUNT SPAN", diskLoadCommand},
	"send":     {"send IFACE [COPIES] <FRAMES", sendCommand},
}

// errUsage means that the arguments of a program are wrong.
var errUsage = errors.New("wrong arguments")

// runProgram runs the program with the name args[0], and returns the exit status.
func runProgram(args []string) int {
	name := ""
	if len(args) > 0 {
		name = args[0]
	}
	p, ok := programs[name]
	if !ok {
		var names []string
		for name := range programs {
			names = append(names, name)
		}
		slices.Sort(names)
		fmt.Fprintf(os.Stderr, "guestd is process 1 of a guest, or one of the programs %v\n", names)
		return 2
	}
	err := p.do(args[1:], os.Stdin, os.Stdout)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errUsage):
		fmt.Fprintf(os.Stderr, "%s: %v; usage: /init %s\n", name, err, p.usage)
		return 2
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", name, err)
	return 1
}
