package account

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// DefaultPort is the gRPC port of a member of the control plane unless it is configured otherwise.
const DefaultPort = "50051"

// MaxEndpoints is the maximum number of endpoints that Endpoints returns.
const MaxEndpoints = 16

// Endpoints parses comma-separated lists of [https://]host[:port]. It returns them as host:port in the same order,
// without duplicates. secure is true if any of them has https://; the caller must then use TLS for all, since either
// all members of a cluster use TLS or none does.
func Endpoints(lists ...string) (all []string, secure bool, err error) {
	for _, list := range lists {
		for one := range strings.SplitSeq(list, ",") {
			if one = strings.TrimSpace(one); one == "" {
				continue
			}
			host, asked := strings.CutPrefix(one, "https://")
			if asked {
				host, secure = strings.TrimSuffix(host, "/"), true
			}
			e, err := endpoint(host)
			if err != nil {
				return nil, false, err
			}
			if !slices.Contains(all, e) {
				all = append(all, e)
			}
		}
	}
	if len(all) > MaxEndpoints {
		return nil, false, fmt.Errorf("at most %d endpoints, got %d", MaxEndpoints, len(all))
	}
	return all, secure, nil
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
