package main

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/trivet-cloud/trivet/nodeagent/machine"
	"github.com/trivet-cloud/trivet/nodeagent/tunnel"
)

// migrationTunnel is the first argument that makes this program act as the tunnel process of a migration.
const migrationTunnel = "migration-tunnel"

// addressTimeout is the maximum time to determine the address at which the host receives guests.
const addressTimeout = 5 * time.Second

const (
	// longestDowntime is the greatest value of the setting MaxDowntimeMS. The rest of the memory is sent after the
	// switchover, and 60 seconds after the switchover the control plane asks the target to give up.
	longestDowntime = 30_000
	// leastRate is the smallest value of the setting MaxBytesPerSecond, other than 0. A migration with less would not end
	// before its deadline.
	leastRate = 1 << 20
)

// validate returns an error that names the first invalid setting, or nil.
func (m Migration) validate() error {
	if m.Address != "" {
		if ip, err := netip.ParseAddr(m.Address); err != nil || ip.IsUnspecified() || ip.IsMulticast() {
			return fmt.Errorf("migration.address: %q is not the address of a host", m.Address)
		}
	}
	if _, _, err := m.ports(); err != nil {
		return fmt.Errorf("migration.ports: %w", err)
	}
	if m.MaxDowntimeMS > longestDowntime {
		return fmt.Errorf("migration.max_downtime_ms: %d is above %d", m.MaxDowntimeMS, longestDowntime)
	}
	if m.MaxBytesPerSecond != 0 && m.MaxBytesPerSecond < leastRate {
		return fmt.Errorf("migration.max_bytes_per_second: %d is below %d (0: no limit)", m.MaxBytesPerSecond, leastRate)
	}
	return nil
}

// ports returns the first and the last port of the setting Ports.
func (m Migration) ports() (first, last uint16, err error) {
	from, to, ok := strings.Cut(m.Ports, "-")
	a, errA := strconv.ParseUint(from, 10, 16)
	b, errB := strconv.ParseUint(to, 10, 16)
	if !ok || errA != nil || errB != nil || a < 1024 || b < a {
		return 0, 0, fmt.Errorf("%q is not a port range FIRST-LAST with FIRST at least 1024", m.Ports)
	}
	return uint16(a), uint16(b), nil
}

// migrationOptions returns the options with which package machine migrates VMs between this host and others.
func (a *agent) migrationOptions() *machine.MigrationOptions {
	first, last, _ := a.config.Migration.ports() // Validate has checked them.
	return &machine.MigrationOptions{
		Command: []string{"/proc/self/exe", migrationTunnel}, FirstPort: first, LastPort: last,
		MaxDowntime:       time.Duration(a.config.Migration.MaxDowntimeMS) * time.Millisecond,
		MaxBytesPerSecond: a.config.Migration.MaxBytesPerSecond,
		Address: func() (string, error) {
			if a.config.Migration.Address != "" {
				return a.config.Migration.Address, nil
			}
			ctx, cancel := context.WithTimeout(context.Background(), addressTimeout)
			defer cancel()
			u, err := findUnderlay(ctx, &a.config)
			return u.vtep.String(), err
		},
		Identity: func() (tunnel.Identity, error) {
			certificate, key, authority, err := a.link.Certificate()
			return tunnel.Identity{Certificate: certificate, Key: key, Authority: authority}, err
		},
	}
}
