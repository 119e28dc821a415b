package main

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"net"
	"os"
	"path/filepath"
)

// The ports of every member. All members use the same ports, on different addresses.
const (
	peersPort  = "2380"
	grpcPort   = "50051"
	clientPort = "2379" // client port if the flags have a UNIX socket
)

// plan describes how to run a member of Trivet that has the settings in etcd's flags.
type plan struct {
	options
	address  string // address of the member; see memberHost
	forwards []forward
}

// forward describes an address in etcd's flags, From, whose connections the companion forwards to the member's address
// To.
type forward struct{ Network, From, To string }

func newPlan(o options) (plan, error) {
	address, err := memberHost(o.peer)
	if err != nil {
		return plan{}, err
	}
	p := plan{options: o, address: address}
	// Other members connect to a joining member at the peer address in its flags. If the member listens on another
	// address, the companion forwards these connections.
	if to := net.JoinHostPort(address, peersPort); o.existing && o.listenPeer.Host != to {
		p.forwards = append(p.forwards, forward{"tcp", o.listenPeer.Host, to})
	}
	for _, u := range o.listenClient {
		if path := socket(u); path != "" {
			p.forwards = append(p.forwards, forward{"unix", path, p.listenFor(u)})
		}
	}
	return p, nil
}

// ports returns the addresses on which the member listens for etcd clients.
func (p plan) ports() []string {
	var out []string
	for _, u := range p.listenClient {
		out = append(out, p.listenFor(u))
	}
	return out
}

func (p plan) keyFile() string { return filepath.Join(p.dataDir, "cluster.key") }

// key derives the cluster key from --initial-cluster-token, so that all members with the same token have the same key.
func key(token string) string {
	sum := sha256.Sum256([]byte("trivet for the etcd cluster " + token))
	return base64.StdEncoding.EncodeToString(sum[:]) + "\n"
}

func (p plan) configFile() string { return filepath.Join(p.dataDir, "trivet.yaml") }

// prepare creates the data directory, the cluster key and the configuration, and returns the control plane's arguments.
func (p plan) prepare() ([]string, error) {
	if err := os.MkdirAll(p.dataDir, 0o700); err != nil {
		return nil, fmt.Errorf("make data directory: %w", err)
	}
	if err := os.WriteFile(p.keyFile(), []byte(key(p.token)), 0o600); err != nil {
		return nil, fmt.Errorf("write cluster key: %w", err)
	}
	if p.secure() && p.values["cert-file"] == "" {
		if err := p.makeCertificate(); err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
	}
	id, args := p.id(), []string{"--config", p.configFile()}
	if p.existing {
		var err error
		if id, err = p.joinID(); err != nil {
			return nil, err
		}
		seeds, err := p.seeds()
		if err != nil {
			return nil, err
		}
		args = append(args, "--join", hosts(seeds))
	}
	text, err := p.config(id)
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(p.configFile(), text, 0o600); err != nil {
		return nil, fmt.Errorf("write configuration: %w", err)
	}
	return args, nil
}
