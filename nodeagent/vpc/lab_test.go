package vpc

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/vishvananda/netns"

	"github.com/trivet-cloud/trivet/nodeagent/edge"
	"github.com/trivet-cloud/trivet/nodeagent/firewall"
	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/testenv"
)

// wait is the longest time that a test waits for something. It elapses only if the test fails.
const wait = 60 * time.Second

// lab is a set of hosts, each a network namespace, that a bridge joins to an underlay. All its namespaces are named
// with the prefix and removed at the end of the test.
type lab struct {
	*testing.T
	prefix string
	resync time.Duration // of the hosts that are started
	hosts  []*labHost
	// external is true if hosts are connected to the external network "internet", whose namespace is x.
	external bool
}

// labHost is a host with its agent's Networks.
type labHost struct {
	*Networks
	lab    *lab
	name   string // of the namespace
	node   cloud.NodeID
	vtep   netip.Addr
	device *netdev.Host
	stream uint64
	began  time.Time // when the stream was opened
	log    *logged
	dir    string // Options.Dir
	edge   *edge.Edge
	// contact and lease are Options.Contact and Options.lease.
	contact func() (time.Time, bool)
	lease   time.Duration

	mu      sync.Mutex // guards acks and reports
	acks    []cloud.NetworkAck
	reports [][]cloud.BackendHealth
}

// logged collects the lines of a log.
type logged struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

var labs atomic.Int32

// newLab makes hosts n1, n2, … with the VTEPs 192.0.2.1, 192.0.2.2, …
func newLab(t *testing.T, hosts int) *lab {
	t.Helper()
	l := newEmptyLab(t)
	for i := range hosts {
		l.addHost(i + 1)
	}
	return l
}

// newEmptyLab makes a lab without hosts.
func newEmptyLab(t *testing.T) *lab {
	t.Helper()
	testenv.NeedRoot(t)
	missing, err := netdev.MissingFeatures(t.Context())
	require.NoError(t, err)
	if missing = append(missing, firewall.MissingFeatures(t.Context())...); len(missing) > 0 {
		testenv.Skip(t, "this host lacks "+strings.Join(missing, "; "))
	}
	l := &lab{T: t, prefix: fmt.Sprintf("tvpc%d-%d-", os.Getpid(), labs.Add(1)), resync: 500 * time.Millisecond}
	t.Cleanup(l.remove)
	l.addNamespace("u")
	l.ip("u", "link add underlay type bridge")
	l.ip("u", "link set underlay up")
	return l
}

// addHost makes host number n and starts its agent.
func (l *lab) addHost(n int, options ...func(*labHost)) *labHost {
	l.Helper()
	h := &labHost{lab: l, name: fmt.Sprintf("h%d", n), node: cloud.NodeID(fmt.Sprintf("n%d", n)), log: &logged{}, dir: l.TempDir()}
	h.vtep = vtepOf(h.node)
	for _, set := range options {
		set(h)
	}
	l.addNamespace(h.name)
	l.ip(h.name, "link add eth0 type veth peer name %s netns %su", h.name, l.prefix)
	l.ip("u", "link set %s master underlay up", h.name)
	l.ip(h.name, "address add %s/24 dev eth0", h.vtep)
	l.ip(h.name, "link set eth0 up")
	if l.external {
		l.ip(h.name, "link add eth1 type veth peer name %s netns %sx", h.name, l.prefix)
		l.ip("x", "link set %s master ext up", h.name)
		l.ip(h.name, "link set eth1 up")
	}
	h.start()
	l.hosts = append(l.hosts, h)
	return h
}

// start makes a new Networks, as a new process of the agent does.
func (h *labHost) start() {
	t := h.lab.T
	device, err := netdev.New(netdev.Options{
		VTEP: h.vtep, Device: "eth0", Namespace: h.lab.path(h.name), Prefix: h.lab.prefix + h.name + "-",
	})
	require.NoError(t, err)
	filter, err := firewall.New(firewall.Options{Trusted: []string{"vx*"}})
	require.NoError(t, err)
	h.device = device
	if h.lab.external {
		h.edge, err = edge.New(edge.Options{
			Prefix: h.lab.prefix + h.name + "-", Namespace: h.lab.path(h.name), External: map[string]edge.External{"internet": {
				Interface: "eth1", Address: netip.MustParsePrefix("203.0.113.10" + h.name[1:] + "/24"),
			}},
		})
		require.NoError(t, err)
	}
	h.Networks, err = New(Options{
		VTEP: h.vtep, Host: device, Firewall: filter, Edge: h.edge, Dir: h.dir, resync: h.lab.resync, lease: h.lease,
		Contact:   h.contact,
		Log:       slog.New(slog.NewTextHandler(h.log, nil)),
		Upstreams: func() []netip.AddrPort { return nil },
		Acknowledge: func(a cloud.NetworkAck) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.acks = append(h.acks, a)
		},
		Report: func(all []cloud.BackendHealth) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.reports = append(h.reports, all)
		},
	})
	require.NoError(t, err)
	t.Cleanup(h.stop)
}

// stop ends the agent. It can be called twice.
func (h *labHost) stop() {
	h.Close()
	h.device.Close()
	if h.edge != nil {
		h.edge.Close()
	}
}

// snapshot applies a snapshot with the records of lines, as in TestHostVPC, and waits until it is acknowledged.
func (h *labHost) snapshot(revision int64, lines string) { h.snapshotOf(time.Now(), revision, lines) }

// snapshotOf is like snapshot for a stream that was opened at a time.
func (h *labHost) snapshotOf(began time.Time, revision int64, lines string) {
	h.stream++
	h.began = began
	h.apply(revision, lines, true)
}

// change applies a change and waits until it is acknowledged.
func (h *labHost) change(revision int64, lines string) { h.apply(revision, lines, false) }

func (h *labHost) apply(revision int64, lines string, snapshot bool) {
	t := h.lab.T
	t.Helper()
	u := parseUpdate(t, strings.TrimSpace(lines))
	u.Node, u.Stream, u.Began, u.Revision, u.Snapshot = h.node, h.stream, h.began, revision, snapshot
	h.Apply(u)
	require.Eventually(t, func() bool {
		a := h.lastAck()
		return a.Stream == h.stream && a.Revision == revision && len(a.Failures) == 0
	}, wait, 5*time.Millisecond, "host %s did not apply revision %d", h.node, revision)
}

func (h *labHost) lastAck() cloud.NetworkAck {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.acks) == 0 {
		return cloud.NetworkAck{}
	}
	return h.acks[len(h.acks)-1]
}

func (l *lab) path(name string) string { return filepath.Join("/run/netns", l.prefix+name) }

func (l *lab) addNamespace(name string) {
	l.Helper()
	l.run("ip", "netns", "add", l.prefix+name)
	l.ip(name, "link set lo up")
}

// remove deletes all namespaces of the lab, also those that its hosts made.
func (l *lab) remove() {
	paths, _ := filepath.Glob(filepath.Join("/run/netns", l.prefix+"*"))
	for _, path := range paths {
		if err := netns.DeleteNamed(filepath.Base(path)); err != nil {
			l.Errorf("remove %s: %v", path, err)
		}
	}
}

// ip runs ip(8) in a namespace of the lab and returns its output.
func (l *lab) ip(name, format string, args ...any) string {
	l.Helper()
	return l.run("ip", append([]string{"-n", l.prefix + name}, strings.Fields(fmt.Sprintf(format, args...))...)...)
}

func (l *lab) run(name string, args ...string) string {
	l.Helper()
	out, err := exec.CommandContext(l.Context(), name, args...).CombinedOutput()
	require.NoError(l, err, "%s %s: %s", name, strings.Join(args, " "), out)
	return string(out)
}

// endpoint attaches a new namespace to a port and returns the namespace's name in the lab.
func (h *labHost) endpoint(port cloud.PortID) string {
	h.lab.Helper()
	name := "e-" + h.name + "-" + string(port)
	h.lab.addNamespace(name)
	ctx, cancel := context.WithTimeout(h.lab.Context(), wait)
	defer cancel()
	require.NoError(h.lab, h.AttachVeth(ctx, port, netdev.Endpoint{Namespace: h.lab.path(name), Device: "eth0"}))
	return name
}

// in calls f in a namespace of the lab, on a thread that ends with the call.
func (l *lab) in(name string, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
		ns, err := netns.GetFromPath(l.path(name))
		if err != nil {
			result <- err
			return
		}
		defer ns.Close()
		if err := netns.Set(ns); err != nil {
			result <- err
			return
		}
		result <- f()
	}()
	return <-result
}

// connects reports whether a TCP connection from a namespace of the lab to an address is accepted within the time.
func (l *lab) connects(from, to string, port int, within time.Duration) bool {
	return exec.CommandContext(l.Context(), "ip", "netns", "exec", l.prefix+from, "timeout", fmt.Sprint(within.Seconds()),
		"bash", "-c", fmt.Sprintf("exec 3<>/dev/tcp/%s/%d", to, port)).Run() == nil
}

// listen accepts TCP connections at a port in a namespace of the lab until the test ends.
func (l *lab) listen(in string, port int) {
	l.Helper()
	require.NoError(l, l.in(in, func() error {
		listener, err := net.Listen("tcp4", fmt.Sprintf(":%d", port))
		if err != nil {
			return err
		}
		nettest.Accept(l, listener, func(conn net.Conn) { io.Copy(conn, conn); conn.Close() })
		return nil
	}))
}
