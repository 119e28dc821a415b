package vpc

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/trivet-cloud/trivet/nodeagent/netdev"
	"github.com/trivet-cloud/trivet/nodeagent/nettest"
	"github.com/trivet-cloud/trivet/nodeagent/nsthread"
	"github.com/trivet-cloud/trivet/shared/cloud"
)

// sizeVariable is the environment variable with the number of ports of TestPortsStartFiltered, and of revocations of
// TestRevocations.
const sizeVariable = "TRIVET_VPC_PORTS"

// size returns the number in sizeVariable, or 30.
func size(t *testing.T) int {
	text := os.Getenv(sizeVariable)
	if text == "" {
		return 30
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, sizeVariable)
	return n
}

// floodPort is the UDP port of the packets of flood.
const floodPort = 4000

// portsPerSubnet is the number of ports that a manyPorts has in each subnet.
const portsPerSubnet = 200

// manyPorts is a host with many ports in one VPC, each with a namespace as its guest. Ports with an odd number have the
// group "open", which permits packets from the groups "src" and "open". The others have the group "closed", which
// permits no incoming packets.
type manyPorts struct {
	*lab
	*labHost
	count    int
	revision int64
	records  []string // the records that were sent to the host
}

// base are the records of a manyPorts before its ports. The port psrc sends to all others, and the port pfar is on
// another host.
const base = `vpc big
group src any->
group open any-> any<-src any<-open
group closed any->
port psrc vpc=big subnet=s1 at=10.0.1.250 node=n1 groups=src gen=1
port pfar vpc=big subnet=s1 at=10.0.1.251 node=n2 groups=open gen=1`

func newManyPorts(t *testing.T, count int) *manyPorts {
	l := newLab(t, 0)
	l.resync = time.Second + time.Duration(count)*10*time.Millisecond
	m := &manyPorts{lab: l, labHost: l.addHost(1), count: count, revision: 1, records: strings.Split(base, "\n")}
	for net := 1; net <= subnetOf(count); net++ {
		m.records = append(m.records, fmt.Sprintf("subnet s%d vpc=big net=%d", net, net))
	}
	m.snapshot(m.revision, strings.Join(m.records, "\n"))
	m.labHost.endpoint("psrc")
	return m
}

func subnetOf(port int) int { return 1 + port/portsPerSubnet }

func portName(port int) cloud.PortID { return cloud.PortID(fmt.Sprint("p", port)) }

func addressOf(port int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, byte(subnetOf(port)), byte(10 + port%portsPerSubnet)})
}

// record returns the record of a port.
func record(port int, group string) string {
	return fmt.Sprintf("port %s vpc=big subnet=s%d at=%s node=n1 groups=%s gen=1",
		portName(port), subnetOf(port), addressOf(port), group)
}

// update sends records to the host and waits until they are applied.
func (m *manyPorts) update(lines ...string) {
	m.lab.Helper()
	m.revision++
	m.records = append(m.records, lines...)
	m.change(m.revision, strings.Join(lines, "\n"))
}

// endpointName returns the name of the namespace of a port's guest, as `ip netns` shows it.
func (m *manyPorts) endpointName(port cloud.PortID) string {
	return m.prefix + "e-" + m.name + "-" + string(port)
}

// startPorts sends the records of some ports to the host and attaches their guests at the same time.
func (m *manyPorts) startPorts(first, end int) {
	m.lab.Helper()
	group, ctx := errgroup.WithContext(m.lab.Context())
	group.SetLimit(8)
	var lines []string
	for port := first; port < end; port++ {
		lines = append(lines, record(port, []string{"closed", "open"}[port%2]))
	}
	done := make(chan error, 1)
	go func() {
		for port := first; port < end; port++ {
			group.Go(func() error {
				ctx, cancel := context.WithTimeout(ctx, wait)
				defer cancel()
				path := nsthread.Dir + "/" + m.endpointName(portName(port))
				return m.AttachVeth(ctx, portName(port), netdev.Endpoint{Namespace: path, Device: "eth0"})
			})
		}
		done <- group.Wait()
	}()
	m.update(lines...)
	require.NoError(m.lab, <-done)
}

// flood sends datagrams from psrc to all ports, without pause, until the test ends or stop is called.
func (m *manyPorts) flood() (stop func()) {
	t := m.lab.T
	t.Helper()
	// Static neighbours: the sender must not wait for ports that do not exist yet.
	for port := range min(m.count, portsPerSubnet) {
		a := addressOf(port).As4()
		m.ip("e-"+m.name+"-psrc", "neighbour add %s lladdr 02:00:%02x:%02x:%02x:%02x dev eth0 nud permanent",
			addressOf(port), a[0], a[1], a[2], a[3])
	}
	var socket *net.UDPConn
	require.NoError(t, nsthread.InNamed(m.endpointName("psrc"), func() (err error) {
		socket, err = net.ListenUDP("udp4", nil)
		return err
	}))
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() {
		defer socket.Close()
		for port := 0; ctx.Err() == nil; port = (port + 1) % m.count {
			// An error, such as of a port that does not exist yet, is the same as a lost packet.
			_, _ = socket.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(addressOf(port), floodPort))
		}
	})
	stop = func() { cancel(); done.Wait() }
	t.Cleanup(stop)
	return stop
}

// startQuietly starts all ports while no guest sends.
func (m *manyPorts) startQuietly() {
	m.lab.Helper()
	for port := range m.count {
		_, err := nsthread.Create(m.endpointName(portName(port)))
		require.NoError(m.lab, err)
	}
	m.startBatches()
}

func (m *manyPorts) startBatches() {
	m.lab.Helper()
	const batch = 50
	for first := 0; first < m.count; first += batch {
		m.startPorts(first, min(first+batch, m.count))
	}
}

// startAll starts all ports, in batches, while psrc sends to each of them. It returns the numbers of packets that ports
// in the group "closed" have received, and of ports in the group "open" that have received none.
func (m *manyPorts) startAll() (early, silent int) {
	t := m.lab.T
	var recorders []*nettest.Recorder
	for port := range m.count {
		name := m.endpointName(portName(port))
		_, err := nsthread.Create(name)
		require.NoError(t, err)
		recorders = append(recorders, nettest.Record(t, name))
	}
	stop := m.flood()
	m.startBatches()
	received := make([]int, m.count)
	open := func(missing int) int {
		for port := 1; port < m.count; port += 2 {
			if received[port] += recorders[port].UDP(floodPort); received[port] == 0 {
				missing++
			}
		}
		return missing
	}
	for deadline := time.Now().Add(wait); open(0) > 0 && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
	}
	stop()
	for port := 0; port < m.count; port += 2 {
		early += recorders[port].UDP(floodPort)
	}
	return early, open(0)
}

// TestPortsStartFiltered starts ports (TRIVET_VPC_PORTS, default 30) while another port sends to each of them without
// pause. From the first moment of its device, no port receives a packet that its groups do not permit.
func TestPortsStartFiltered(t *testing.T) {
	m := newManyPorts(t, size(t))
	early, silent := m.startAll()
	require.Zero(t, silent, "ports that may receive the packets have received none")
	require.Zero(t, early, "packets arrived before the rules")

	t.Log("rules are added and ports join groups under traffic: every datagram arrives")
	streams := nettest.StartStreams(t, 20*time.Millisecond, m.ring()...)
	for i := range min(m.count, 50) {
		m.update(fmt.Sprintf("group open any-> any<-src any<-open tcp/%d<-closed", 1000+i))
		m.update(fmt.Sprintf("port pnew%d vpc=big subnet=s1 at=10.0.1.252 node=n2 groups=open gen=1", i))
		m.update(fmt.Sprintf("delete pnew%d", i))
	}
	streams.Flow()
	t.Logf("%d datagrams on %d paths", streams.Sent(), len(m.ring()))
	streams.RequireComplete()

	t.Log("an agent that restarts writes nothing, and no datagram is lost")
	streams = nettest.StartStreams(t, 20*time.Millisecond, m.ring()...)
	writes := nettest.WatchWrites(t, m.prefix+m.vpcName("big"))
	writes.Settle()
	before := m.state(m.labHost, "big")
	m.stop()
	m.start()
	m.revision++
	m.snapshot(m.revision, strings.Join(newest(m.records), "\n"))
	streams.Flow()
	require.Empty(t, writes.Take())
	require.Equal(t, before, m.state(m.labHost, "big"))
	require.Zero(t, m.Counts().Writes)
	streams.RequireComplete()
}

// ring returns a path from each port in the group "open" to the next one.
func (m *manyPorts) ring() (paths []nettest.Path) {
	for port := 1; port+2 < m.count; port += 2 {
		paths = append(paths, nettest.Path{
			From: m.endpointName(portName(port)), To: m.endpointName(portName(port + 2)), Address: addressOf(port + 2),
		})
	}
	return paths
}

// newest returns the newest record of each ID, without those that were deleted.
func newest(records []string) (out []string) {
	last := map[string]int{}
	for i, r := range records {
		last[strings.Fields(r)[1]] = i
	}
	for i, r := range records {
		if last[strings.Fields(r)[1]] == i && !strings.HasPrefix(r, "delete ") {
			out = append(out, r)
		}
	}
	return out
}
