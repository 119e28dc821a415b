package main

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"

	"github.com/trivet-cloud/trivet/images/guest"

	"github.com/stretchr/testify/require"
)

func TestDevicesGetTheirDrivers(t *testing.T) {
	c := &catalogue{aliases: parseAliases(strings.Join([]string{
		"# Aliases extracted from modules themselves.",
		"alias pci:v00001AF4d*sv*sd*bc*sc*i* virtio_pci",
		"alias virtio:d00000002v* virtio_blk",
		"alias virtio:d00000008v* virtio_scsi",
		"alias acpi*:PNP0C0C:* button",
		"alias scsi:t-0x00* sd_mod",
		"alias fs-vfat vfat",
	}, "\n"))}
	for modalias, want := range map[string][]string{
		"pci:v00001AF4d00001042sv00001AF4sd00001100bc01sc00i00": {"virtio_pci"},
		"pci:v00008086d00002922sv00001AF4sd00001100bc01sc06i01": nil,
		"virtio:d00000002v00001AF4":                             {"virtio_blk"},
		"acpi:PNP0C0C:":                                         {"button"},
		"scsi:t-0x00":                                           {"sd_mod"},
		"fs-vfat":                                               {"vfat"},
		"":                                                      nil,
	} {
		require.Equal(t, want, c.wanted(modalias), modalias)
	}

	files, needs := parseDep("kernel/drivers/char/hw_random/virtio-rng.ko: kernel/b.ko kernel/a.ko\nkernel/a.ko:\n")
	require.Equal(t, "kernel/drivers/char/hw_random/virtio-rng.ko", files["virtio_rng"])
	require.Equal(t, []string{"kernel/b.ko", "kernel/a.ko"}, needs[files["virtio_rng"]])
	require.Empty(t, needs["kernel/a.ko"])
}

func TestOnlyAddedDevicesAreHandled(t *testing.T) {
	for event, want := range map[string]string{
		"add@/devices/x\x00ACTION=add\x00MODALIAS=virtio:d2v1\x00SEQNUM=7\x00":       "virtio:d2v1",
		"remove@/devices/x\x00ACTION=remove\x00MODALIAS=virtio:d2v1\x00SEQNUM=8\x00": "",
		"add@/devices/y\x00ACTION=add\x00SEQNUM=9\x00":                               "",
		"": "",
	} {
		modalias, ok := addedModalias([]byte(event))
		require.Equal(t, want != "", ok, event)
		if ok {
			require.Equal(t, want, modalias)
		}
	}
}

func TestPowerKeyPress(t *testing.T) {
	event := func(kind, code uint16, value uint32) []byte {
		b := make([]byte, inputEventSize)
		binary.NativeEndian.PutUint16(b[16:], kind)
		binary.NativeEndian.PutUint16(b[18:], code)
		binary.NativeEndian.PutUint32(b[20:], value)
		return b
	}
	syn := event(0, 0, 0)
	require.True(t, pressed(append(syn, event(evKey, keyPower, 1)...)))
	require.False(t, pressed(event(evKey, keyPower, 0)), "release")
	require.False(t, pressed(event(evKey, 30, 1)), "another key must not count")
	require.False(t, pressed(event(evKey, keyPower, 1)[:20]), "an incomplete event must not count")
	require.False(t, pressed(nil))
}

func TestExtentsAreWholeSectorsAndBounded(t *testing.T) {
	for _, c := range []struct {
		dev  string
		rest []string
		want extent
		fail string
	}{
		{"vda", nil, extent{"vda", 0, 1 << 20}, ""},
		{"/dev/vdb", []string{"512"}, extent{"vdb", 512, 1 << 20}, ""},
		{"vdb", []string{"0", "4096"}, extent{"vdb", 0, 4096}, ""},
		{"vdb", []string{"100"}, extent{}, "multiple of 512"},
		{"vdb", []string{"-512"}, extent{}, "multiple of 512"},
		{"vdb", []string{"0", "99999999999999999999"}, extent{}, "multiple of 512"},
		{"vdb", []string{"0", "268435968"}, extent{}, "at most"},
	} {
		got, err := parseExtent(c.dev, c.rest)
		if c.fail != "" {
			require.ErrorContains(t, err, c.fail)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.want, got)
	}
	for _, dev := range []string{"", "..", "../etc/passwd", "input/event0", "null"} {
		_, err := extent{dev: dev, len: guest.SectorSize}.sum()
		require.Error(t, err, dev)
	}
}

func TestLinesAreReassembled(t *testing.T) {
	r, w, err := os.Pipe()
	require.NoError(t, err)
	defer r.Close()
	port := &tty{file: r}
	sent := make(chan error, 1)
	go func() {
		var err error
		for _, piece := range []string{"i", "d\r", "\n\r\n", "TRIVET GUEST UP up=1.00\r\n", " sum  vda \n\x1b\x00off\n",
			strings.Repeat("x", 3*lineLimit), "\nid\n"} {
			if _, e := w.WriteString(piece); e != nil {
				err = e
			}
		}
		sent <- err
	}()
	for _, want := range []string{"id", "sum  vda", "off", strings.Repeat("x", lineLimit), "id"} {
		require.Equal(t, want, port.next())
	}
	require.NoError(t, <-sent)
	require.NoError(t, w.Close())
}

func TestProcessorListIsCounted(t *testing.T) {
	for list, want := range map[string]int{"0": 1, "0-3": 4, "0-1,4,6-7": 5, "": 0} {
		require.Equal(t, want, countList(list), list)
	}
}

func TestOutputIsBounded(t *testing.T) {
	var out output
	for range 3 {
		n, err := out.Write(make([]byte, maxOutput/2+1))
		require.NoError(t, err)
		require.Equal(t, maxOutput/2+1, n, "the process must not see a short write")
	}
	require.Equal(t, maxOutput, out.kept.Len())
}

func TestChangedNIC(t *testing.T) {
	name, action := changedNIC([]byte("add@/devices/x\x00ACTION=add\x00DEVPATH=/devices/x\x00SUBSYSTEM=net\x00INTERFACE=eth1\x00"))
	require.Equal(t, []string{"eth1", "add"}, []string{name, action})
	name, action = changedNIC([]byte("remove@/devices/x\x00ACTION=remove\x00SUBSYSTEM=net\x00INTERFACE=eth1\x00"))
	require.Equal(t, []string{"eth1", "remove"}, []string{name, action})
	_, action = changedNIC([]byte("add@/devices/x\x00ACTION=add\x00SUBSYSTEM=block\x00"))
	require.Empty(t, action)
}

// TestClientOfRemovedNIC requires that the DHCP client of an interface that was removed and added again ends, and leaves
// the new client alone. Otherwise two clients would configure one interface.
func TestClientOfRemovedNIC(t *testing.T) {
	old, c := &client{}, &client{}
	m := &machine{}
	m.net.clients = map[string]*client{"eth1": c}
	process := &os.Process{Pid: 1}
	if !m.setProcess("eth1", c, process) || c.process != process {
		t.Error("the client of the interface is not recorded")
	}
	if m.setProcess("eth1", old, nil) || c.process != process {
		t.Error("the client of the removed interface goes on")
	}
	if m.setProcess("eth2", old, nil) {
		t.Error("the client of an unknown interface goes on")
	}
}

func TestParseIPv6(t *testing.T) {
	const addresses = "fd12000000000000000000000000000a 02 80 00 40 eth0\n" +
		"fd120000000000000000000000000005 03 80 00 80 eth1\n" +
		"fe80000000000000000000fffe000001 02 40 20 80 eth0\n" +
		"broken\n00000000000000000000000000000001 01 80 10 80       lo\n"
	got := parseAddresses6(addresses, "eth0")
	require.Len(t, got, 2)
	require.Equal(t, netip.MustParsePrefix("fd12::a/128"), got[0].prefix)
	require.False(t, got[0].usable(), "duplicate address detection runs")
	require.True(t, got[1].usable())

	const none = "00000000000000000000000000000000"
	routes := "fd120000000000000000000000000000 40 " + none + " 00 " + none + " 00000100 00000001 00000000 00000001     eth0\n" +
		none + " 00 " + none + " 00 " + none + " ffffffff 00000001 00000000 00200200       lo\n" +
		none + " 00 " + none + " 00 fe80000000000000000000fffe000002 00000400 00000001 00000000 00450003     eth0\n"
	require.Equal(t, netip.MustParseAddr("fe80::ff:fe00:2"), parseRouter6(routes, "eth0"))
	require.False(t, parseRouter6(routes, "eth1").IsValid())
}

func TestAttribute(t *testing.T) {
	list := []byte{6, 0, 2, 0, 1, 2, 0, 0, 8, 0, 1, 0, 9, 0, 0, 0}
	require.Equal(t, []byte{9, 0, 0, 0}, attribute(list, 1))
	require.Equal(t, []byte{1, 2}, attribute(list, 2))
	require.Nil(t, attribute(list, 3))
	require.Nil(t, attribute([]byte{255, 0, 1, 0}, 1))
	require.Nil(t, attribute([]byte{0, 0, 1, 0}, 1))
}

// TestNewLease6 reads replies as servers send them when an interface gets another address, and when it gets none.
func TestNewLease6(t *testing.T) {
	reply := func(addresses ...*dhcpv6.OptIAAddress) *dhcpv6.Message {
		m := &dhcpv6.Message{MessageType: dhcpv6.MessageTypeReply}
		duid := &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: make([]byte, 6)}
		m.AddOption(dhcpv6.OptClientID(duid))
		m.AddOption(dhcpv6.OptServerID(duid))
		ia := &dhcpv6.OptIANA{T1: time.Minute}
		for _, a := range addresses {
			ia.Options.Add(a)
		}
		m.AddOption(ia)
		return m
	}
	address := net.ParseIP("fd12::a")
	lease, err := newLease6(reply(&dhcpv6.OptIAAddress{IPv6Addr: net.ParseIP("fd12::9")},
		&dhcpv6.OptIAAddress{IPv6Addr: address, ValidLifetime: time.Hour}))
	require.NoError(t, err)
	require.Equal(t, address, lease.address)
	require.Equal(t, []time.Duration{time.Minute, time.Hour}, []time.Duration{lease.renew, lease.valid})
	_, err = newLease6(reply())
	require.Error(t, err)
	_, err = newLease6(&dhcpv6.Message{MessageType: dhcpv6.MessageTypeReply})
	require.Error(t, err)
}
