package main

import (
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/pinning"
)

// hostCPUs are the CPUs of the host that VMs use.
type hostCPUs struct {
	// dedicated are the CPUs of the setting dedicated_cpus. shared are the other CPUs, or nil if none are dedicated.
	dedicated, shared []int
	nodes             []pinning.Node
}

// readCPUs returns the CPUs of the host. The parameter system is the directory /sys/devices/system. readCPUs returns an
// error if a dedicated CPU does not exist, or if all CPUs are dedicated.
func readCPUs(list, system string) (c hostCPUs, err error) {
	if c.dedicated, err = pinning.ParseList(list); err != nil || len(c.dedicated) == 0 {
		return c, err
	}
	text, err := os.ReadFile(system + "/cpu/online")
	if err != nil {
		return c, fmt.Errorf("dedicated_cpus: %w", err)
	}
	online, err := pinning.ParseKernelList(string(text))
	if err != nil {
		return c, fmt.Errorf("dedicated_cpus: %w", err)
	}
	for _, cpu := range c.dedicated {
		if !slices.Contains(online, cpu) {
			return c, fmt.Errorf("dedicated_cpus: the host has no CPU %d", cpu)
		}
	}
	for _, cpu := range online {
		if !slices.Contains(c.dedicated, cpu) {
			c.shared = append(c.shared, cpu)
		}
	}
	if len(c.shared) == 0 {
		return c, fmt.Errorf("dedicated_cpus: at least one of the CPUs %s must be left for other processes", strings.TrimSpace(string(text)))
	}
	if c.nodes, err = pinning.ReadNodes(system + "/node"); err != nil {
		return c, fmt.Errorf("dedicated_cpus: %w", err)
	}
	return c, nil
}

// pool returns the Pool of the dedicated CPUs, or nil if there are none.
func (c *hostCPUs) pool() *pinning.Pool {
	if len(c.dedicated) == 0 {
		return nil
	}
	return pinning.NewPool(c.nodes, c.dedicated)
}
