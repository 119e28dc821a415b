package main

import (
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
)

// options holds the values of those flags of etcd that this program uses.
type options struct {
	name         string
	dataDir      string
	listenClient []*url.URL
	listenPeer   *url.URL
	peer         *url.URL        // URL that other members connect to: the first of --initial-advertise-peer-urls
	cluster      []clusterMember // --initial-cluster, in its order
	existing     bool            // whether --initial-cluster-state is "existing"
	token        string
	values       map[string]string // the given flags that are in passedFlags, by name
	ignored      []string          // names of the given flags that have no meaning here
}

// clusterMember is a member in --initial-cluster.
type clusterMember struct {
	name string
	peer *url.URL
}

// passedFlags lists the flags whose values parse stores in options.values, for the control plane's configuration. A
// flag that is a bool may be given without a value.
var passedFlags = map[string]bool{ // value: whether the flag is a bool
	"quota-backend-bytes": false, "auth-token": false, "bcrypt-cost": false, "auth-token-ttl": false,
	"max-request-bytes": false, "max-txn-ops": false, "heartbeat-interval": false,
	"auto-compaction-mode": false, "auto-compaction-retention": false, "watch-progress-notify-interval": false,
	"cert-file": false, "key-file": false, "trusted-ca-file": false, "client-cert-auth": true, "auto-tls": true,
	"strict-reconfig-check": true,
}

// ignoredBools lists those ignored flags of etcd that are bools and may therefore be given without a value.
var ignoredBools = map[string]bool{
	"force-new-cluster": true, "peer-auto-tls": true, "peer-client-cert-auth": true, "pre-vote": true, "enable-pprof": true, "memory-mlock": true,
	"initial-election-tick-advance": true, "socket-reuse-port": true, "socket-reuse-address": true,
	"enable-distributed-tracing": true, "enable-log-rotation": true,
	"peer-skip-client-san-verification": true, "unsafe-no-fsync": true,
}

// parse parses etcd's command line. An unknown flag is no error: its name is added to options.ignored.
func parse(args []string) (options, error) {
	o := options{name: "default", token: "etcd-cluster", values: map[string]string{}}
	text := map[string]string{}
	for len(args) > 0 {
		arg := args[0]
		args = args[1:]
		name, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !strings.HasPrefix(arg, "-") || name == "" {
			return o, fmt.Errorf("%q is not a flag", arg)
		}
		if !hasValue {
			if passedFlags[name] || ignoredBools[name] {
				value = "true"
			} else if len(args) > 0 {
				value, args = args[0], args[1:]
			}
		}
		if _, known := passedFlags[name]; known {
			o.values[name] = value
		} else {
			text[name] = value
		}
	}
	return o, o.fill(text)
}

// fill sets the fields of o from the given flags that are not in passedFlags. The parameter text maps the names of
// these flags to their values.
func (o *options) fill(text map[string]string) error {
	var advertisePeer []*url.URL
	var listenPeer []*url.URL
	for name, value := range text {
		var err error
		switch name {
		case "name":
			o.name = value
		case "data-dir":
			o.dataDir = value
		case "initial-cluster-token":
			o.token = value
		case "initial-cluster-state":
			o.existing = value == "existing"
		case "listen-client-urls":
			o.listenClient, err = parseURLs(value)
		case "listen-peer-urls":
			listenPeer, err = parseURLs(value)
		case "initial-advertise-peer-urls":
			advertisePeer, err = parseURLs(value)
		case "initial-cluster":
			o.cluster, err = parseInitialCluster(value)
		default:
			o.ignored = append(o.ignored, name)
		}
		if err != nil {
			return fmt.Errorf("--%s: %w", name, err)
		}
	}
	return o.complete(listenPeer, advertisePeer)
}

// complete sets etcd's defaults for flags that were not given, and checks that --initial-cluster lists this member.
func (o *options) complete(listenPeer, advertisePeer []*url.URL) error {
	if o.dataDir == "" {
		o.dataDir = o.name + ".etcd"
	}
	if len(o.listenClient) == 0 {
		o.listenClient = []*url.URL{{Scheme: "http", Host: "localhost:2379"}}
	}
	if len(listenPeer) == 0 {
		listenPeer = []*url.URL{{Scheme: "http", Host: "localhost:2380"}}
	}
	if len(advertisePeer) == 0 {
		advertisePeer = listenPeer
	}
	o.listenPeer, o.peer = listenPeer[0], advertisePeer[0]
	if len(o.cluster) == 0 {
		o.cluster = []clusterMember{{o.name, o.peer}}
	}
	for _, s := range o.cluster {
		if s.name == o.name {
			return nil
		}
	}
	return fmt.Errorf("--initial-cluster does not list %q", o.name)
}

func parseURLs(text string) ([]*url.URL, error) {
	var out []*url.URL
	for _, one := range strings.Split(text, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil {
			return nil, err
		}
		if u.Scheme == "" {
			return nil, fmt.Errorf("%q is not a URL", one)
		}
		out = append(out, u)
	}
	return out, nil
}

func parseInitialCluster(text string) ([]clusterMember, error) {
	var out []clusterMember
	for _, pair := range strings.Split(text, ",") {
		name, address, ok := strings.Cut(pair, "=")
		if !ok {
			return nil, fmt.Errorf("want NAME=URL, got %q", pair)
		}
		urls, err := parseURLs(address)
		if err != nil {
			return nil, err
		}
		out = append(out, clusterMember{name, urls[0]})
	}
	return out, nil
}

// memberHost returns the address on which a member with this peer URL listens, on all its ports. On one host, etcd's
// members have the same address and different ports, while Trivet's members have different addresses and the same
// ports. So if the peer URL is on localhost, its port is mapped to a loopback address in 127.93.0.0/16. Otherwise
// memberHost returns the IPv4 address in the URL.
func memberHost(peer *url.URL) (string, error) {
	port, err := strconv.ParseUint(peer.Port(), 10, 16)
	if err != nil {
		return "", fmt.Errorf("peer URL %s has no port", peer)
	}
	host := peer.Hostname()
	ip := net.ParseIP(host).To4()
	if host == "localhost" || ip != nil && ip.Equal(net.IPv4(127, 0, 0, 1)) {
		return fmt.Sprintf("127.93.%d.%d", port>>8, port&0xff), nil
	}
	if ip == nil {
		return "", fmt.Errorf("peer URL %s names no IPv4 address", peer)
	}
	return ip.String(), nil
}
