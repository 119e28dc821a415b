package metadata

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"
	"github.com/stretchr/testify/require"

	"github.com/trivet-cloud/trivet/shared/cloud"
	"github.com/trivet-cloud/trivet/shared/cloudinit"
)

const aliceKey = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAICTOlZZ+XO9BvI2oR4o5aTRbdRqZQNsG1jvdR2MJSSPo alice@example.com"

// testTable holds the instances of the tests by VPC and source address. web has all values, db requires tokens, and
// bare has only an ID. The VPCs "a" and "b" use the same addresses.
func testTable(t *testing.T) func(cloud.VPCID, netip.Addr) (*Instance, bool) {
	t.Helper()
	type source struct {
		vpc     cloud.VPCID
		address string
	}
	web := testInstance(t, "web", "vpc-a", 5)
	web.Region, web.Zone = "home", "home-1"
	web.SSHKeys = []string{aliceKey, strings.Replace(aliceKey, "alice", "bob", 1)}
	web.NICs = append(web.NICs, NIC{
		Port: "port-web-1", MAC: cloud.MAC{2, 0, 0, 0, 1, 5}, IPs: []netip.Addr{netip.MustParseAddr("10.1.0.5"), netip.MustParseAddr("10.1.0.50")},
		Subnet: "subnet-2", VPC: "vpc-a", SubnetCIDR: netip.MustParsePrefix("10.1.0.0/24"), VPCCIDR: netip.MustParsePrefix("10.0.0.0/8"),
	})
	db := testInstance(t, "db", "vpc-a", 6)
	db.TokensRequired = true
	other := testInstance(t, "other", "vpc-b", 5)
	bare := &Instance{Port: "port-bare", ID: "bare"}
	table := map[source]*Instance{
		{"vpc-a", "10.0.0.5"}: web, {"vpc-a", "fd00:10::5"}: web, {"vpc-a", "10.0.0.6"}: db, {"vpc-a", "10.0.0.7"}: bare,
		{"vpc-b", "10.0.0.5"}: other, {"vpc-b", "fd00:10::5"}: other,
	}
	return func(vpc cloud.VPCID, a netip.Addr) (*Instance, bool) {
		i, ok := table[source{vpc, a.String()}]
		return i, ok
	}
}

// testInstance returns an instance with one NIC and the addresses 10.0.0.number and fd00:10::number.
func testInstance(t *testing.T, name string, vpc cloud.VPCID, number byte) *Instance {
	t.Helper()
	files, err := cloudinit.Render(&cloudinit.Instance{ID: name, HostName: name + ".example.org", UserData: []byte("#!/bin/sh\necho " + name + "\n")})
	require.NoError(t, err)
	ip6 := netip.MustParseAddr("fd00:10::").As16()
	ip6[15] = number
	return &Instance{
		Port: cloud.PortID("port-" + name), ID: name, HostName: name + ".example.org", NoCloud: *files, SSHKeys: []string{aliceKey},
		NICs: []NIC{{
			Port: cloud.PortID("port-" + name), MAC: cloud.MAC{2, 0, 0, 0, 0, number},
			IPs: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, 0, number})}, IP6s: []netip.Addr{netip.AddrFrom16(ip6)},
			SecurityGroups: []cloud.SecurityGroupID{"group-1", "group-2"}, Subnet: "subnet-1", VPC: vpc,
			SubnetCIDR: netip.MustParsePrefix("10.0.0.0/24"), SubnetCIDR6: netip.MustParsePrefix("fd00:10::/64"),
			VPCCIDR: netip.MustParsePrefix("10.0.0.0/8"), VPCCIDR6: netip.MustParsePrefix("fd00:10::/48"),
		}},
	}
}

// testClient calls a handler without a network.
type testClient struct {
	handler *handler
	now     time.Time
	tokens  map[string]string // by the name that a script gives them
}

func newTestClient(t *testing.T, limits Limits) *testClient {
	t.Helper()
	c := &testClient{now: time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC), tokens: map[string]string{}}
	s, err := New(Options{
		Lookup: testTable(t), TokenKey: bytes.Repeat([]byte("k"), minKey), Log: slog.New(slog.DiscardHandler), Limits: limits,
		Now: func() time.Time { return c.now },
	})
	require.NoError(t, err)
	c.handler = &handler{options: s.options, gate: s.gate}
	return c
}

// connect returns the connection that a listener of the VPC would accept from an address.
func (c *testClient) connect(vpc cloud.VPCID, source string) *connection {
	conn := &connection{source: netip.MustParseAddr(source), caller: caller{vpc: vpc}, gate: c.handler.gate}
	if i, ok := c.handler.options.Lookup(vpc, conn.source); ok {
		conn.caller.port = i.Port
	}
	return conn
}

// send sends a request that is written as on the wire, except that $name stands for a token, and that the protocol and
// the headers Host and Content-Length are added.
func (c *testClient) send(t *testing.T, conn *connection, request string) *httptest.ResponseRecorder {
	t.Helper()
	for name, token := range c.tokens {
		request = strings.ReplaceAll(request, "$"+name, token)
	}
	head, body, _ := strings.Cut(strings.TrimSpace(request), "\n\n")
	lines := strings.Split(head, "\n")
	lines[0] += " HTTP/1.1"
	lines = append(lines, "Host: 169.254.169.254", fmt.Sprintf("Content-Length: %d", len(body)), "", body)
	r, err := http.ReadRequest(bufio.NewReader(strings.NewReader(strings.Join(lines, "\r\n"))))
	require.NoError(t, err)
	w := httptest.NewRecorder()
	c.handler.ServeHTTP(w, r.WithContext(context.WithValue(t.Context(), connectionKey{}, conn)))
	return w
}

// dump returns the status, the headers in alphabetical order, and the body of a response.
func dump(w *httptest.ResponseRecorder) string {
	var out strings.Builder
	fmt.Fprintf(&out, "%d\n", w.Code)
	var headers []string
	for name, values := range w.Header() {
		headers = append(headers, fmt.Sprintf("%s: %s\n", name, strings.Join(values, ", ")))
	}
	sort.Strings(headers)
	body := w.Body.String()
	fmt.Fprintf(&out, "%s\n%s", strings.Join(headers, ""), body)
	if !strings.HasSuffix(body, "\n") {
		out.WriteString("(no line end)\n")
	}
	return out.String()
}

// TestRequests sends the requests in testdata/requests. Arguments: from is the source address, vpc the VPC ("vpc-a" if
// absent), and save the name under which the script refers to the token in the response. Bodies may have 80 bytes.
func TestRequests(t *testing.T) {
	client := newTestClient(t, Limits{BodyBytes: 80})
	datadriven.RunTest(t, "testdata/requests", func(t *testing.T, d *datadriven.TestData) string {
		switch d.Cmd {
		case "advance":
			var by string
			d.ScanArgs(t, "by", &by)
			duration, err := time.ParseDuration(by)
			require.NoError(t, err)
			client.now = client.now.Add(duration)
			return ""
		case "request":
			from, vpc := "10.0.0.5", "vpc-a"
			d.MaybeScanArgs(t, "from", &from)
			d.MaybeScanArgs(t, "vpc", &vpc)
			w := client.send(t, client.connect(cloud.VPCID(vpc), from), d.Input)
			var name string
			if d.MaybeScanArgs(t, "save", &name) {
				client.tokens[name] = w.Body.String()
				return strings.Replace(dump(w), client.tokens[name], "$"+name, 1)
			}
			return dump(w)
		}
		d.Fatalf(t, "unknown command %s", d.Cmd)
		return ""
	})
}

// TestUnknownAddressLearnsNothing compares the responses to an address without a port with each other.
func TestUnknownAddressLearnsNothing(t *testing.T) {
	client := newTestClient(t, Limits{})
	unknown := client.connect("vpc-a", "10.0.0.99")
	first := dump(client.send(t, unknown, "GET /"))
	require.Contains(t, first, "404\n")
	for _, request := range []string{
		"GET /latest/meta-data/instance-id", "GET /nothing", "PUT /latest/api/token\n" + tokenTTLHeader + ": 60", "GET /latest/api/token",
		"DELETE /latest/", "OPTIONS *", "GET /nocloud/user-data", "GET /\nX-Forwarded-For: 10.0.0.5", "GET /\n" + tokenHeader + ": x",
		"PUT /\n\n" + strings.Repeat("x", 10<<10),
	} {
		require.Equal(t, first, dump(client.send(t, unknown, request)), request)
	}
	require.Equal(t, first, dump(client.send(t, client.connect("vpc-c", "10.0.0.5"), "GET /")), "an address of another VPC")
}

// TestConnectionKeepsItsPort: a connection that was accepted for one port must not get the data of another port.
func TestConnectionKeepsItsPort(t *testing.T) {
	client := newTestClient(t, Limits{})
	old := client.connect("vpc-a", "10.0.0.5")
	old.caller.port = "port-before"
	w := client.send(t, old, "GET /latest/meta-data/instance-id")
	require.Equal(t, http.StatusNotFound, w.Code)
	require.Equal(t, "close", w.Header().Get("Connection"))
	w = client.send(t, client.connect("vpc-a", "10.0.0.5"), "GET /latest/meta-data/instance-id")
	require.Equal(t, "web", w.Body.String())
}

// TestRequestRate: each port, and all addresses without a port together, may send a burst.
func TestRequestRate(t *testing.T) {
	client := newTestClient(t, Limits{RequestsPerSecond: 1e-9, Burst: 3})
	for _, from := range []struct {
		vpc    cloud.VPCID
		source string
		want   int
	}{{"vpc-a", "10.0.0.5", 200}, {"vpc-a", "10.0.0.7", 200}, {"vpc-b", "10.0.0.5", 200}, {"vpc-a", "10.0.0.99", 404}, {"vpc-b", "10.0.0.98", 404}} {
		conn := client.connect(from.vpc, from.source)
		for range 3 {
			require.Equal(t, from.want, client.send(t, conn, "GET /").Code)
		}
		w := client.send(t, conn, "GET /")
		require.Equal(t, http.StatusServiceUnavailable, w.Code)
		require.Equal(t, "1", w.Header().Get("Retry-After"))
	}
	require.Equal(t, http.StatusServiceUnavailable, client.send(t, client.connect("vpc-a", "10.0.0.97"), "GET /").Code,
		"addresses without a port share their rate")
	require.Equal(t, http.StatusServiceUnavailable, client.send(t, client.connect("vpc-a", "fd00:10::5"), "GET /").Code,
		"the addresses of a port share its rate")
}

func TestNewRefuses(t *testing.T) {
	good := Options{Lookup: testTable(t), TokenKey: make([]byte, minKey), Log: slog.New(slog.DiscardHandler)}
	_, err := New(good)
	require.NoError(t, err)
	for _, change := range []func(*Options){
		func(o *Options) { o.Lookup = nil },
		func(o *Options) { o.Log = nil },
		func(o *Options) { o.TokenKey = o.TokenKey[1:] },
	} {
		o := good
		change(&o)
		_, err := New(o)
		require.ErrorContains(t, err, "are required")
	}
}
