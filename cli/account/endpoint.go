package account

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// DefaultPort is the port of the control plane's gRPC.
const DefaultPort = "50051"

// MaxEndpoints bounds how many may be named: a cluster has three members, or a few more.
const MaxEndpoints = 16

// Endpoints reads lists of host[:port], separated by commas, into host:port, each once and in order.
func Endpoints(lists ...string) ([]string, error) {
	var all []string
	for _, list := range lists {
		for one := range strings.SplitSeq(list, ",") {
			if one = strings.TrimSpace(one); one == "" {
				continue
			}
			e, err := endpoint(one)
			if err != nil {
				return nil, err
			}
			if !slices.Contains(all, e) {
				all = append(all, e)
			}
		}
	}
	if len(all) > MaxEndpoints {
		return nil, fmt.Errorf("at most %d endpoints, got %d", MaxEndpoints, len(all))
	}
	return all, nil
}

func endpoint(s string) (string, error) {
	host, port := s, DefaultPort
	if inner, ok := strings.CutPrefix(s, "["); ok && strings.HasSuffix(inner, "]") {
		host = strings.TrimSuffix(inner, "]")
	}
	if _, err := netip.ParseAddr(host); err != nil && strings.ContainsAny(s, ":[") {
		if host, port, err = net.SplitHostPort(s); err != nil {
			return "", fmt.Errorf("%q is not an endpoint: want host or host:port", s)
		}
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 || host == "" || strings.ContainsFunc(host, notInHost) {
		return "", fmt.Errorf("%q is not an endpoint: want host or host:port", s)
	}
	return net.JoinHostPort(host, port), nil
}

func notInHost(r rune) bool {
	return r <= ' ' || r >= 0x7f || strings.ContainsRune(`/\@?#[]"'`, r)
}
