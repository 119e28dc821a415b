package health

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// wait is the longest time that a test waits for something.
const wait = 30 * time.Second

// ownNamespace is the network namespace of the test.
const ownNamespace = "/proc/self/ns/net"

// TestTally checks the verdicts with thresholds of three failures and two successes. Results are + and -. The verdict
// after each result is h (healthy), u (unhealthy) or ? (none).
func TestTally(t *testing.T) {
	check := cloud.HealthCheck{Unhealthy: 3, Healthy: 2}
	for results, want := range map[string]string{
		"+":          "h",
		"---":        "??u",
		"--+":        "??h",
		"+--+---":    "hhhhhhu",
		"---+-++":    "??uuuuh",
		"+---++-+--": "hhhuuhhhhh",
	} {
		var y tally
		var got strings.Builder
		for _, r := range results {
			before := y
			changed := y.add(r == '+', &check)
			require.Equal(t, before.known != y.known || before.healthy != y.healthy, changed)
			switch {
			case !y.known:
				got.WriteByte('?')
			case y.healthy:
				got.WriteByte('h')
			default:
				got.WriteByte('u')
			}
		}
		require.Equal(t, want, got.String(), results)
	}
}

// TestTCP checks an open port, a closed port, and a network namespace that does not exist.
func TestTCP(t *testing.T) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	target := Target{
		Address: netip.MustParseAddrPort(listener.Addr().String()), Source: netip.MustParseAddr("127.0.0.1"),
	}
	require.NoError(t, probe(t.Context(), ownNamespace, &target))

	require.NoError(t, listener.Close())
	require.ErrorContains(t, probe(t.Context(), ownNamespace, &target), "connection refused")
	require.ErrorContains(t, probe(t.Context(), "/nonexistent", &target), "open network namespace /nonexistent")
}

// TestChecksShareLocalPorts makes two checks of one namespace at a time while the kernel has only one local port for
// connections. Both succeed, because they have different targets.
func TestChecksShareLocalPorts(t *testing.T) {
	name := fmt.Sprintf("trivet-health-%d", os.Getpid())
	if _, err := nsthread.Create(name); errors.Is(err, os.ErrPermission) && os.Getenv("CI") != "true" {
		t.Skip("requires root")
	} else {
		require.NoError(t, err)
	}
	t.Cleanup(func() { require.NoError(t, netns.DeleteNamed(name)) })
	for _, command := range [][]string{
		{"ip", "link", "set", "lo", "up"}, {"sysctl", "-qw", "net.ipv4.ip_local_port_range=40000 40000"},
	} {
		out, err := exec.Command("ip", append([]string{"netns", "exec", name}, command...)...).CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	for _, to := range []string{"127.0.0.1:8001", "127.0.0.1:8002"} {
		var listener net.Listener
		require.NoError(t, nsthread.InNamed(name, func() (err error) {
			listener, err = net.Listen("tcp4", to)
			return err
		}))
		defer listener.Close()
		conn, err := dialIn(t.Context(), filepath.Join(nsthread.Dir, name), netip.MustParseAddr("127.0.0.1"),
			netip.MustParseAddrPort(to))
		require.NoError(t, err, to)
		defer conn.Close()
		require.Equal(t, "127.0.0.1:40000", conn.LocalAddr().String())
	}
}

// TestSilentTarget requires that a check of a target that does not answer ends with its context.
func TestSilentTarget(t *testing.T) {
	// The kernel accepts the connection, but no program answers the request.
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	target := Target{
		Address: netip.MustParseAddrPort(listener.Addr().String()), Source: netip.MustParseAddr("127.0.0.1"),
		Check: cloud.HealthCheck{HTTPPath: "/"},
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, probe(ctx, ownNamespace, &target), context.DeadlineExceeded)
}

// TestHTTP requires that a target is healthy if the status of its response is 200 to 399, and that redirections are not
// followed.
func TestHTTP(t *testing.T) {
	var status atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/ready" {
			t.Errorf("asked for %s", r.URL.Path)
		}
		w.Header().Set("Location", "/elsewhere")
		w.WriteHeader(int(status.Load()))
	}))
	defer server.Close()
	target := Target{
		Address: netip.MustParseAddrPort(server.Listener.Addr().String()), Source: netip.MustParseAddr("127.0.0.1"),
		Check: cloud.HealthCheck{HTTPPath: "/ready"},
	}
	codes := map[int32]bool{200: true, 204: true, 302: true, 399: true, 400: false, 404: false, 503: false}
	for code, healthy := range codes {
		status.Store(code)
		if err := probe(t.Context(), ownNamespace, &target); healthy {
			require.NoError(t, err, "%d", code)
		} else {
			require.EqualError(t, err, fmt.Sprintf("status %d", code))
		}
	}
}

// TestChecker checks the verdict of a target that fails and recovers, and requires that the checks of a target that is
// removed end.
func TestChecker(t *testing.T) {
	var healthy atomic.Bool
	changes := make(chan string, 100)
	var log bytes.Buffer
	c := New(slog.New(slog.NewTextHandler(&log, nil)), func(namespace string) { changes <- namespace })
	defer c.Close()
	c.probe = func(context.Context, string, *Target) error {
		if healthy.Load() {
			return nil
		}
		return errors.New("down")
	}
	healthy.Store(true)
	target := Target{
		Address: netip.MustParseAddrPort("10.0.1.5:80"),
		Check:   cloud.HealthCheck{IntervalSeconds: 1, Unhealthy: 1, Healthy: 1},
	}
	require.Equal(t, [2]bool{false, false}, verdict(c, "a", target))
	c.Set("a", []Target{target, target})
	for _, want := range []bool{true, false, true, false, true} {
		healthy.Store(want)
		select {
		case namespace := <-changes:
			require.Equal(t, "a", namespace)
		case <-time.After(wait):
			t.Fatal("no verdict")
		}
		require.Equal(t, [2]bool{want, true}, verdict(c, "a", target))
	}
	c.Set("a", []Target{target})
	require.Equal(t, [2]bool{true, true}, verdict(c, "a", target), "a target that stays keeps its verdict")
	c.Set("a", nil)
	require.Equal(t, [2]bool{false, false}, verdict(c, "a", target))
	c.done.Wait() // the checks have ended
	require.Equal(t, 1, strings.Count(log.String(), "err=down"), "one line in a minute: %s", &log)
}

// TestSilentNamespace checks that targets of one namespace that do not answer do not keep those of another from being
// checked.
func TestSilentNamespace(t *testing.T) {
	changes := make(chan string, 1)
	c := New(slog.New(slog.DiscardHandler), func(namespace string) { changes <- namespace })
	release := make(chan struct{})
	defer c.Close()
	defer close(release)
	started := make(chan struct{}, 2*maxConcurrent)
	c.probe = func(_ context.Context, namespace string, _ *Target) error {
		if namespace == "silent" {
			started <- struct{}{}
			<-release
			return errors.New("released")
		}
		return nil
	}
	check := cloud.HealthCheck{IntervalSeconds: 300, Unhealthy: 10, Healthy: 1}
	var silent []Target
	for port := range uint16(2 * maxConcurrent) {
		silent = append(silent, Target{Address: netip.AddrPortFrom(netip.MustParseAddr("10.0.1.5"), port+1), Check: check})
	}
	c.Set("silent", silent)
	for range maxPerNamespace {
		<-started
	}
	target := Target{Address: netip.MustParseAddrPort("10.0.1.5:80"), Check: check}
	c.Set("other", []Target{target})
	select {
	case namespace := <-changes:
		require.Equal(t, "other", namespace)
	case <-time.After(wait):
		t.Fatal("the other namespace's target was not checked")
	}
	require.Equal(t, [2]bool{true, true}, verdict(c, "other", target))
}

func verdict(c *Checker, namespace string, t Target) [2]bool {
	healthy, known := c.Verdict(namespace, t)
	return [2]bool{healthy, known}
}
