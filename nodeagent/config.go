package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/trivet-cloud/trivet/nodeagent/facts"
	"github.com/trivet-cloud/trivet/shared/settings"
)

// Config holds the operator's settings. The keys of the configuration file are the yaml tags. Every setting also has a
// flag, whose name has dashes, and an environment variable, whose name is TRIVET_ and the key in capitals. A flag
// overrides the environment, which overrides the file.
type Config struct {
	// ControlPlane lists members' addresses, host or host:port; the default port is 7443. One reachable member is
	// enough.
	ControlPlane []string `yaml:"controlplane"`
	// JoinToken is the token of `trivet host token`, or the path of a file that contains it. It is needed for the first
	// join only.
	JoinToken string `yaml:"join_token"`
	// LeaveCluster is the id of a cluster. If the host belongs to this cluster, it leaves it and joins the cluster of
	// the join token. On a host of another cluster, LeaveCluster has no effect.
	LeaveCluster string `yaml:"leave_cluster"`
	DataDir      string `yaml:"data_dir"`
	// Name is the name of this host; empty means its host name.
	Name string `yaml:"name"`
	// Accel is auto, kvm or tcg.
	Accel facts.Mode `yaml:"accel"`
	// AllowTCG makes a host without hardware KVM accept guests. They then run 10 to 50 times slower.
	AllowTCG   bool       `yaml:"allow_tcg"`
	Overcommit Overcommit `yaml:"overcommit"`
	Reserve    Reserve    `yaml:"reserve"`
	// UIDRange is a range of uids: the first and the last one, with a dash between them. The QEMU of each VM runs with
	// its own uid of this range.
	UIDRange string `yaml:"uid_range"`
	// DedicatedCPUs is a list of CPUs of the host, such as "2-5,8", for VMs with dedicated CPUs. Other VMs do not run on
	// these CPUs.
	DedicatedCPUs string `yaml:"dedicated_cpus"`
	// Cgroup is the parent of the guests' control groups, relative to the cgroup mounts.
	Cgroup string `yaml:"cgroup"`
	// MetricsListen is the address that serves /metrics and /health; empty disables both.
	MetricsListen string `yaml:"metrics_listen"`
	// MetricsAddress is the host:port at which Prometheus reaches MetricsListen. The agent reports it to the control plane
	// for service discovery. Empty means MetricsListen, with the address of the underlay in place of an unspecified one. An
	// agent whose MetricsListen is a loopback address then reports nothing.
	MetricsAddress string `yaml:"metrics_address"`
	// MetricsHosts are further host names that requests for /metrics and /health may have in their Host header. An IP
	// address, localhost, Name and this machine's host name are always accepted.
	MetricsHosts []string `yaml:"metrics_hosts"`
	// MetricsCert and MetricsKey are the absolute paths of PEM files with the certificate chain and the private key of
	// MetricsListen. Without these files, MetricsListen serves plaintext.
	MetricsCert string `yaml:"metrics_cert"`
	MetricsKey  string `yaml:"metrics_key"`
	// MetricsToken is the absolute path of a file with the token that requests for /metrics must have in the header
	// Authorization: Bearer. If MetricsToken is empty, requests need no token. If MetricsListen is not a loopback
	// address, MetricsToken requires MetricsCert.
	MetricsToken string `yaml:"metrics_token"`
	// LogFormat is json or text; empty means json under systemd and text elsewhere.
	LogFormat string            `yaml:"log_format"`
	Labels    map[string]string `yaml:"labels"`
	// ImageCacheBytes is the maximum size of the image cache in bytes. Images that a disk, a volume or an assigned VM
	// needs are kept even above the maximum. 0 means a fifth of the file system of DataDir.
	ImageCacheBytes uint64 `yaml:"image_cache_bytes"`
	// QEMU is the name or path of the program that runs guests.
	QEMU string `yaml:"qemu"`
	// Underlay is the IP address to which other hosts send the packets of VPCs, or the interface that has the address.
	// With an interface, packets of VPCs leave through it only. Empty means the address from which this host reaches the
	// control plane.
	Underlay string `yaml:"underlay"`
	// UnderlayMTU is the MTU of the underlay; 0 means that of the interface with the address.
	UnderlayMTU uint32    `yaml:"underlay_mtu"`
	Network     Network   `yaml:"network"`
	Migration   Migration `yaml:"migration"`
	// External are the host's connections to external networks, by the networks' names.
	External map[string]External `yaml:"external"`
	// StoragePools are the host's directories for volumes. Without any, the host has the pool `local` in its data
	// directory.
	StoragePools []StoragePool `yaml:"storage_pools"`
	// RBDHelper is the path of the program trivet-rbd. Empty means that the host serves no RBD volumes.
	RBDHelper string `yaml:"rbd_helper"`
	// Watchdog is the path of a watchdog device of Linux, usually /dev/watchdog. It resets the host if VMs that must
	// not run without the host's lease cannot be powered off. Empty means that no watchdog is used.
	Watchdog string `yaml:"watchdog"`
}

// External is a connection to an external network.
type External struct {
	// Interface is the network device at the external network. It must be up. A bridge port is not possible; use its
	// bridge.
	Interface string `yaml:"interface"`
	// Address is the IPv4 address that Trivet uses for this host in the external network, with the length of the
	// network's prefix, for example 203.0.113.2/24. No other device may have it. Connections through NAT gateways have it
	// as their source.
	Address string `yaml:"address"`
	// Gateway is the router of the external network. Without it, only addresses of the network are reachable.
	Gateway string `yaml:"gateway"`
}

// Network holds settings of the traffic between hosts.
type Network struct {
	// Encrypt makes the host encrypt the VXLAN packets that it sends to other hosts, and drop packets of hosts that do not
	// encrypt. VPCs then need 37 bytes more of the underlay's MTU.
	Encrypt bool `yaml:"encrypt"`
	// Prefix starts the names of the network namespaces that the agent makes in /run/netns. Agents that share this
	// directory need prefixes of which none is the beginning of another. Changing it while the host has VPCs leaves the
	// old namespaces behind.
	Prefix string `yaml:"prefix"`
}

// Migration holds settings of live migrations.
type Migration struct {
	// Address is the IP address at which this host receives guests from other hosts. Empty means the address of the
	// underlay.
	Address string `yaml:"address"`
	// Ports is the range of TCP ports at which this host receives guests, as first-last. Each guest needs one port.
	Ports string `yaml:"ports"`
	// MaxDowntimeMS is the maximum time for which the rest of a guest's memory may be sent while the guest is paused, in
	// milliseconds; 0 means 300. It has no effect under TCG, where the whole memory is sent while the guest is paused.
	MaxDowntimeMS uint64 `yaml:"max_downtime_ms"`
	// MaxBytesPerSecond limits the rate at which this host sends the memory of a guest, and each of its disks; 0 means no
	// limit.
	MaxBytesPerSecond uint64 `yaml:"max_bytes_per_second"`
}

// Overcommit holds the factors by which placement may exceed the host's resources; 0 means 1.
type Overcommit struct {
	VCPUs   float64 `yaml:"vcpus"`
	Memory  float64 `yaml:"memory"`
	Storage float64 `yaml:"storage"`
}

// Reserve holds the amounts of the host's resources that guests may not use.
type Reserve struct {
	VCPUs      uint32 `yaml:"vcpus"`
	MemoryMiB  uint64 `yaml:"memory_mib"`
	StorageGiB uint64 `yaml:"storage_gib"`
}

// Default returns the default settings: processors are overcommitted fourfold, memory and storage are not.
func Default() Config {
	return Config{
		DataDir: "/var/lib/trivet-agent", Accel: facts.Auto, Overcommit: Overcommit{VCPUs: 4, Memory: 1, Storage: 1},
		Reserve: Reserve{MemoryMiB: 512, StorageGiB: 1}, UIDRange: "600000-665535", Cgroup: "trivet",
		MetricsListen: "127.0.0.1:7444", QEMU: facts.DefaultQEMU, Network: Network{Prefix: "trivet-"},
		Migration: Migration{Ports: "49152-49215"},
	}
}

// setting is one field of Config that a flag and an environment variable can set. The function set parses text into the
// field.
type setting struct {
	name, usage string
	set         func(c *Config, text string) error
}

var configSettings = []setting{
	{"controlplane", "members' `addresses`, comma-separated; port 7443 unless given", func(c *Config, s string) error {
		c.ControlPlane = splitList(s)
		return nil
	}},
	{"join-token", "`file` with the token of `trivet host token`, or the token", text(func(c *Config) *string { return &c.JoinToken })},
	{"leave-cluster", "`id` of the cluster that this host leaves for that of the join token", text(func(c *Config) *string { return &c.LeaveCluster })},
	{"data-dir", "`directory` for disks, images and this host's identity", text(func(c *Config) *string { return &c.DataDir })},
	{"name", "`name` of this host (default its host name)", text(func(c *Config) *string { return &c.Name })},
	{"accel", "auto, kvm or tcg", func(c *Config, s string) error { c.Accel = facts.Mode(s); return nil }},
	{"allow-tcg", "take guests although there is no real KVM (true or false)", func(c *Config, s string) (err error) {
		c.AllowTCG, err = strconv.ParseBool(s)
		return err
	}},
	{"overcommit-vcpus", "VMs may have the host's vCPUs times this `factor`", factor(func(c *Config) *float64 { return &c.Overcommit.VCPUs })},
	{"overcommit-memory", "VMs may have the host's memory times this `factor`", factor(func(c *Config) *float64 { return &c.Overcommit.Memory })},
	{"overcommit-storage", "VMs may have the host's storage times this `factor`", factor(func(c *Config) *float64 { return &c.Overcommit.Storage })},
	{"reserve-vcpus", "`number` that the host keeps for itself", func(c *Config, s string) error {
		n, err := strconv.ParseUint(s, 10, 32)
		c.Reserve.VCPUs = uint32(n)
		return err
	}},
	{"reserve-memory-mib", "`MiB` that the host keeps for itself", number(func(c *Config) *uint64 { return &c.Reserve.MemoryMiB })},
	{"reserve-storage-gib", "`GiB` that the host keeps for itself", number(func(c *Config) *uint64 { return &c.Reserve.StorageGiB })},
	{"dedicated-cpus", "`list` of CPUs such as 2-5,8 for VMs with dedicated CPUs", text(func(c *Config) *string { return &c.DedicatedCPUs })},
	{"uid-range", "`first-last` uid of guests", text(func(c *Config) *string { return &c.UIDRange })},
	{"cgroup", "`path` of the guests' control groups", text(func(c *Config) *string { return &c.Cgroup })},
	{"metrics-listen", "`address` of /metrics and /health", text(func(c *Config) *string { return &c.MetricsListen })},
	{"metrics-address", "`host:port` at which Prometheus reaches metrics-listen; default: metrics-listen, unless it is a loopback address", text(func(c *Config) *string { return &c.MetricsAddress })},
	{"metrics-hosts", "`names` by which /metrics may be asked for, comma-separated", func(c *Config, s string) error {
		c.MetricsHosts = splitList(s)
		return nil
	}},
	{"metrics-cert", "`file` with the TLS certificate chain for metrics-listen", text(func(c *Config) *string { return &c.MetricsCert })},
	{"metrics-key", "`file` with the private key of metrics-cert", text(func(c *Config) *string { return &c.MetricsKey })},
	{"metrics-token", "`file` with the bearer token that requests for /metrics must have", text(func(c *Config) *string { return &c.MetricsToken })},
	{"log-format", "json or text", text(func(c *Config) *string { return &c.LogFormat })},
	{"labels", "comma-separated `key=value` pairs that placement may ask for", pairs(func(c *Config) *map[string]string { return &c.Labels })},
	{"image-cache-bytes", "`bytes` of images that the host keeps; 0: a fifth of the file system", number(func(c *Config) *uint64 { return &c.ImageCacheBytes })},
	{"qemu", "`program` that runs guests", text(func(c *Config) *string { return &c.QEMU })},
	{"underlay", "`address` or interface for traffic between hosts", text(func(c *Config) *string { return &c.Underlay })},
	{"underlay-mtu", "`bytes`; default: that of the interface", func(c *Config, s string) error {
		n, err := strconv.ParseUint(s, 10, 32)
		c.UnderlayMTU = uint32(n)
		return err
	}},
	{"network-prefix", "`text` at the start of network namespaces' names", text(func(c *Config) *string { return &c.Network.Prefix })},
	{"network-encrypt", "true: encrypt the traffic to other hosts, and drop traffic that is not encrypted", func(c *Config, s string) (err error) {
		c.Network.Encrypt, err = strconv.ParseBool(s)
		return err
	}},
	{"migration-address", "`address` at which this host receives guests of other hosts; default: that of the underlay", text(func(c *Config) *string { return &c.Migration.Address })},
	{"migration-ports", "`first-last` TCP port for guests of other hosts", text(func(c *Config) *string { return &c.Migration.Ports })},
	{"migration-max-downtime-ms", "`ms` for which a guest may be paused to send the rest of its memory; 0: 300", number(func(c *Config) *uint64 { return &c.Migration.MaxDowntimeMS })},
	{"migration-max-bytes-per-second", "`bytes` per second that a migration from this host sends of a guest's memory, and of each local disk; 0: no limit", number(func(c *Config) *uint64 { return &c.Migration.MaxBytesPerSecond })},
	{"external", "`name=interface:address/length[:gateway],…` of external networks", func(c *Config, s string) (err error) {
		c.External, err = parseExternal(s)
		return err
	}},
	{"storage-pools", "`name=path[:shared],…` of directories for volumes", func(c *Config, s string) (err error) {
		c.StoragePools, err = parsePools(s)
		return err
	}},
	{"rbd-helper", "`path` of trivet-rbd, for RBD volumes", text(func(c *Config) *string { return &c.RBDHelper })},
	{"watchdog", "`path` of a watchdog device, which resets the host if VMs that need a lease cannot be powered off", text(func(c *Config) *string { return &c.Watchdog })},
}

func pairs(field func(*Config) *map[string]string) func(*Config, string) error {
	return func(c *Config, s string) error {
		all := map[string]string{}
		for _, pair := range splitList(s) {
			k, v, ok := strings.Cut(pair, "=")
			if !ok {
				return fmt.Errorf("%q is not key=value", pair)
			}
			all[k] = v
		}
		*field(c) = all
		return nil
	}
}

func text(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, s string) error { *field(c) = s; return nil }
}

func factor(field func(*Config) *float64) func(*Config, string) error {
	return func(c *Config, s string) (err error) { *field(c), err = strconv.ParseFloat(s, 64); return err }
}

func number(field func(*Config) *uint64) func(*Config, string) error {
	return func(c *Config, s string) (err error) { *field(c), err = strconv.ParseUint(s, 10, 64); return err }
}

func splitList(s string) []string {
	return strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })
}

// BindFlags adds the flags of all settings to f. Parsing f writes to c.
func (c *Config) BindFlags(f *pflag.FlagSet) {
	for _, s := range configSettings {
		flag := f.VarPF(&flagValue{setting: s, c: c}, s.name, "", s.usage)
		if s.name == "allow-tcg" {
			flag.NoOptDefVal = "true"
		}
	}
}

// flagValue is the value of a setting's flag. It implements pflag.Value.
type flagValue struct {
	setting
	c    *Config
	text string // the argument of the last Set
}

func (v *flagValue) Set(text string) error {
	v.text = text
	return v.set(v.c, text)
}

func (v *flagValue) String() string { return v.text }
func (v *flagValue) Type() string   { return "" }

// newFlags returns all flags of the program, and the values of the flags --config and --version.
func newFlags() (flags *pflag.FlagSet, file *string, printVersion *bool) {
	flags = pflag.NewFlagSet("trivet-nodeagent", pflag.ContinueOnError)
	flags.SortFlags = false
	file = flags.String("config", "", "YAML `file` (TRIVET_CONFIG)")
	printVersion = flags.BoolP("version", "v", false, "print the version of this program")
	new(Config).BindFlags(flags)
	return flags, file, printVersion
}

// errVersion is the error of load if the command line has the flag --version.
var errVersion = errors.New("the version is requested")

// load returns the settings from defaults, file, environment and flags, after validation. If args request the usage, it
// prints that to out and returns pflag.ErrHelp. If args contain --version, it returns errVersion.
func load(args []string, env func(string) (string, bool), out io.Writer) (Config, error) {
	flags, file, printVersion := newFlags()
	flags.SetOutput(out)
	if err := flags.Parse(args); err != nil {
		return Config{}, err
	}
	if *printVersion {
		return Config{}, errVersion
	}
	if flags.NArg() > 0 {
		return Config{}, fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if path, ok := env("TRIVET_CONFIG"); ok && *file == "" {
		*file = path
	}
	c := Default()
	if err := settings.Load(&c, settings.Sources{File: *file, LookupEnv: env, Flags: flags}); err != nil {
		return Config{}, err
	}
	if c.Name == "" {
		name, err := os.Hostname()
		if err != nil {
			return Config{}, fmt.Errorf("read host name: %w", err)
		}
		c.Name, _, _ = strings.Cut(strings.ToLower(name), ".")
	}
	return c, c.Validate()
}

// metricsHosts returns all host names that are accepted in requests for /metrics and /health.
func (c *Config) metricsHosts() []string {
	names := append([]string{c.Name}, c.MetricsHosts...)
	if full, err := os.Hostname(); err == nil {
		short, _, _ := strings.Cut(full, ".")
		names = append(names, full, short)
	}
	return names
}

// uids returns the first and the last uid of UIDRange, or an error if it is not a valid range.
func (c *Config) uids() (first, last int, err error) {
	from, to, ok := strings.Cut(c.UIDRange, "-")
	a, errA := strconv.ParseUint(from, 10, 31)
	b, errB := strconv.ParseUint(to, 10, 31)
	// uids below 1000 belong to the host's own users, and 65534 is nobody.
	if !ok || errA != nil || errB != nil || a < 1000 || b < a || a <= 65534 && b >= 65534 {
		return 0, 0, fmt.Errorf("%q is not a range FIRST-LAST with FIRST at least 1000 and without 65534", c.UIDRange)
	}
	return int(a), int(b), nil
}

// token returns the join token. If JoinToken is the path of a file, token returns the content of that file.
func (c *Config) token() (string, error) {
	if c.JoinToken == "" {
		return "", errors.New("join_token is not set")
	}
	if strings.Count(c.JoinToken, ".") == 2 && !strings.ContainsRune(c.JoinToken, '/') && len(c.JoinToken) > 64 {
		return c.JoinToken, nil
	}
	f, err := os.Open(c.JoinToken)
	if err != nil {
		return "", fmt.Errorf("read join token: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, 4<<10))
	if err != nil {
		return "", fmt.Errorf("read join token: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}
