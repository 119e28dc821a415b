package main

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/nodeagent/pinning"
	"github.com/trivet-cloud/trivet/nodeagent/uplink"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// validCluster matches the form of a cluster id, a number from 1 to 2^53−1.
var validCluster = regexp.MustCompile(`^[1-9][0-9]{0,15}$`)

var validHost = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

// validName matches a DNS name.
var validName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)

// Validate returns an error that names the invalid setting. It adds the default port to addresses of the control plane
// that have none.
func (c *Config) Validate() error {
	if len(c.ControlPlane) == 0 {
		return errors.New("controlplane: name at least one member, such as 10.0.0.1")
	}
	for i, addr := range c.ControlPlane {
		full, err := withPort(addr)
		if err != nil {
			return fmt.Errorf("controlplane: %w", err)
		}
		c.ControlPlane[i] = full
	}
	over := facts.Overcommit(c.Overcommit)
	switch _, _, err := c.uids(); {
	case c.DataDir == "":
		return errors.New("data_dir: must not be empty")
	case !validHost.MatchString(c.Name):
		return fmt.Errorf("name: %q is not a host name", c.Name)
	case !slices.Contains([]facts.Mode{facts.Auto, facts.WantKVM, facts.WantTCG}, c.Accel):
		return fmt.Errorf("accel: %q must be auto, kvm or tcg", c.Accel)
	case over.Validate() != nil:
		return fmt.Errorf("overcommit: %w", over.Validate())
	case err != nil:
		return fmt.Errorf("uid_range: %w", err)
	case c.LeaveCluster != "" && !validCluster.MatchString(c.LeaveCluster):
		return fmt.Errorf("leave_cluster: %q is not the id of a cluster", c.LeaveCluster)
	case !slices.Contains([]string{"", "json", "text"}, c.LogFormat):
		return fmt.Errorf("log_format: %q is neither json nor text", c.LogFormat)
	case c.QEMU == "":
		return errors.New("qemu: must not be empty")
	}
	if c.Watchdog != "" && !filepath.IsAbs(c.Watchdog) {
		return fmt.Errorf("watchdog: %q is not an absolute path", c.Watchdog)
	}
	if _, err := pinning.ParseList(c.DedicatedCPUs); err != nil {
		return fmt.Errorf("dedicated_cpus: %w", err)
	}
	if err := c.validateMetrics(); err != nil {
		return err
	}
	if err := c.validateNetwork(); err != nil {
		return err
	}
	if err := c.Migration.validate(); err != nil {
		return err
	}
	if err := errors.Join(c.validateStorage(), c.validateRBD()); err != nil {
		return err
	}
	for _, k := range slices.Sorted(maps.Keys(c.Labels)) {
		if strings.HasPrefix(k, "trivet/") {
			return fmt.Errorf("labels: %q: names under trivet/ are reserved for the agent", k)
		}
	}
	all := maps.Clone(c.Labels)
	if all == nil {
		all = map[string]string{}
	}
	all[cloud.AcceleratorLabel] = string(facts.KVM) // describe adds this label too
	if c.Network.Encrypt {
		all[encryptLabel] = "true"
	}
	return cloud.CheckNodeLabels("labels", all)
}

// withPort returns addr as host:port, with uplink.DefaultPort if addr has no port.
func withPort(addr string) (string, error) {
	if host, port, err := net.SplitHostPort(addr); err == nil {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || host == "" {
			return "", fmt.Errorf("%q is not an address", addr)
		}
		return addr, nil
	}
	host := strings.TrimSuffix(strings.TrimPrefix(addr, "["), "]")
	if ip := net.ParseIP(host); ip == nil && !validHost.MatchString(strings.ToLower(host)) {
		return "", fmt.Errorf("%q is not an address", addr)
	}
	return net.JoinHostPort(host, uplink.DefaultPort), nil
}
