package account

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// DefaultPort is the default gRPC port of the control plane.
const DefaultPort = "50051"

// MaxEndpoints is the maximum number of endpoints.
const MaxEndpoints = 16

// Endpoints parses comma-separated lists of [https://]host[:port] into unique host:port, in order. secure reports
// whether any of them has https://; TLS is then used for all, since all members of a cluster use TLS or none.
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
